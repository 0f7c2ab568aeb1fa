"""Decompress request bodies in zstd, the only compression that the SDK sends.

The SDK compresses if the server's `client/config` allows it.
"""

from __future__ import annotations

import importlib.util

from rl.errors import install_command
from rl.serve.http_errors import HttpError

_MAX_WINDOW = 1 << 27  # largest window of a frame in bytes, which bounds the decoder's memory


def is_zstd_available() -> bool:
    """Return whether the zstandard package is installed (extra `serve`)."""
    return importlib.util.find_spec("zstandard") is not None


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Return the decompressed body.

    Raises HttpError: 415 for an unsupported encoding, 413 above `limit` bytes (decompression stops
    at the limit), 400 for invalid or truncated zstd.
    """
    if not encoding:
        return body
    if encoding.strip().lower() != "zstd" or not is_zstd_available():
        known = "zstd" if is_zstd_available() else f"nothing (for zstd {install_command('serve')})"
        raise HttpError(
            415, f"this server reads bodies compressed with {known}, not with {encoding[:40]!r}"
        )
    import zstandard

    try:
        data = (
            zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
            .stream_reader(body, read_across_frames=False)
            .read(limit + 1)
        )
        expected_size = zstandard.get_frame_parameters(body).content_size
    except zstandard.ZstdError as error:
        raise HttpError(400, f"the body is not valid zstd ({str(error)[:200]})") from None
    if len(data) > limit:
        raise HttpError(
            413, f"a body may have at most {limit} bytes after decompression: send less at once"
        )
    if expected_size not in (zstandard.CONTENTSIZE_UNKNOWN, len(data)):
        raise HttpError(
            400, f"the body is truncated: it decompresses to {len(data)} of {expected_size} bytes"
        )
    return data
