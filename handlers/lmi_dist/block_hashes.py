"""The hashes of cached blocks, made as vLLM's `sha256_cbor` makes them: of the block before, the
tokens, and what else keeps requests apart.
"""

from collections.abc import Sequence
from hashlib import sha256

from handlers.lmi_dist.cached_blocks import Root

# This stands in the place of the block before the first one.
SEED = "vllm-none-hash"
# The kinds of values in CBOR.
ARRAY = 4
BYTES = 2
TEXT = 3
NUMBER = 0
NOTHING = b"\xf6"
# What keeps requests apart: each has a name of what it is, then values.
Extra = tuple[tuple[str, ...], ...]


def extra_of(root: Root, adapter: str | None, *, is_first: bool) -> Extra:
    """Return what keeps the blocks below a root apart from those with the same tokens.

    A salt is part of the first.
    """
    extra: list[tuple[str, ...]] = []
    if root.adapter:
        extra.append(("lora", adapter or "", str(root.adapter)))

    if is_first and root.cache_salt is not None:
        extra.append(("cache_salt", root.cache_salt))

    return tuple(extra)


def digest_of(before: bytes | None, tokens: Sequence[int], extra: Extra = ()) -> bytes:
    """Return the hash of a block: SHA-256 of the CBOR of the hash before it, its tokens, and what
    is `extra`.
    """
    parts = [
        _head(ARRAY, 3),
        _bytes(before or FIRST),
        _array([_head(NUMBER, token) for token in tokens]),
    ]
    if extra:
        parts.append(_array([_array(list(map(_text, values))) for values in extra]))
    else:
        parts.append(NOTHING)

    return sha256(b"".join(parts)).digest()


def _array(items: list[bytes]) -> bytes:
    return _head(ARRAY, len(items)) + b"".join(items)


def _bytes(value: bytes) -> bytes:
    return _head(BYTES, len(value)) + value


def _text(value: str) -> bytes:
    data = value.encode(errors="surrogatepass")
    return _head(TEXT, len(data)) + data


def _head(kind: int, number: int) -> bytes:
    """Return a number of CBOR in its shortest form, with the kind of what it counts."""
    if number < 24:
        return bytes((kind << 5 | number,))

    if number < 1 << 8:
        return bytes((kind << 5 | 24, number))

    if number < 1 << 16:
        return bytes((kind << 5 | 25,)) + number.to_bytes(2, "big")

    if number < 1 << 32:
        return bytes((kind << 5 | 26,)) + number.to_bytes(4, "big")

    return bytes((kind << 5 | 27,)) + number.to_bytes(8, "big")


FIRST = sha256(_text(SEED)).digest()
