"""AWS's event stream, in which a streamed answer reaches its client: how it is cut into parts, and
their frames.

A client that is right with all three ways of cutting is right with every cut. No part is empty or
longer than 1 MiB. Source: Amazon's description of the vnd.amazon.eventstream encoding.
"""

import asyncio
import re
import struct
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from zlib import crc32

import orjson

from lmi.gateway.container import MAX_CHUNK_BYTES, ContainerResponse
from lmi.gateway.payload_part import PayloadPart

MEDIA_TYPE = "application/vnd.amazon.eventstream"
MAX_PART_BYTES = MAX_CHUNK_BYTES
STRING = 7
# Two lengths and two checksums.
NUM_OTHER_BYTES = 16


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """Return each name with its length in one byte, the type, and the value with its
    length in two.
    """
    encoded = bytearray()
    for name, value in headers.items():
        encoded += struct.pack(f"!B{len(name)}sB", len(name), name.encode(), STRING)
        data = value.encode()
        encoded += struct.pack(f"!H{len(data)}s", len(data), data)

    return bytes(encoded)


def frame(headers: bytes, payload: bytes) -> bytes:
    """Return one frame: its length and that of its headers, the CRC-32 of these 8 bytes, headers,
    payload, and the CRC-32 of all before. Integers are big-endian. `headers` are encoded.
    """
    lengths = struct.pack("!II", NUM_OTHER_BYTES + len(headers) + len(payload), len(headers))
    before = b"".join((lengths, struct.pack("!I", crc32(lengths)), headers, payload))
    return before + struct.pack("!I", crc32(before))


PART = encode_headers(
    {
        ":event-type": "PayloadPart",
        ":content-type": "application/octet-stream",
        ":message-type": "event",
    }
)


def _exception(kind: str) -> bytes:
    return encode_headers(
        {
            ":exception-type": kind,
            ":content-type": "application/json",
            ":message-type": "exception",
        }
    )


FAILURE = _exception("ModelStreamError")
INTERNAL_FAILURE = _exception("InternalStreamFailure")


def part(payload: bytes) -> bytes:
    """Return the frame of some bytes of the answer, at most MAX_PART_BYTES."""
    return frame(PART, payload)


def failure(error_code: str, message: str) -> bytes:
    """Return the frame that ends a stream which the container did not complete."""
    return frame(FAILURE, orjson.dumps({"Message": message, "ErrorCode": error_code}))


def internal_failure(message: str) -> bytes:
    """Return the frame that ends a stream in both directions which the gateway did not
    complete.
    """
    return frame(INTERNAL_FAILURE, orjson.dumps({"Message": message}))


def refusal(error_code: str, message: str) -> bytes:
    """Return the frame that ends a stream for a fault of its client, for which AWS's model has no
    exception.
    """
    headers = {":message-type": "error", ":error-code": error_code, ":error-message": message}
    return frame(encode_headers(headers), b"")


def part_of_message(part: PayloadPart) -> bytes:
    """Return the frame of a part of a message."""
    headers = {
        "DataType": "UTF8" if part.is_text else "BINARY",
        "CompletionState": "COMPLETE" if part.is_last else "PARTIAL",
    }
    return frame(PART + encode_headers(headers), part.data)


@dataclass(frozen=True)
class AsIs:
    """One part for each chunk, at once."""

    async def cut(self, response: ContainerResponse) -> AsyncGenerator[bytes]:
        """Yield the parts of a response as it comes."""
        while chunk := await response.receive():
            yield chunk


@dataclass(frozen=True)
class Coalesced:
    """One part for all that comes within `wait_s` of its first byte."""

    wait_s: float = 0.05

    async def cut(self, response: ContainerResponse) -> AsyncGenerator[bytes]:
        """Yield the parts of a response as it comes."""
        chunk = b""
        while True:
            part = bytearray(chunk or await response.receive())
            if not part:
                return

            chunk = b""
            with suppress(TimeoutError):
                async with asyncio.timeout(self.wait_s):
                    while True:
                        chunk = await response.receive()
                        if not chunk or len(part) + len(chunk) > MAX_PART_BYTES:
                            break

                        part += chunk
                        chunk = b""

            yield bytes(part)


@dataclass(frozen=True)
class Split:
    """A part for every `num_bytes` bytes, wherever characters and records end."""

    num_bytes: int = 7

    async def cut(self, response: ContainerResponse) -> AsyncGenerator[bytes]:
        """Yield the parts of a response as it comes."""
        unsent = b""
        while chunk := await response.receive():
            unsent += chunk
            end = len(unsent) - len(unsent) % self.num_bytes
            for begin in range(0, end, self.num_bytes):
                yield unsent[begin : begin + self.num_bytes]

            unsent = unsent[end:]

        if unsent:
            yield unsent


Parts = AsIs | Coalesced | Split
MODES: dict[str, Parts] = {"as-is": AsIs(), "coalesce": Coalesced(), "split": Split()}
# The largest number of a mode.
MAXIMA = {"coalesce": 60_000, "split": MAX_PART_BYTES}


def parse_parts(text: str) -> Parts:
    """Return the mode that `--parts` names. Raises ValueError with the rule."""
    word, _, number = text.partition(":")
    if text in MODES:
        return MODES[text]

    if re.fullmatch("[0-9]{1,9}", number) and 1 <= int(number) <= MAXIMA.get(word, 0):
        if word == "split":
            return Split(int(number))

        return Coalesced(int(number) / 1000)

    raise ValueError(
        f"must be as-is, coalesce[:MS] (1..60000) or split[:BYTES] (1..{MAX_PART_BYTES}), given "
        f"{text}"
    )
