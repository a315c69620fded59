"""The hashes of cached blocks, which cache events have. They are those of vLLM's `sha256_cbor`.

A block is hashed with its tokens, the hash of the block before it, and whatever else keeps requests
from sharing it, such as an adapter or a salt.
"""

from collections.abc import Sequence
from hashlib import sha256

from handlers.lmi_dist.cached_blocks import Root

# Its hash stands for the block before the first one.
SEED = "vllm-none-hash"
# The types of values in CBOR, and its null. Source: RFC 8949.
NUMBER = 0
BYTES = 2
TEXT = 3
ARRAY = 4
NULL = b"\xf6"
# What keeps blocks of the same tokens apart: tuples of a kind, such as "lora", and its values.
Extra = tuple[tuple[str, ...], ...]


def extra_of(root: Root, adapter: str | None, *, is_first: bool) -> Extra:
    """Return what keeps a block below a root apart from others with the same tokens.

    A salt keeps the first block apart, and so, by their hashes, those behind it.
    """
    extra: list[tuple[str, ...]] = []
    if root.adapter:
        extra.append(("lora", adapter or "", str(root.adapter)))

    if is_first and root.cache_salt is not None:
        extra.append(("cache_salt", root.cache_salt))

    return tuple(extra)


def digest_of(before: bytes | None, tokens: Sequence[int], extra: Extra = ()) -> bytes:
    """Return the hash of a block: SHA-256 of a list in CBOR of the hash before it, its tokens and
    `extra`. `before` is None for the first block.
    """
    encoded_extra = NULL
    if extra:
        encoded_extra = _array([_array([_text(value) for value in values]) for values in extra])

    block = _array(
        [
            _bytes(before or FIRST),
            _array([_head(NUMBER, token) for token in tokens]),
            encoded_extra,
        ]
    )
    return sha256(block).digest()


def _array(items: list[bytes]) -> bytes:
    return _head(ARRAY, len(items)) + b"".join(items)


def _bytes(value: bytes) -> bytes:
    return _head(BYTES, len(value)) + value


def _text(value: str) -> bytes:
    data = value.encode(errors="surrogatepass")
    return _head(TEXT, len(data)) + data


def _head(kind: int, number: int) -> bytes:
    """Return the first bytes of a value: its type, and the number itself or that of its items."""
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
