"""How a streamed answer is cut into parts: as the container sent it, or joined or cut as the platform may do.

A client that is right with all three modes is right with every cut. No part is empty or longer than 1 MiB. A body that
ends early ends the parts, with nothing lost of what came before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from lmi.gateway.eventstream import MAX_PART_BYTES


class Body(Protocol):
    """A body whose next chunk, never longer than MAX_PART_BYTES, is b"" at its end. A cancelled call loses nothing."""

    async def receive(self) -> bytes: ...


class Parts(Protocol):
    def cut(self, body: Body) -> AsyncGenerator[bytes]: ...


@dataclass(frozen=True)
class AsIs:
    """One part for each chunk, at once."""

    async def cut(self, body: Body) -> AsyncGenerator[bytes]:
        while chunk := await body.receive():
            yield chunk


@dataclass(frozen=True)
class Coalesced:
    """One part for all that comes within `wait_s` of its first byte."""

    wait_s: float = 0.05

    async def cut(self, body: Body) -> AsyncGenerator[bytes]:
        part = await body.receive()
        while part:
            part, rest = await self._fill(part, body)
            yield part
            part = rest or await body.receive()

    async def _fill(self, part: bytes, body: Body) -> tuple[bytes, bytes]:
        """Return the part, and a chunk for which it has no room."""
        chunks, num_bytes = [part], len(part)
        try:
            async with asyncio.timeout(self.wait_s):
                while chunk := await body.receive():
                    num_bytes += len(chunk)
                    if num_bytes > MAX_PART_BYTES:
                        return b"".join(chunks), chunk
                    chunks.append(chunk)
        except TimeoutError:
            pass
        return b"".join(chunks), b""


@dataclass(frozen=True)
class Split:
    """A part for every `num_bytes` bytes, wherever characters and records end."""

    num_bytes: int = 7

    async def cut(self, body: Body) -> AsyncGenerator[bytes]:
        left = b""
        while chunk := await body.receive():
            left += chunk
            end = len(left) - len(left) % self.num_bytes
            for begin in range(0, end, self.num_bytes):
                yield left[begin : begin + self.num_bytes]
            left = left[end:]
        if left:
            yield left


def parse(text: str) -> Parts:
    """Return the mode that `--parts` names. Raises ValueError with the rule."""
    word, _, value = text.partition(":")
    if word == "as-is" and not value:
        return AsIs()
    if word == "coalesce" and _is_within(value, 60_000):
        return Coalesced(int(value) / 1000) if value else Coalesced()
    if word == "split" and _is_within(value, MAX_PART_BYTES):
        return Split(int(value)) if value else Split()
    raise ValueError(f"must be as-is, coalesce[:MS] (1..60000) or split[:BYTES] (1..{MAX_PART_BYTES}), given {text}")


def _is_within(value: str, maximum: int) -> bool:
    return not value or value.isdecimal() and value.isascii() and 1 <= int(value) <= maximum
