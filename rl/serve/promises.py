"""What was asked for and may be asked after: each request once, its answer as often as it is wanted."""

from __future__ import annotations

import asyncio
import hashlib
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rl.serve.refusals import Refused


@dataclass
class Promise:
    """A request that was taken. `digest`: of its body, so that what is sent again under its number is known to be the same
    (empty: an earlier server took it)."""

    request_id: str
    owner: str
    what: str
    digest: bytes = b""
    done: Future = field(default_factory=Future)
    session: str = ""
    sequence_ids: list[str] | None = None
    made: float = field(default_factory=time.monotonic)
    told: float | None = None  # when its answer was first given, or first seen to be there

    async def wait(self, seconds: float) -> bool:
        """Whether it is done within `seconds`."""
        if not self.done.done():
            waiting = asyncio.wrap_future(self.done)
            waiting.add_done_callback(lambda told: told.cancelled() or told.exception())  # unread ones end in the log
            await asyncio.wait([waiting], timeout=seconds)
        return self.done.done()


class Promises:
    """By request id. Only the owner is answered: to another one there is no such request."""

    def __init__(self, keep_seconds: float):
        self.keep_seconds = keep_seconds
        self._all: dict[str, Promise] = {}
        self._swept = time.monotonic()

    def __len__(self) -> int:
        return len(self._all)

    def known(self, request_id: str, digest: bytes) -> Promise | None:
        """The promise of that id, where the same was asked for before. Refused (409 would be tried again: 400) for something else."""
        promise = self._all.get(request_id)
        if promise is not None and promise.digest and promise.digest != digest:
            raise Refused(400, f"{request_id} was asked for before, and was something else: a number stands for one request")
        return promise

    def add(self, promise: Promise) -> Promise:
        self._all[promise.request_id] = promise
        self._forget_old()
        return promise

    def find(self, request_id: str, owner: str) -> Promise:
        promise = self._all.get(request_id)
        if promise is None or promise.owner != owner:
            raise Refused(410, "no such request is known: it was answered long ago, or before the server was started again")
        return promise

    def _forget_old(self) -> None:
        """Answers that were given, or could have been, `keep_seconds` ago. All are looked at, now and then: one that never ends (its turn
        does not come) keeps none of those that came after it."""
        now = time.monotonic()
        if now - self._swept < self.keep_seconds / 64:
            return
        self._swept = now
        for promise in [promise for promise in self._all.values() if promise.done.done()]:
            promise.told = promise.told or now
            if now - promise.told >= self.keep_seconds:
                del self._all[promise.request_id]


def digest_of(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()


def settled(promise: Promise, result: Any = None, error: BaseException | None = None) -> Promise:
    """The same with its answer, which was known when it was asked for."""
    if error is None:
        promise.done.set_result(result)
    else:
        promise.done.set_exception(error)
    return promise
