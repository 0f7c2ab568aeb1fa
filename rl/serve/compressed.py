"""Bodies that come compressed: zstd, the one form that the SDK sends, where the server says that it
may (`client/config`).
"""

from __future__ import annotations

import importlib.util

from rl.serve.refusals import Refused

_WINDOW = 1 << 27  # of a frame at most: what is kept to read it


def reads_zstd() -> bool:
    """Whether the package that does it is installed (requirements-serve.txt)."""
    return importlib.util.find_spec("zstandard") is not None


def expanded(body: bytes, encoding: str, limit: int) -> bytes:
    """The body itself. Refused (415) for another encoding, (413) beyond `limit` bytes, of which no
    more is expanded, (400) for no zstd.
    """
    if not encoding:
        return body
    if encoding.strip().lower() != "zstd" or not reads_zstd():
        known = "zstd" if reads_zstd() else "nothing (pip install zstandard, for zstd)"
        raise Refused(
            415, f"bodies compressed with {known} are read here, not with {encoding[:40]!r}"
        )
    import zstandard

    try:
        found = (
            zstandard.ZstdDecompressor(max_window_size=_WINDOW)
            .stream_reader(body, read_across_frames=False)
            .read(limit + 1)
        )
        whole = zstandard.get_frame_parameters(body).content_size
    except zstandard.ZstdError as error:
        raise Refused(400, f"the body is no zstd ({str(error)[:200]})") from None
    if len(found) > limit:
        raise Refused(
            413, f"a body may have {limit} bytes here, expanded as well: send less at once"
        )
    if whole not in (zstandard.CONTENTSIZE_UNKNOWN, len(found)):
        raise Refused(400, f"the body is cut off: it expands to {len(found)} of {whole} bytes")
    return found
