"""Write JSON responses that never fail to encode.

A lone surrogate, which a client may have sent, is escaped. NaN and infinity become null.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse

from rl.jsonl import replace_nonfinite


class SafeJSONResponse(JSONResponse):
    """Encode any content as ASCII JSON.

    Starlette's JSONResponse raises for lone surrogates and for NaN, which would be reported as an
    error of the server.
    """

    def render(self, content: Any) -> bytes:
        """Return `content` as compact ASCII JSON."""
        try:
            return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")
        except ValueError:
            return json.dumps(
                replace_nonfinite(content), separators=(",", ":"), allow_nan=False
            ).encode("ascii")
