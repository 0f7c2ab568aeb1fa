"""Store requests and their encoded results within a limit of bytes.

A finished request keeps only its response: protobuf if the result has a message type, otherwise
JSON. It keeps no object, request or traceback.

Each request runs once. Its result can be fetched again for a while. A request counts with the
bytes of its body until it has run, and with the bytes of its result afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from rl.serve import conversion
from rl.serve.http_errors import (
    HttpError,
    SafeJSONResponse,
    ShutdownError,
    to_http_error,
)
from rl.serve.scheduler import TenantCounter, check_share
from rl.types import ForwardBackwardOutput, SampleResponse

PROTOBUF_TYPE = "application/x-protobuf"


@dataclass(frozen=True)
class EncodedResult:
    """Hold an encoded result: JSON, or protobuf with its converter to JSON. The body is empty if
    the server shut down before it ran the request.
    """

    body: bytes
    to_json: Callable[[bytes], dict[str, Any]] | None = None

    def to_response(self, protobuf: bool) -> Response:
        """Return the HTTP response, in protobuf or in JSON.

        Raises HttpError (503) if the server shut down before it ran the request.
        """
        if not self.body:
            raise ShutdownError()
        if self.to_json is None:
            return Response(self.body, media_type="application/json")
        if protobuf:
            return Response(self.body, media_type=PROTOBUF_TYPE)
        return SafeJSONResponse(self.to_json(self.body))


def encode_future(future: Future, verb: str) -> EncodedResult:
    """Encode the result of a finished future. An error is kept as its category and its message, of
    at most 10,000 characters.
    """
    error: BaseException | None = HttpError(400, "the request was cancelled")
    if not future.cancelled() and (error := future.exception()) is None:
        result = future.result()
        try:
            if isinstance(result, ForwardBackwardOutput):
                return EncodedResult(conversion.encode_output(result), conversion.output_to_json)
            if isinstance(result, SampleResponse):
                return EncodedResult(conversion.encode_samples(result), conversion.samples_to_json)
            return EncodedResult(SafeJSONResponse.render(result))
        except Exception as caught:  # boundary: a failed encoding is a result too
            error = caught
    assert error is not None
    if isinstance(error, ShutdownError):
        return EncodedResult(b"")
    http_error = to_http_error(error, verb)
    fields = {"error": http_error.message[:10_000], "category": http_error.category}
    return EncodedResult(SafeJSONResponse.render(fields))


@dataclass
class PendingRequest:
    """Hold a request that the server accepted.

    `digest` is the digest of its body. It tells a repeated request from another request under the
    same id. It is empty if an earlier server accepted the request.
    """

    request_id: str
    owner: str
    verb: str
    digest: bytes = b""
    # of the work; the result is dropped after it has been encoded
    work_future: Future = field(default_factory=Future)
    sequence_ids: list[str] | None = None
    tenant: str = ""
    size: int = 0  # bytes that it holds in memory
    # resolves to the encoded result; never holds an exception
    result_future: Future = field(default_factory=Future)
    finished_at: float | None = None  # time.monotonic() at which the result was stored
    sent_at: float | None = None  # time.monotonic() at which the result was last sent

    @property
    def encoded_result(self) -> EncodedResult:
        """Return the encoded result. Raises TimeoutError if the request has not finished."""
        return self.result_future.result(0)

    async def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the result. Return whether it is available."""
        if not self.result_future.done():
            await asyncio.wait([asyncio.wrap_future(self.result_future)], timeout=seconds)
        return self.result_future.done()


