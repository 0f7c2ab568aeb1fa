"""Encode results as bytes: a finished request keeps only the encoded response.

It keeps no object, request or traceback. The encoding is protobuf if the result has a message
type, otherwise JSON.
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from starlette.responses import Response

from rl.jsonl import replace_nonfinite
from rl.serve import conversion
from rl.serve.http_errors import ErrorCategory, HttpError, ShutdownError, to_http_error
from rl.serve.json_response import SafeJSONResponse
from rl.types import ForwardBackwardOutput, SampleResponse

PROTOBUF_TYPE = "application/x-protobuf"
ResultKind = Literal["outputs", "samples", "json", "error", "interrupted"]


@dataclass(frozen=True)
class EncodedResult:
    """Hold an encoded result. `kind` is the type of `body`."""

    kind: ResultKind
    body: bytes

    def to_response(self, protobuf: bool) -> Response:
        """Return the HTTP response, in protobuf or in JSON.

        Raises HttpError (503) if the server shut down before it ran the request.
        """
        if self.kind == "interrupted":
            raise HttpError(
                503,
                "the server is shutting down and has not started this request: try again",
                retry_after=5.0,
            )
        if self.kind in ("json", "error"):
            return Response(self.body, media_type="application/json")
        if protobuf:
            return Response(self.body, media_type=PROTOBUF_TYPE)
        if self.kind == "outputs":
            return SafeJSONResponse(conversion.output_to_json(conversion.decode_output(self.body)))
        return SafeJSONResponse(conversion.samples_to_json(conversion.decode_samples(self.body)))


def encode_future(future: Future, verb: str) -> EncodedResult:
    """Encode the result of a finished future. An error is kept as its message and category."""
    if future.cancelled():
        return _encode_error("the request was cancelled", "user")
    error = future.exception()
    if error is None:
        try:
            return _encode_result(future.result())
        except Exception as caught:  # boundary: a failed encoding is a result too
            error = caught
    if isinstance(error, ShutdownError):
        return EncodedResult("interrupted", b"")
    http_error = to_http_error(error, verb)
    return _encode_error(http_error.message, http_error.category)


def _encode_result(result: Any) -> EncodedResult:
    """Encode a result. Raises ValueError or TypeError if it cannot be encoded."""
    if isinstance(result, ForwardBackwardOutput):
        return EncodedResult("outputs", conversion.encode_output(result))
    if isinstance(result, SampleResponse):
        return EncodedResult("samples", conversion.encode_samples(result))
    return EncodedResult(
        "json",
        json.dumps(replace_nonfinite(result), separators=(",", ":"), allow_nan=False).encode(
            "ascii"
        ),
    )


def _encode_error(message: str, category: ErrorCategory) -> EncodedResult:
    """Encode an error. The message is cut to 10,000 characters."""
    return EncodedResult(
        "error", json.dumps({"error": message[:10_000], "category": category}).encode("ascii")
    )
