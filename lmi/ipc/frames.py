"""Frames on a socket between two processes of a server.

A frame is a 4-byte little-endian length and that many bytes. This module never touches a socket: it takes the bytes
that arrived and returns the frames that are whole.
"""

from __future__ import annotations

from collections.abc import Iterator

HEAD_BYTES = 4
MAX_FRAME_BYTES = 64 << 20


class FrameTooLarge(ValueError):
    """A frame is over the limit. If the other end announced it, the connection cannot be used any more."""


def frame(payload: bytes) -> bytes:
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"a frame has at most {MAX_FRAME_BYTES} bytes, this one {len(payload)}")
    return len(payload).to_bytes(HEAD_BYTES, "little") + payload


class FrameReader:
    """Cuts a byte stream into frames, however the bytes arrive."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the payloads of the frames that `data` completes. Raises FrameTooLarge for a length over the limit."""
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= HEAD_BYTES:
            size = int.from_bytes(self._buffer[at : at + HEAD_BYTES], "little")
            if size > self._max_bytes:
                raise FrameTooLarge(f"a frame has at most {self._max_bytes} bytes, this one {size}")
            if len(self._buffer) - at - HEAD_BYTES < size:
                break
            at += HEAD_BYTES
            yield bytes(self._buffer[at : at + size])
            at += size
        del self._buffer[:at]