class RequestStore:
    """Store requests by request id. For any owner but the request's, the id is unknown.

    keep_seconds    seconds for which a result that was never fetched is kept
    resend_seconds  seconds for which a result is kept after it was sent, so that a client can fetch
                    it again after a broken connection
    held_bytes      limit on the bytes of all requests and results; if they exceed it, results that
                    were not fetched within `resend_seconds` are removed
    """

    def __init__(
        self,
        keep_seconds: float,
        resend_seconds: float = 60.0,
        held_bytes: int = 2**30,
        has_others: Callable[[str], bool] = lambda tenant: False,
    ):
        self.keep_seconds = keep_seconds
        self.resend_seconds = min(resend_seconds, keep_seconds)
        self.held_bytes, self.has_others = held_bytes, has_others
        self._lock = threading.Lock()
        self._tenant_bytes = TenantCounter()
        self._requests: dict[str, PendingRequest] = {}
        self._swept_at = time.monotonic()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def total_bytes(self) -> int:
        """Return the bytes held for all tenants."""
        with self._lock:
            return self._tenant_bytes.total()

    def find_duplicate(self, request_id: str, digest: bytes) -> PendingRequest | None:
        """Return the stored request of this id, or None if the id is new.

        Raises HttpError (400) if the stored request has another digest. The status is not 409,
        because clients retry a 409.
        """
        request = self._requests.get(request_id)
        if request is not None and request.digest and request.digest != digest:
            raise HttpError(
                400,
                f"{request_id} was used before for something else: use a new number for each "
                "request",
            )
        return request

    def check_capacity(self, tenant: str, size: int) -> None:
        """Raise HttpError (429) if `size` more bytes exceed `held_bytes` or the tenant's share.

        Results of the tenant that were not fetched in time are removed first.
        """
        try:
            self._check_share(tenant, size)
        except HttpError:
            for request in self._unfetched_requests():
                if request.tenant == tenant:
                    self._remove(request)
                    with contextlib.suppress(HttpError):
                        return self._check_share(tenant, size)
            raise

    def _check_share(self, tenant: str, size: int) -> None:
        """Raise HttpError (429) if `size` more bytes of a tenant do not fit now."""
        with self._lock:
            total, tenant_bytes = self._tenant_bytes.total(), self._tenant_bytes[tenant]
        # a tenant without requests may have a single large request
        if tenant_bytes or total + size > self.held_bytes:
            check_share(
                "bytes of requests and of results that were not fetched (--held-bytes)",
                self.held_bytes,
                total,
                tenant_bytes,
                self.has_others(tenant),
                amount=size,
                retry_after=1.0,
            )

    def add(self, request: PendingRequest, result: Any = None) -> PendingRequest:
        """Store a request, and encode its result as soon as its work is done.

        `result`: the result of a request whose work has been done before.
        """
        if result is not None:
            request.work_future.set_result(result)
        self._requests[request.request_id] = request
        with self._lock:
            self._tenant_bytes.change(request.tenant, request.size)
        request.work_future.add_done_callback(lambda done: self._store_result(request, done))
        self.remove_expired()
        return request

    def _store_result(self, request: PendingRequest, work_future: Future) -> None:
        """Replace a result by its encoded bytes. Runs on the thread that resolved `work_future`."""
        answer = encode_future(work_future, request.verb)
        with self._lock:
            if request.request_id in self._requests:
                self._tenant_bytes.change(request.tenant, len(answer.body) - request.size)
                request.size = len(answer.body)
        request.finished_at = time.monotonic()
        request.result_future.set_result(answer)
        # last, so that cancelling `work_future` never cancels an unresolved `result_future`
        request.work_future = request.result_future

    def find_request(self, request_id: str, owner: str) -> PendingRequest:
        """Return a request. Raises HttpError (410) if the id is unknown or has another owner."""
        request = self._requests.get(request_id)
        if request is None or request.owner != owner:
            raise HttpError(
                410,
                "unknown request id: it has expired (results are kept for "
                f"{self.resend_seconds:.0f} s after they were sent, unsent results for "
                f"{self.keep_seconds:.0f} s), or belongs to an earlier server",
            )
        return request

    def remove_expired(self) -> None:
        """Remove expired results, at most every `resend_seconds` / 64.

        A request that never ends does not delay the removal of others.
        """
        now = time.monotonic()
        if now - self._swept_at < self.resend_seconds / 64:
            return
        self._swept_at = now
        for request in list(self._requests.values()):
            begin, seconds = request.sent_at, self.resend_seconds
            if begin is None:
                begin, seconds = request.finished_at, self.keep_seconds
            if begin is not None and now - begin >= seconds:
                self._remove(request)
        for request in self._unfetched_requests() if self.total_bytes > self.held_bytes else ():
            if self.total_bytes > self.held_bytes:
                self._remove(request)

    def _unfetched_requests(self) -> list[PendingRequest]:
        """Return the requests with results not fetched within `resend_seconds`, oldest first."""
        stale_before = time.monotonic() - self.resend_seconds
        return [
            request
            for request in list(self._requests.values())
            if request.sent_at is None
            and request.finished_at is not None
            and request.finished_at < stale_before
        ]

    def _remove(self, request: PendingRequest) -> None:
        """Remove a request and subtract its bytes. Do nothing if it was removed before."""
        with self._lock:
            if self._requests.pop(request.request_id, None) is None:
                return
            self._tenant_bytes.change(request.tenant, -request.size)


def compute_digest(*parts: bytes) -> bytes:
    """Return the 16-byte BLAKE2b digest of the parts, joined by zero bytes."""
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()
