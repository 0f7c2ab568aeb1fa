"""Answers as bytes: a finished request keeps what travels, in protobuf where its kind has one, and
no object, request or traceback.
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
    """An encoded answer. `kind`: what `body` holds."""

    kind: Kind
    body: bytes

    def response(self, protobuf: bool) -> Response:
        """Return the answer in the form that a client takes. Raises Refused (503) if the server
        ended before it ran the request.
        """
        if self.kind == "interrupted":
            raise Refused(
                503,
                "the server is shutting down, and had not begun with this: try again",
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
    """Encode what a finished future holds. An error is kept as its message and category."""
    if done.cancelled():
        return _error("it was cancelled", "user")
    error = done.exception()
    if error is None:
        try:
            return _encoded(done.result())
        except Exception as caught:  # boundary: a result that cannot be written is an answer too
            error = caught
    if isinstance(error, Interrupted):
        return StoredAnswer("interrupted", b"")
    return _error(*told(error, what))


def _encoded(result: Any) -> StoredAnswer:
    if isinstance(result, ForwardBackwardOutput):
        return StoredAnswer("outputs", convert.forward_backward_output(result))
    if isinstance(result, SampleResponse):
        return StoredAnswer("samples", convert.sample_response(result))
    return StoredAnswer(
        "json", json.dumps(finite(result), separators=(",", ":"), allow_nan=False).encode("ascii")
    )


def _error(message: str, category: Category) -> StoredAnswer:
    return StoredAnswer(
        "error", json.dumps({"error": message[:10_000], "category": category}).encode("ascii")
    )
