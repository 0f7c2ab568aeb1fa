"""Store requests and their results within a limit of bytes.

Each request runs once. Its result can be fetched again for a while. A request counts with the
bytes of its body until it has run, and with the bytes of its result afterwards.
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
    """Hold a request that the server accepted.

    `digest` is the digest of its body. It tells a repeated request from another request under the
    same id. It is empty if an earlier server accepted the request.
    """

    request_id: str
    owner: str
    what: str
    digest: bytes = b""
    # of the work; the result is dropped after it has been encoded
    done: Future = field(default_factory=Future)
    session: str = ""
    sequence_ids: list[str] | None = None
    tenant: str = ""
    size: int = 0  # bytes that it holds in memory
    # resolves to the encoded result; never holds an exception
    ready: Future = field(default_factory=Future)
    finished: float | None = None  # time.monotonic() at which the result was stored
    told: float | None = None  # time.monotonic() at which the result was last sent

    @property
    def answer(self) -> StoredAnswer:
        """Return the encoded result. Raises TimeoutError if the request has not finished."""
        return self.ready.result(0)

    async def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the result. Return whether it is available."""
        if not self.ready.done():
            await asyncio.wait([asyncio.wrap_future(self.ready)], timeout=seconds)
        return self.ready.done()


class Promises:
    """Store requests by request id. For any owner but the request's, the id is unknown.

    keep_seconds    seconds for which a result that was never fetched is kept
    told_seconds    seconds for which a result is kept after it was sent, so that a client can fetch
                    it again after a broken connection
    held_bytes      limit on the bytes of all requests and results; if they exceed it, results that
                    were not fetched within `told_seconds` are removed
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
        """Return the bytes held for all tenants."""
        with self._lock:
            return self._held.total()

    def known(self, request_id: str, digest: bytes) -> Promise | None:
        """Return the stored request of this id, or None if the id is new.

        Raises Refused (400) if the stored request has another digest. The status is not 409,
        because clients retry a 409.
        """
        request = self._all.get(request_id)
        if request is not None and request.digest and request.digest != digest:
            raise Refused(
                400,
                f"{request_id} was used before for something else: use a new number for each "
                "request",
            )
        return request

    def check_room(self, tenant: str, size: int) -> None:
        """Raise Refused (429) if `size` more bytes exceed `held_bytes` or the tenant's share.

        Results of the tenant that were not fetched in time are removed first.
        """
        # oldest last; computed only if needed, because it scans all requests
        stale: list[Promise] | None = None
        while (refusal := self._refusal(tenant, size)) is not None:
            stale = (
                [request for request in self._late() if request.tenant == tenant][::-1]
                if stale is None
                else stale
            )
            if not stale:
                raise refusal
            self._forget(stale.pop())

    def _refusal(self, tenant: str, size: int) -> Refused | None:
        """Return the error for `size` more bytes of a tenant, or None if they fit."""
        with self._lock:
            total, tenant_bytes = self._held.total(), self._held[tenant]
        if not tenant_bytes and total + size <= self.held_bytes:
            return None  # a tenant without requests may have a single large request
        try:
            what = "bytes of requests and of results that were not fetched (--held-bytes)"
            check_share(
                what,
                self.held_bytes,
                total,
                tenant_bytes,
                self.others(tenant),
                more=size,
                retry_after=1.0,
            )
        except Refused as refusal:
            return refusal
        return None

    def add(self, promise: Promise) -> Promise:
        """Store a request, and encode its result as soon as its work is done."""
        self._all[promise.request_id] = promise
        with self._lock:
            self._held[promise.tenant] += promise.size
        promise.done.add_done_callback(lambda done: self._store(promise, done))
        self.sweep()
        return promise

    def _store(self, promise: Promise, done: Future) -> None:
        """Replace a result by its encoded bytes. Runs on the thread that resolved `done`."""
        answer = stored(done, promise.what)
        with self._lock:
            if promise.request_id in self._all:
                self._held[promise.tenant] += len(answer.body) - promise.size
                promise.size = len(answer.body)
        promise.finished = time.monotonic()
        promise.ready.set_result(answer)
        # last, so that cancelling `done` never cancels an unresolved `ready`
        promise.done = promise.ready

    def find(self, request_id: str, owner: str) -> Promise:
        """Return a request. Raises Refused (410) if the id is unknown or has another owner."""
        request = self._all.get(request_id)
        if request is None or request.owner != owner:
            retention = (
                f"results are kept for {self.told_seconds:.0f} s after they were sent, unsent "
                f"results for {self.keep_seconds:.0f} s"
            )
            raise Refused(
                410,
                f"unknown request id: it has expired ({retention}), or belongs to an earlier "
                "server",
            )
        return request

    def sweep(self) -> None:
        """Remove expired results, at most every `told_seconds` / 64.

        A request that never ends does not delay the removal of others.
        """
        now = time.monotonic()
        if now - self._swept < self.told_seconds / 64:
            return
        self._swept = now
        for request in list(self._all.values()):
            if request.told is not None:
                expired = now - request.told >= self.told_seconds
            else:
                expired = (
                    request.finished is not None and now - request.finished >= self.keep_seconds
                )
            if expired:
                self._forget(request)
        for request in self._late() if self.held > self.held_bytes else ():
            if self.held > self.held_bytes:
                self._forget(request)

    def _late(self) -> list[Promise]:
        """Return the requests with results not fetched within `told_seconds`, oldest first."""
        stale_before = time.monotonic() - self.told_seconds
        return [
            request
            for request in list(self._all.values())
            if request.told is None
            and request.finished is not None
            and request.finished < stale_before
        ]

    def _forget(self, promise: Promise) -> None:
        """Remove a request and subtract its bytes. Do nothing if it was removed before."""
        with self._lock:
            if self._all.pop(promise.request_id, None) is None:
                return
            self._held[promise.tenant] -= promise.size
            if not self._held[promise.tenant]:
                del self._held[promise.tenant]


def digest_of(*parts: bytes) -> bytes:
    """Return the 16-byte BLAKE2b digest of the parts, joined by zero bytes."""
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()


def settled(promise: Promise, result: Any = None, error: BaseException | None = None) -> Promise:
    """Resolve a request whose result or error is already known, and return the request."""
    if error is None:
        promise.done.set_result(result)
    else:
        promise.done.set_exception(error)
    return promise
