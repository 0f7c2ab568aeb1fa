"""Futures that can be waited for (`.result()`) or awaited."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class APIFuture(Generic[T]):
    """The result of a verb that was submitted and may not have run yet.

    `before_wait` runs when somebody first waits: samples that were asked for one by one are sent
    together then.
    """

    def __init__(
        self,
        future: concurrent.futures.Future,
        convert: Callable[[Any], T] | None = None,
        before_wait: Callable[[], None] | None = None,
    ):
        self._future = future
        self._convert = convert
        self._before_wait = before_wait

    def _prepare(self) -> None:
        if self._before_wait is not None:
            self._before_wait()
            self._before_wait = None

    def _finish(self, value: Any) -> T:
        return self._convert(value) if self._convert is not None else value

    def done(self) -> bool:
        self._prepare()
        return self._future.done()

    def result(self, timeout: float | None = None) -> T:
        """Waits at most `timeout` seconds (None: until the verb ends) and returns the result or
        raises its error.
        """
        self._prepare()
        try:
            return self._finish(self._future.result(timeout))
        except concurrent.futures.TimeoutError:
            if self._future.done():
                raise
            raise TimeoutError(
                f"the verb has not ended after {timeout} s; it goes on, and result() may be called again"
            ) from None

    async def result_async(self, timeout: float | None = None) -> T:
        # One turn of the event loop first: coroutines gathered together all submit before the first
        # of them waits, so their samples run as one batch, and always the same one.
        await asyncio.sleep(0)
        self._prepare()
        return self._finish(await asyncio.wait_for(asyncio.wrap_future(self._future), timeout))

    def future(self) -> concurrent.futures.Future:
        """The same as a `concurrent.futures.Future`, for `wait`, `as_completed` and callbacks."""
        self._prepare()
        mine: concurrent.futures.Future = concurrent.futures.Future()
        # a verb that was submitted runs, whoever stops waiting for it
        mine.set_running_or_notify_cancel()

        def pass_on(done: concurrent.futures.Future) -> None:
            try:
                mine.set_result(self._finish(done.result()))
            except BaseException as error:  # told to whoever holds `mine`
                mine.set_exception(error)

        self._future.add_done_callback(pass_on)
        return mine

    async def coroutine(self) -> T:
        """For what takes a coroutine alone, such as `asyncio.create_task`."""
        return await self

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()


class SavedState(APIFuture[Any]):
    """The future of a `save_state`, with the checkpoint's address at hand."""

    @property
    def artifact_id(self) -> str:
        """The checkpoint's folder, once it is written: what `create_training_client(config,
        checkpoint_id=...)` takes.
        """
        return str(self.result().path)


class IsItsOwnFuture:
    """A client that may also be used as the future of itself: `create_x()`, `create_x().result()`,
    `await create_x()`.

    Subclasses set `_created`, the future of the verb that made them.
    """

    _created: concurrent.futures.Future

    def result(self, timeout: float | None = None) -> Any:
        return self._itself().result(timeout)

    async def result_async(self, timeout: float | None = None) -> Any:
        return await self._itself().result_async(timeout)

    def future(self) -> concurrent.futures.Future:
        return self._itself().future()

    def done(self) -> bool:
        return self._created.done()

    async def coroutine(self) -> Any:
        return await self.result_async()

    def __await__(self) -> Generator[Any, None, Any]:
        return self.result_async().__await__()

    def _itself(self) -> APIFuture[Any]:
        return APIFuture(self._created, lambda _: self)
