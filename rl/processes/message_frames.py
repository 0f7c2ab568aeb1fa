"""Encode and read framed messages between two processes: mark, length, checksum, payload.

The other process may run user code, so nothing that it sends is trusted to be a message.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import zlib
from collections.abc import Iterator

from rl.sanitize import sanitize_text

_HEADER = struct.Struct(">2sQI")  # mark, length and checksum of the payload
_MARK = b"WR"
_READ_BYTES = 1 << 20  # bytes of a single read


class InvalidReply(Exception):
    """Raised when bytes from another process are not a valid message or reply."""


def encode_frame(payload: bytes) -> bytes:
    return _HEADER.pack(_MARK, len(payload), zlib.crc32(payload)) + payload


@contextlib.contextmanager
def open_channel() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return this process's end of a channel, and the end of a process that the body starts.

    The other end is closed after the body, and so is this end if the body raises.
    """
    channel, other_end = socket.socketpair()
    try:
        yield channel, other_end
    except BaseException:
        channel.close()
        raise
    finally:
        other_end.close()


class FrameReader:
    """Split a byte stream, received in arbitrary chunks, into messages.

    `limit`: maximum length of a message in bytes, None for no limit (the sender is trusted).
    """

    def __init__(self, limit: int | None):
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """Return the next message; None while it is incomplete.

        Raises InvalidReply as soon as the bytes cannot be a message.
        """
        buffer = self._buffer
        if not buffer.startswith(_MARK[: len(buffer)]):
            raise InvalidReply(f"it begins with {sanitize_text(repr(bytes(buffer[:24])), 100)}")
        if len(buffer) < _HEADER.size:
            return None
        _, length, checksum = _HEADER.unpack_from(buffer)
        if self.limit is not None and length > self.limit:
            raise InvalidReply(f"it is {length} bytes long, at most {self.limit} are read")
        end = _HEADER.size + length
        if len(buffer) < end:
            return None
        payload = bytes(buffer[_HEADER.size : end])
        if zlib.crc32(payload) != checksum:
            raise InvalidReply("its checksum is wrong")
        del buffer[:end]
        return payload

    def count_missing_bytes(self) -> int:
        """Return the number of bytes up to the end of the header, or of the message after it."""
        if len(self._buffer) < _HEADER.size:
            return _HEADER.size - len(self._buffer)
        return _HEADER.size + _HEADER.unpack_from(self._buffer)[1] - len(self._buffer)


def read_message(channel: socket.socket, limit: int | None, fds: list[int] | None = None) -> bytes:
    """Wait for the next message, and read nothing that follows it.

    `limit`: as in `FrameReader`. `fds`: list to which the file descriptor sent with the message is
    appended. Returns b"" if the other end was closed. Raises InvalidReply if the bytes are not a
    message.
    """
    frames = FrameReader(limit)
    while (message := frames.next()) is None:
        size = min(frames.count_missing_bytes(), _READ_BYTES)
        if fds is None:
            data = channel.recv(size)
        else:
            data, received, _, _ = socket.recv_fds(channel, size, 1)
            fds += received
        if not data:
            return b""
        frames.feed(data)
    return message
