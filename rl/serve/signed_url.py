"""Sign links to saved files: a link needs no key, and counts for the tenant that created it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable

# a link's path: LINK_PREFIX, expiry, signature, and the path of the file
LINK_PREFIX = "/api/v1/files/"


class UrlSigner:
    """Sign paths of files with a secret that lives as long as the server.

    The signature covers the owner. The link itself names neither the owner nor the key.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def make_path(self, owner: str, expires: int, file_path: str) -> str:
        """Return the URL path of a link that `owner` creates.

        expires    Unix time in seconds
        place      <model id>/<kind>/<checkpoint>/<file>
        """
        return f"{LINK_PREFIX}{expires}/{self._sign(owner, expires, file_path)}/{file_path}"

    def is_valid(self, owner: str, path: str) -> bool:
        """Return whether `path` is a link that `owner` created and that has not expired."""
        expires, _, rest = path.removeprefix(LINK_PREFIX).partition("/")
        sign, _, place = rest.partition("/")
        if not (expires.isascii() and expires.isdigit() and len(expires) < 12):
            return False
        expected = self._sign(owner, int(expires), place)
        return hmac.compare_digest(expected.encode(), sign.encode()) and (
            int(expires) >= time.time()
        )

    def find_owner(self, path: str, owners: Iterable[str]) -> str | None:
        """Return the member of `owners` that created the link, or None.

        The result is None if none of them created it, or if the link has expired.
        """
        matches = [owner for owner in owners if self.is_valid(owner, path)]
        return matches[0] if matches else None

    def _sign(self, owner: str, expires: int, file_path: str) -> str:
        """Return the signature of a link, an HMAC-SHA256 in hexadecimal."""
        text = f"{owner} {expires} {file_path}"
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()
