"""Frames of AWS's event stream, in which a streamed answer reaches its client. This module does no I/O.

A frame is its length and that of its headers, the CRC-32 of these 8 bytes, the headers, the payload, and the CRC-32 of
all before. Integers are big-endian. A header is a name with its length in one byte, the type 7 for a string, and a
value with its length in two. Source: Amazon's description of the vnd.amazon.eventstream encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from zlib import crc32

import orjson

MEDIA_TYPE = "application/vnd.amazon.eventstream"
MAX_PART_BYTES = 1 << 20
STRING = 7
NUM_OTHER_BYTES = 16  # two lengths and two checksums


def encode_headers(headers: Mapping[str, str]) -> bytes:
    encoded = bytearray()
    for name, value in headers.items():
        encoded += struct.pack("!B", len(name)) + name.encode()
        encoded += struct.pack("!BH", STRING, len(value)) + value.encode()
    return bytes(encoded)


def frame(headers: bytes, payload: bytes) -> bytes:
    """Return one frame. `headers` are encoded."""
    lengths = struct.pack("!II", NUM_OTHER_BYTES + len(headers) + len(payload), len(headers))
    before = b"".join((lengths, struct.pack("!I", crc32(lengths)), headers, payload))
    return before + struct.pack("!I", crc32(before))


PART = encode_headers(
    {":event-type": "PayloadPart", ":content-type": "application/octet-stream", ":message-type": "event"}
)
FAILURE = encode_headers(
    {":exception-type": "ModelStreamError", ":content-type": "application/json", ":message-type": "exception"}
)


def part(payload: bytes) -> bytes:
    """Return the frame of some bytes of the answer, at most MAX_PART_BYTES."""
    return frame(PART, payload)


def failure(error_code: str, message: str) -> bytes:
    """Return the frame that ends a stream which the container did not complete."""
    return frame(FAILURE, orjson.dumps({"Message": message, "ErrorCode": error_code}))
