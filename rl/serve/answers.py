"""JSON that can always be written: half of a surrogate pair, which a client may have sent, is
escaped; a number that is none is null.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse

from rl.jsonl import finite


class JsonAnswer(JSONResponse):
    """As Starlette's, which raises for both: an answer that cannot be written would be an error of
    the server's.
    """

    def render(self, content: Any) -> bytes:
        try:
            return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")
        except ValueError:
            return json.dumps(finite(content), separators=(",", ":"), allow_nan=False).encode(
                "ascii"
            )
