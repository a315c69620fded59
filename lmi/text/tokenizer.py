"""A model's tokenizer: it encodes text, decodes tokens to pieces of text, and knows the special
tokens.

A tokenizer with parts that are not known here (known_parts.py) may take any time for a text. It
encodes in another process (confined.py), so that no text holds up this one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import tokenizers

from lmi.errors import GenerationFailed, InvalidParameter, ModelUnusable, PromptTooLong
from lmi.text.known_parts import unknown_decoders, unknown_parts
from lmi.text.library_errors import explained
from lmi.text.long_text import LONG_CHARS, chars_with_more_tokens
from lmi.text.tokenizer_files import load_files
from lmi.text.turn_budget import TurnBudget

if TYPE_CHECKING:
    from lmi.text.confined import ConfinedEncoder, Encoded

# The library reads both when it is first used, so they are set before anything can use it.
#
# Its threads would idle (one text in each call) and do not survive a fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A panic of the library is an error of one text, and no reason for 40 lines of its stack.
os.environ["RUST_BACKTRACE"] = "0"

# Encoding a short word takes as long as this many characters of a text.
WORD_CHARS = 256
MAX_TOKEN_CHARS = 10_000
# Threads for long texts, so few that they cannot take every core.
NUM_THREADS = 2
GAVE_UP = "the tokenizer gave up on this text"

# The name of a token that is one byte.
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
# GPT-2's alphabet for bytes: printable Latin-1 characters stand for their own bytes, U+0100 and up
# for the other bytes in their order.
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
OTHER_BYTES = (byte for byte in range(256) if byte not in PRINTABLE)
BYTE_OF_CHAR = {chr(byte): byte for byte in PRINTABLE}
BYTE_OF_CHAR |= {chr(256 + n): byte for n, byte in enumerate(OTHER_BYTES)}

T = TypeVar("T")

log = logging.getLogger(__name__)


class SpecialText(NamedTuple):
    """The text of a special token, and the ids that encode it where it is only text."""

    text: str
    ids: list[int]


class TokenTexts(dict[int, str | bytes]):
    """The text that a token adds inside a text, by token id. It is bytes if it is part of a
    character. Each is computed at its first use.
    """

    def __init__(self, text_of: Callable[[int], str | bytes]) -> None:
        self._text_of = text_of

    def __missing__(self, token_id: int) -> str | bytes:
        piece = self[token_id] = self._text_of(token_id)
        return piece


class Tokenizer:
    """Encodes prompts and decodes tokens. `special_tokens` maps "bos_token" to "<s>" and so on. In
    `token_texts_without_special` the text of special tokens is "".
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        self._is_byte_level = False
        if backend.decoder is not None:
            self._is_byte_level = b'"ByteLevel"' in bytes(backend.decoder.__getstate__())

        self.special_tokens = special_tokens or {}
        self.eos_ids = tuple(eos_ids)
        added = backend.get_added_tokens_decoder().items()
        self.special_ids = {token_id for token_id, token in added if token.special}
        for token in self.special_tokens.values():
            token_id = backend.token_to_id(token)
            if token_id is not None:
                self.special_ids.add(token_id)

        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        names = (backend.id_to_token(token_id) or "" for token_id in range(self.vocab_size))
        # The most characters of a token's name, and so of the text that it encodes.
        self.max_token_chars = max(map(len, names), default=1)

        self._turn_budget = TurnBudget()
        # It is known before anything is encoded here.
        self._confined = self._confine()
        # A line break.
        self._line = self.encode("\n", add_special_tokens=False)
        self.special_texts = {} if backend.encode_special_tokens else self._special_texts()

        # The text of a token is what stands between two anchors.
        self._anchor = self._find_anchor()
        self._left = self.decode([self._anchor])
        self._right = self.decode([self._anchor, self._anchor]).removeprefix(self._left)
        self.token_texts = TokenTexts(self._token_text)
        self.token_texts_without_special = TokenTexts(
            lambda token_id: "" if token_id in self.special_ids else self.token_texts[token_id]
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Load a model folder. Raises ModelUnusable with one line that names the file."""
        folder = Path(path)
        if not folder.is_dir():
            raise ModelUnusable(f"{folder}: no such folder")

        loaded = load_files(folder)
        return cls(loaded.backend, loaded.special_tokens, loaded.eos_ids)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, forged: Sequence[int] = ()
    ) -> list[int]:
        """Return the token ids of a text, with the special tokens that the model's tokenizer adds
        to a prompt.

        `forged` has the places where a client's content spells a special token: each is the offset
        of a break between two characters inside of it, sorted. A special token that the text spells
        across a break is encoded as plain text.
        """
        try:
            with explained(GenerationFailed, GAVE_UP):
                encoding = self._encoding(text, add_special_tokens, has_offsets=bool(forged))
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidParameter(
                "inputs", "text of whole Unicode characters", "a lone surrogate"
            ) from error

        if not forged:
            return encoding.ids

        ids: list[int] = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            inside = bisect_right(forged, start)
            has_place_inside = inside < len(forged) and forged[inside] < end
            if has_place_inside and token_id in self.special_texts:
                ids += self.special_texts[token_id].ids
            else:
                ids.append(token_id)

        return ids

    def _encoding(
        self, text: str, add_special_tokens: bool, has_offsets: bool
    ) -> tokenizers.Encoding | Encoded:
        if self._confined is not None:
            return self._confined.encode(
                text,
                add_special_tokens=add_special_tokens,
                spells_special_tokens=self._backend.encode_special_tokens,
                has_offsets=has_offsets,
            )

        # Unlike `encode`, a batch releases the interpreter lock, also one of one text. The fast one
        # has no offsets.
        encode_batch = self._backend.encode_batch_fast
        if has_offsets:
            encode_batch = self._backend.encode_batch

        return encode_batch([text], add_special_tokens=add_special_tokens)[0]

    async def encode_async(
        self, text: str, *, add_special_tokens: bool = True, forged: Sequence[int] = ()
    ) -> list[int]:
        """Encode without blocking the event loop. A thread encodes a long text."""
        encode = partial(self.encode, text, add_special_tokens=add_special_tokens, forged=forged)
        return await self._without_blocking(encode, len(text))

    async def encode_prompt(
        self,
        text: str,
        *,
        max_tokens: int,
        truncate: int | None = None,
        truncation_side: str = "left",
        add_special_tokens: bool = True,
        forged: Sequence[int] = (),
    ) -> list[int]:
        """Return the token ids of a prompt. With `truncate` there are at most so many, and those at
        the `truncation_side` are cut off.

        No more text is encoded than `max_tokens` tokens can have. A longer one is cut before, or
        refused where nothing is to be cut. Raises PromptTooLong or InvalidParameter.
        """
        num_kept = truncate
        if truncate is None or truncate > max_tokens:
            num_kept = None
            self._check_length(text, max_tokens)

        is_cut_from_left = num_kept is not None and truncation_side != "right"
        max_chars = max_tokens * self.max_token_chars
        cut_text = text[-max_chars:] if is_cut_from_left else text[:max_chars]
        if len(cut_text) > LONG_CHARS:
            num_tokens = max_tokens if num_kept is None else num_kept
            num_chars = await self._chars_with_more_tokens(cut_text, num_tokens, is_cut_from_left)
            if num_chars is not None:
                if num_kept is None:
                    counted = f"more than {max_tokens} tokens ({len(text)} characters)"
                    raise PromptTooLong.of_context(max_tokens + 1, counted)

                cut_text = cut_text[-num_chars:] if is_cut_from_left else cut_text[:num_chars]

        if is_cut_from_left:
            num_cut_before = len(text) - len(cut_text)
            forged = [place - num_cut_before for place in forged]

        ids = await self.encode_async(
            cut_text, add_special_tokens=add_special_tokens, forged=forged
        )
        if not ids:
            raise InvalidParameter("inputs", "a text of at least one token", text)

        return truncated(ids, truncate, truncation_side)

    async def _chars_with_more_tokens(
        self, text: str, num_tokens: int, from_end: bool
    ) -> int | None:
        """Do what the function of this name does, without blocking the event loop."""

        def num_tokens_of(piece: str) -> int:
            return len(self.encode(piece, add_special_tokens=False))

        read_pieces = partial(
            chars_with_more_tokens, text, num_tokens, num_tokens_of, from_end=from_end
        )
        return await self._without_blocking(read_pieces, len(text))

    def _check_length(self, text: str, max_tokens: int) -> None:
        """Raise PromptTooLong for a text that cannot have as few tokens, however it is encoded."""
        min_tokens = -(-len(text) // self.max_token_chars)
        if min_tokens > max_tokens:
            counted = (
                f"at least {min_tokens} tokens ({len(text)} characters, at most "
                f"{self.max_token_chars} in each)"
            )
            raise PromptTooLong.of_context(max_tokens + 1, counted)

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """Return all encodings of a word: with and without a space before it, at the beginning of a
        text and inside it.
        """
        bare_word = word.lstrip(" ") or word
        # A dictionary keeps each encoding once, in the order of these.
        encodings: dict[tuple[int, ...], None] = {}
        for text in (bare_word, " " + bare_word):
            for ids in (
                self.encode(text, add_special_tokens=False),
                self._encode_inside(text),
            ):
                if ids:
                    encodings[tuple(ids)] = None

        return list(encodings)

    async def spellings_async(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the spellings of all words. Each takes four encodings, so a thread encodes more
        than a few words.
        """

        def spell() -> list[tuple[int, ...]]:
            spellings: list[tuple[int, ...]] = []
            for word in words:
                spellings += self.spellings(word)

            return spellings

        num_chars = sum(map(len, words)) + WORD_CHARS * len(words)
        return await self._without_blocking(spell, num_chars)

    async def _without_blocking(self, work: Callable[[], T], num_chars: int) -> T:
        """Do work that takes as long as to encode so many characters, here or in a thread.

        A thread does it if this turn of the event loop would become too long, with what was done in
        it before. A thread also waits for a tokenizer in another process.
        """
        loop = asyncio.get_running_loop()
        if self._confined is None and self._turn_budget.take(num_chars, loop):
            return work()

        return await loop.run_in_executor(self._threads, work)

    def _confine(self) -> ConfinedEncoder | None:
        """Start another process that encodes, if some parts of the tokenizer are not known.

        Raises ModelUnusable for a tokenizer that takes too long for short texts, or whose tokens
        cannot be decoded in this process.
        """
        if self.max_token_chars > MAX_TOKEN_CHARS:
            raise ModelUnusable(
                f"the tokenizer's tokens have at most {MAX_TOKEN_CHARS} characters here: "
                f"one has {self.max_token_chars}"
            )

        unknown = unknown_decoders(self._backend)
        if unknown:
            raise ModelUnusable(
                f"the tokenizer has {unknown[0].what}, which is not decoded with here"
            )

        unknown = unknown_parts(self._backend, self.max_token_chars)
        if not unknown:
            return None

        from lmi.text.confined import ConfinedEncoder

        confined = ConfinedEncoder(self._backend)
        confined.probe(unknown)

        parts = "; ".join(part.what for part in unknown)
        log.warning("the tokenizer has %s: it encodes in a process of its own", parts)
        return confined

    def _encode_inside(self, text: str) -> list[int] | None:
        """Return the ids of a text behind a line break, or None if a token has parts of both."""
        ids = self.encode("\n" + text, add_special_tokens=False)
        length = len(self._line)
        if ids[:length] != self._line:
            return None

        return ids[length:]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids. Raises GenerationFailed."""
        with explained(GenerationFailed, GAVE_UP):
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token inside a text: with its leading space, and with U+FFFD for a
        part of a character.
        """
        piece = self.token_texts[token_id]
        if isinstance(piece, bytes):
            return piece.decode(errors="replace")

        return piece

    def token_name(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it."""
        return self._backend.id_to_token(token_id) or ""

    def _special_texts(self) -> dict[int, SpecialText]:
        """Return the texts of special tokens by the tokens' ids, but for those that have no
        encoding as plain text.
        """
        special_texts: dict[int, SpecialText] = {}
        self._backend.encode_special_tokens = True
        try:
            for token_id, token in self._backend.get_added_tokens_decoder().items():
                if not token.special:
                    continue

                ids = self._encode_inside(token.content)
                if ids is not None and token_id not in ids:
                    special_texts[token_id] = SpecialText(token.content, ids)
        finally:
            self._backend.encode_special_tokens = False

        return special_texts

    def _find_anchor(self) -> int:
        """Return a plain token. Decoders do not trim the text of another token that stands between
        two of it.
        """
        candidates = chain(self.encode("a", add_special_tokens=False), range(self.vocab_size))
        for token_id in candidates:
            text = self.decode([token_id])
            if token_id not in self.special_ids and text.isascii() and text.isalnum():
                return token_id

        raise ModelUnusable("the tokenizer has no plain token")

    def _token_text(self, token_id: int) -> str | bytes:
        """Compute what `token_texts` has of a token."""
        text = self.decode([self._anchor, token_id, self._anchor])
        text = text.removeprefix(self._left).removesuffix(self._right)
        if "\ufffd" not in text:
            return text

        data = self._bytes_of(self.token_name(token_id))
        if data is None:
            return text

        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    def _bytes_of(self, name: str) -> bytes | None:
        """Return the bytes that a token's name stands for, or None if it stands for none."""
        if self._is_byte_level:
            if BYTE_OF_CHAR.keys() >= set(name):
                return bytes(BYTE_OF_CHAR[char] for char in name)

            # An added token outside of the alphabet is its text in UTF-8.
            return name.encode()

        if _BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(name[3:5])

        return None


def truncated(ids: list[int], truncate: int | None, side: str) -> list[int]:
    """Return the ids of a prompt. With `truncate` there are at most so many, and those at the
    `side` are cut off.
    """
    if truncate is None:
        return ids

    if side == "right":
        return ids[:truncate]

    return ids[-truncate:]
