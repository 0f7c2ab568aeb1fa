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

from rl.jsonl import finite
from rl.serve import convert
from rl.serve.answers import JsonAnswer
from rl.serve.refusals import Category, Interrupted, Refused, told
from rl.types import ForwardBackwardOutput, SampleResponse

PROTOBUF = "application/x-protobuf"
Kind = Literal["outputs", "samples", "json", "error", "interrupted"]


@dataclass(frozen=True)
class StoredAnswer:
    """Hold an encoded result. `kind` is the type of `body`."""

    kind: Kind
    body: bytes

    def response(self, protobuf: bool) -> Response:
        """Return the HTTP response, in protobuf or in JSON.

        Raises Refused (503) if the server shut down before it ran the request.
        """
        if self.kind == "interrupted":
            raise Refused(
                503,
                "the server is shutting down and has not started this request: try again",
                retry_after=5.0,
            )
        if self.kind in ("json", "error"):
            return Response(self.body, media_type="application/json")
        if protobuf:
            return Response(self.body, media_type=PROTOBUF)
        if self.kind == "outputs":
            return JsonAnswer(convert.output_json(convert.read_outputs(self.body)))
        return JsonAnswer(convert.sample_json(convert.read_samples(self.body)))


def stored(done: Future, what: str) -> StoredAnswer:
    """Encode the result of a finished future. An error is kept as its message and category."""
    if done.cancelled():
        return _error("the request was cancelled", "user")
    error = done.exception()
    if error is None:
        try:
            return _encoded(done.result())
        except Exception as caught:  # boundary: a failed encoding is a result too
            error = caught
    if isinstance(error, Interrupted):
        return StoredAnswer("interrupted", b"")
    return _error(*told(error, what))


def _encoded(result: Any) -> StoredAnswer:
    """Encode a result. Raises ValueError or TypeError if it cannot be encoded."""
    if isinstance(result, ForwardBackwardOutput):
        return StoredAnswer("outputs", convert.forward_backward_output(result))
    if isinstance(result, SampleResponse):
        return StoredAnswer("samples", convert.sample_response(result))
    return StoredAnswer(
        "json", json.dumps(finite(result), separators=(",", ":"), allow_nan=False).encode("ascii")
    )


def _error(message: str, category: Category) -> StoredAnswer:
    """Encode an error. The message is cut to 10,000 characters."""
    return StoredAnswer(
        "error", json.dumps({"error": message[:10_000], "category": category}).encode("ascii")
    )
