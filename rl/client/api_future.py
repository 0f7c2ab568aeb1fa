"""Provide futures that can be waited for (`.result()`) or awaited."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, ParamSpec, TypeVar

from rl.client.service_context import ServiceContext, free_when_collected

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


class APIFuture(Generic[T]):
    """Hold the result of a submitted verb that may not have run yet.

    `before_wait` runs at the first wait: sample requests held back are submitted as a batch then.
    """

    def __init__(
        self,
        future: concurrent.futures.Future,
        convert: Callable[[Any], T] | None = None,
        before_wait: Callable[[], None] | None = None,
    ):
        self._future = future
        self._converter = convert
        self._before_wait = before_wait

    def _run_before_wait(self) -> None:
        """Call `before_wait` once."""
        if self._before_wait is not None:
            self._before_wait()
            self._before_wait = None

    def _convert(self, value: Any) -> T:
        """Convert the verb's result."""
        return self._converter(value) if self._converter is not None else value

    def done(self) -> bool:
        """Return whether the verb has ended."""
        self._run_before_wait()
        return self._future.done()

    def result(self, timeout: float | None = None) -> T:
        """Wait at most `timeout` seconds (None: until the verb ends). Return the result, or raise
        the verb's error. Raises TimeoutError if the verb has not ended.
        """
        self._run_before_wait()
        try:
            return self._convert(self._future.result(timeout))
        except concurrent.futures.TimeoutError:
            if self._future.done():
                raise
            raise _make_timeout_error(timeout, "result") from None
        finally:
            del self  # a cycle with the traceback would keep the verb's tensors

    async def result_async(self, timeout: float | None = None) -> T:
        """Await the result. Raises the verb's error, or TimeoutError after `timeout` seconds."""
        # Yield to the event loop first: coroutines gathered together all submit before the first
        # of them waits, so their samples run as a single batch, which is always the same.
        await asyncio.sleep(0)
        self._run_before_wait()
        waiter = asyncio.wrap_future(self._future)
        try:
            return self._convert(await asyncio.wait_for(waiter, timeout))
        except TimeoutError:
            if self._future.done():
                raise
            raise _make_timeout_error(timeout, "result_async") from None

    def future(self) -> concurrent.futures.Future:
        """Return the converted result as a `concurrent.futures.Future`, for `wait`, `as_completed`
        and callbacks.
        """
        self._run_before_wait()
        converted: concurrent.futures.Future = concurrent.futures.Future()
        # cannot be cancelled: a submitted verb runs even if its caller stops waiting
        converted.set_running_or_notify_cancel()

        def forward_result(done: concurrent.futures.Future) -> None:
            try:
                converted.set_result(self._convert(done.result()))
            except BaseException as error:  # raised by `converted.result()`
                converted.set_exception(error)

        self._future.add_done_callback(forward_result)
        return converted

    async def coroutine(self) -> T:
        """Return a coroutine of the result, for functions that require a coroutine, such as
        `asyncio.create_task`.
        """
        return await self

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()


def _make_timeout_error(timeout: float | None, method: str) -> TimeoutError:
    return TimeoutError(
        f"the call has not ended after {timeout} s; it keeps running: call {method}() again"
    )


def make_completed(value: T) -> APIFuture[T]:
    """Return a completed future of `value`."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    future.set_result(value)
    return APIFuture(future)


class SavedState(APIFuture[Any]):
    """Hold the future of a `save_state`, with the checkpoint's folder."""

    @property
    def artifact_id(self) -> str:
        """Return the checkpoint's folder once it is written, as `create_training_client(config,
        checkpoint_id=...)` takes it.
        """
        return str(self.result().path)


class AwaitableClient(APIFuture[Any]):
    """Let a client also be used as a future of itself: `create_x()`, `create_x().result()`, `await
    create_x()`.

    `created`: the future of the verb that made the client. `cleanup`: the verb that frees what the
    client holds on the ranks under `number`, once the client is released or collected.
    """

    def __init__(
        self,
        context: ServiceContext,
        created: concurrent.futures.Future,
        cleanup: str,
        number: int,
    ):
        super().__init__(created)
        self._context, self._driver = context, context.driver
        self._finalizer = free_when_collected(self, context.driver, cleanup, number)

    def _convert(self, value: Any) -> Any:
        return self

    def release(self) -> None:
        """Free the model's memory now, not when the client is collected."""
        self._finalizer()


def make_async(method: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Return the `*_async` form of a method that returns a future: it is awaited twice."""

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return method(*args, **kwargs)

    return call


def make_awaited(method: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Return the `*_async` form of a method that makes a client or a sample: it is awaited once."""

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return await method(*args, **kwargs)

    return call
