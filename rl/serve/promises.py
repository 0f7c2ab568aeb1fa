"""What was asked for and may be asked after: each request once, its answer again for a while, all
of it within so many bytes.

A request counts with the bytes of its body until it has run, and with the bytes of its answer from
then on.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rl.serve.refusals import Refused
from rl.serve.shares import check_share
from rl.serve.stored import StoredAnswer, stored


@dataclass
class Promise:
    """A request that was taken. `digest`: of its body, so that what is sent again under its number
    is known to be the same (empty: an earlier server took it).
    """

    request_id: str
    owner: str
    what: str
    digest: bytes = b""
    # of the work; the result is dropped once it is stored
    done: Future = field(default_factory=Future)
    session: str = ""
    sequence_ids: list[str] | None = None
    tenant: str = ""
    size: int = 0  # bytes that are held for it
    ready: Future = field(default_factory=Future)  # gets the stored answer, and never an error
    finished: float | None = None  # when the answer was stored
    told: float | None = None  # when the answer was sent last

    @property
    def answer(self) -> StoredAnswer:
        return self.ready.result(0)

    async def wait(self, seconds: float) -> bool:
        """Whether its answer is there within `seconds`."""
        if not self.ready.done():
            await asyncio.wait([asyncio.wrap_future(self.ready)], timeout=seconds)
        return self.ready.done()


class Promises:
    """By request id. Only the owner is answered: to another one there is no such request.

    keep_seconds    how long an answer is kept that nobody asked for
    told_seconds    how long an answer is kept that was sent: a client whose connection broke asks
    again held_bytes      of all requests and answers; where they do not suffice, answers that
    nobody asked for in `told_seconds` go
    """

    def __init__(self, keep_seconds: float, told_seconds: float = 60.0, held_bytes: int = 2**30):
        self.keep_seconds = keep_seconds
        self.told_seconds = min(told_seconds, keep_seconds)
        self.held_bytes = held_bytes
        self.others: Callable[[str], bool] = lambda tenant: False
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()  # bytes by tenant
        self._all: dict[str, Promise] = {}
        self._swept = time.monotonic()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def held(self) -> int:
        """Bytes that are held for all tenants."""
        with self._lock:
            return self._held.total()

    def known(self, request_id: str, digest: bytes) -> Promise | None:
        """The promise of that id, where the same was asked for before. Refused (409 would be tried
        again: 400) for something else.
        """
        promise = self._all.get(request_id)
        if promise is not None and promise.digest and promise.digest != digest:
            raise Refused(
                400,
                f"{request_id} was asked for before, and was something else: a number stands for one request",
            )
        return promise

    def check_room(self, tenant: str, size: int) -> None:
        """Raise Refused (429) if a request of `size` bytes exceeds the bytes that are held, or the
        tenant's part of them.
        """
        # oldest last; a scan of everything, so only where it is needed
        late: list[Promise] | None = None
        while (refusal := self._refusal(tenant, size)) is not None:
            late = (
                [promise for promise in self._late() if promise.tenant == tenant][::-1]
                if late is None
                else late
            )
            if not late:
                raise refusal
            self._forget(late.pop())

    def _refusal(self, tenant: str, size: int) -> Refused | None:
        with self._lock:
            total, mine = self._held.total(), self._held[tenant]
        if not mine and total + size <= self.held_bytes:
            return None  # a tenant that holds nothing may have one request
        try:
            what = "bytes held of requests and of answers that were not fetched (--held-bytes)"
            check_share(
                what, self.held_bytes, total, mine, self.others(tenant), more=size, retry_after=1.0
            )
        except Refused as refusal:
            return refusal
        return None

    def add(self, promise: Promise) -> Promise:
        self._all[promise.request_id] = promise
        with self._lock:
            self._held[promise.tenant] += promise.size
        promise.done.add_done_callback(lambda done: self._store(promise, done))
        self.sweep()
        return promise

    def _store(self, promise: Promise, done: Future) -> None:
        """Keep the bytes of a result in the place of the result. Runs on the thread that settled
        `done`.
        """
        answer = stored(done, promise.what)
        with self._lock:
            if promise.request_id in self._all:
                self._held[promise.tenant] += len(answer.body) - promise.size
                promise.size = len(answer.body)
        promise.finished = time.monotonic()
        promise.ready.set_result(answer)
        # only now: whoever cancels `done` must not meet a `ready` that is still open
        promise.done = promise.ready

    def find(self, request_id: str, owner: str) -> Promise:
        promise = self._all.get(request_id)
        if promise is None or promise.owner != owner:
            kept = f"answers are kept for {self.told_seconds:.0f} s after they were sent, unsent ones for {self.keep_seconds:.0f} s"
            raise Refused(
                410, f"unknown request id: it has expired ({kept}), or was of an earlier server"
            )
        return promise

    def sweep(self) -> None:
        """Forget expired answers, at most every so often. A request that never ends keeps no other
        one.
        """
        now = time.monotonic()
        if now - self._swept < self.told_seconds / 64:
            return
        self._swept = now
        for promise in list(self._all.values()):
            if promise.told is not None:
                late = now - promise.told >= self.told_seconds
            else:
                late = promise.finished is not None and now - promise.finished >= self.keep_seconds
            if late:
                self._forget(promise)
        for promise in self._late() if self.held > self.held_bytes else ():
            if self.held > self.held_bytes:
                self._forget(promise)

    def _late(self) -> list[Promise]:
        """The answers that nobody asked for in `told_seconds`, the oldest first."""
        late = time.monotonic() - self.told_seconds
        return [
            one
            for one in list(self._all.values())
            if one.told is None and one.finished is not None and one.finished < late
        ]

    def _forget(self, promise: Promise) -> None:
        with self._lock:
            if self._all.pop(promise.request_id, None) is None:
                return
            self._held[promise.tenant] -= promise.size
            if not self._held[promise.tenant]:
                del self._held[promise.tenant]


def digest_of(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()


def settled(promise: Promise, result: Any = None, error: BaseException | None = None) -> Promise:
    """The same with its answer, which was known when it was asked for."""
    if error is None:
        promise.done.set_result(result)
    else:
        promise.done.set_exception(error)
    return promise
