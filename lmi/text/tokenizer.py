"""A model's tokenizer: it encodes text, decodes tokens to pieces of text, and knows the special
tokens.

It reads a model folder with the precedence of transformers, but a child process (convert.py)
converts a folder without tokenizer.json, because transformers would import torch here. A tokenizer
whose parts are not all known (known_parts.py) encodes in another process (confined.py), so that no
text holds this one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import tokenizers
from tokenizers import AddedToken

from lmi.errors import GenerationFailed, InvalidParameter, ModelUnusable, PromptTooLong, cause_line
from lmi.shared.model_files import read_bounded
from lmi.text.known_parts import unknown_decoders, unknown_parts

if TYPE_CHECKING:
    from lmi.text.confined import ConfinedEncoder, Encoded

# The library's threads would idle (one text in each call) and do not survive a fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A panic of the library is an error of one text, and no reason for 40 lines of its stack.
os.environ["RUST_BACKTRACE"] = "0"

# A turn of the event loop encodes so many characters: 0.8 ms with a vocabulary of 129k.
MAX_INLINE_CHARS = 4096
# Encoding a short word takes as long as this many characters of a text.
WORD_CHARS = 256
MAX_TOKEN_CHARS = 10_000
# Threads for long texts, so few that they cannot take every core.
NUM_THREADS = 2
CONVERSION_TIMEOUT_S = 120.0
GAVE_UP = "the tokenizer gave up on this text"

_NAMED_SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_EXTRA_SPECIAL = ("additional_special_tokens", "extra_special_tokens")
_SLOW_FILES = (
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.txt",
)
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
# GPT-2's alphabet: printable Latin-1 characters are their bytes, U+0100 and up the other bytes in
# order.
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
    """Token id → the text that it adds inside a text, or bytes for part of a character. Computed at
    first use.
    """

    def __init__(self, text_of: Callable[[int], str | bytes]) -> None:
        self._text_of = text_of

    def __missing__(self, token_id: int) -> str | bytes:
        piece = self[token_id] = self._text_of(token_id)
        return piece


class Tokenizer:
    """Encodes prompts and decodes tokens. In `token_texts_without_special` the text of special
    tokens is "".

    `named` maps "bos_token" to "<s>" and so on.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        named: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        self._is_byte_level = False
        if backend.decoder is not None:
            self._is_byte_level = b'"ByteLevel"' in bytes(backend.decoder.__getstate__())

        self.special_tokens = named or {}
        self.eos_ids = tuple(eos_ids)
        added = backend.get_added_tokens_decoder().items()
        self.special_ids = {token_id for token_id, token in added if token.special}
        for token in self.special_tokens.values():
            token_id = backend.token_to_id(token)
            if token_id is not None:
                self.special_ids.add(token_id)

        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        names = (backend.id_to_token(token_id) or "" for token_id in range(self.vocab_size))
        self.max_token_chars = max(map(len, names), default=1)

        self._inline_chars_left = MAX_INLINE_CHARS
        self._confined = self._confine()
        self._line = self.encode("\n", add_special_tokens=False)
        self.special_texts = {} if backend.encode_special_tokens else self._special_texts()

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

        config = _read_json(folder / "special_tokens_map.json")
        config_file = folder / "tokenizer_config.json"
        for name, value in _read_json(config_file).items():
            if value is not None:
                config[name] = value

        tokenizer_file = folder / "tokenizer.json"
        with _explained(ModelUnusable, f"{tokenizer_file}: not a tokenizer"):
            if tokenizer_file.is_file():
                backend = tokenizers.Tokenizer.from_file(str(tokenizer_file))
            else:
                backend = tokenizers.Tokenizer.from_str(_convert(folder))

        try:
            special_tokens = _apply_config(backend, config)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {cause_line(error)}"
            raise ModelUnusable(
                f"{config_file}: a token is not described as one ({reason})"
            ) from error

        return cls(backend, special_tokens, _eos_ids(folder, backend, special_tokens))

    def encode(
        self, text: str, *, add_special_tokens: bool = True, forged: Sequence[int] = ()
    ) -> list[int]:
        """Return the token ids of a text, with the special tokens that the model's tokenizer adds
        to a prompt.

        A special token in the text is encoded as text if a place in `forged`, between two
        characters, is inside it.
        """
        try:
            with _explained(GenerationFailed, GAVE_UP):
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

        # Unlike `encode`, a batch (of one) releases the interpreter lock. The fast one knows no
        # places.
        encode = self._backend.encode_batch if has_offsets else self._backend.encode_batch_fast
        return encode([text], add_special_tokens=add_special_tokens)[0]

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
        """Return the token ids of a prompt, with `truncate` only so many: those at the
        `truncation_side` are cut.

        A text that is certain to have over `max_tokens` tokens is refused before any work. With
        `truncate` the end at that side is cut off instead.
        """
        min_tokens = -(-len(text) // self.max_token_chars)
        if truncate is None and min_tokens > max_tokens:
            counted = (
                f"at least {min_tokens} tokens ({len(text)} characters, at most "
                f"{self.max_token_chars} in each)"
            )
            raise PromptTooLong(
                f"shorter than the model's context of {max_tokens + 1} tokens", counted
            )

        max_chars = max_tokens * self.max_token_chars
        cut_text = text
        first = 0
        if truncate is not None and truncation_side == "right":
            cut_text = text[:max_chars]
        elif truncate is not None:
            cut_text = text[-max_chars:]
            first = len(text) - len(cut_text)

        if first:
            forged = [place - first for place in forged]

        ids = await self.encode_async(
            cut_text, add_special_tokens=add_special_tokens, forged=forged
        )
        if not ids:
            raise InvalidParameter("inputs", "a text of at least one token", text)

        return truncated(ids, truncate, truncation_side)

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """Return all encodings of a word: with and without a space before it, at the start of a
        text and inside.
        """
        bare = word.lstrip(" ") or word
        encodings: list[list[int]] = []
        for spelled in (bare, " " + bare):
            encodings.append(self.encode(spelled, add_special_tokens=False))
            encodings.append(self._encode_inside(spelled) or [])

        return list(dict.fromkeys(tuple(ids) for ids in encodings if ids))

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
        """Do what takes as long as encoding so many characters.

        A thread does what is long, and what would make this turn of the event loop long together
        with what was done before. A tokenizer in another process is always waited for in a thread.
        """
        loop = asyncio.get_running_loop()
        if self._confined is not None or num_chars > self._inline_chars_left:
            return await loop.run_in_executor(self._threads, work)

        if self._inline_chars_left == MAX_INLINE_CHARS:
            loop.call_soon(self._begin_turn)

        self._inline_chars_left -= num_chars
        return work()

    def _begin_turn(self) -> None:
        self._inline_chars_left = MAX_INLINE_CHARS

    def _confine(self) -> ConfinedEncoder | None:
        """Return what encodes in another process, if parts of the tokenizer are not known.

        Raises ModelUnusable for a tokenizer that takes too long for short texts, or that this
        process cannot decode with.
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
        """Return the ids of a text behind a line break, or None where one token has parts of
        both.
        """
        ids = self.encode("\n" + text, add_special_tokens=False)
        length = len(self._line)
        if ids[:length] != self._line:
            return None

        return ids[length:]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids. Raises GenerationFailed."""
        with _explained(GenerationFailed, GAVE_UP):
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token inside a text: with its leading space, U+FFFD for part of a
        character.
        """
        piece = self.token_texts[token_id]
        return piece if isinstance(piece, str) else piece.decode(errors="replace")

    def token_name(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it."""
        return self._backend.id_to_token(token_id) or ""

    def _special_texts(self) -> dict[int, SpecialText]:
        """Return the texts of special tokens by the tokens' ids."""
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
        """Return a plain token. Put around another token, it keeps decoders from trimming that
        token's text.
        """
        for token_id in chain(self.encode("a", add_special_tokens=False), range(self.vocab_size)):
            text = self.decode([token_id])
            if token_id not in self.special_ids and text.isascii() and text.isalnum():
                return token_id

        raise ModelUnusable("the tokenizer has no plain token")

    def _token_text(self, token_id: int) -> str | bytes:
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
        """Return the bytes that a token's name stands for, None where it stands for none."""
        if self._is_byte_level:
            if BYTE_OF_CHAR.keys() >= set(name):
                return bytes(BYTE_OF_CHAR[char] for char in name)

            # An added token outside of the alphabet is its text in UTF-8.
            return name.encode()

        if _BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(name[3:5])

        return None


def truncated(ids: list[int], truncate: int | None, side: str) -> list[int]:
    """Return the ids of a prompt, with `truncate` at most so many, without those at the `side`."""
    if truncate is None:
        return ids

    if side == "right":
        return ids[:truncate]

    return ids[-truncate:]


@contextmanager
def _explained(kind: type[Exception], message: str) -> Iterator[None]:
    """Raise an error of ours for one of the library, or for its panic, a BaseException (a runaway
    regex).
    """
    try:
        yield
    except (TypeError, UnicodeEncodeError, ModelUnusable):
        raise
    except BaseException as error:
        # The class of a panic cannot be imported.
        is_panic = type(error).__name__ == "PanicException"
        if not isinstance(error, Exception) and not is_panic:
            raise

        raise kind(f"{message}: {cause_line(error)}") from error


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} if the file does not exist. Raises ModelUnusable."""
    try:
        value = json.loads(read_bounded(file))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnusable(f"{file}: {cause_line(error)}") from error

    if not isinstance(value, dict):
        raise ModelUnusable(f"{file}: must hold a JSON object")

    return value


def _convert(folder: Path) -> str:
    """Return the text of a tokenizer.json for a folder that has only an older form. Raises
    ModelUnusable.
    """
    file = next((folder / name for name in _SLOW_FILES if (folder / name).is_file()), None)
    if file is None:
        raise ModelUnusable(
            f"{folder}: no tokenizer: tokenizer.json is missing, and so are "
            f"{', '.join(_SLOW_FILES)}"
        )

    command = [sys.executable, "-P", str(Path(__file__).with_name("convert.py")), str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERSION_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ModelUnusable(f"{file}: conversion took over {CONVERSION_TIMEOUT_S:g} s") from error

    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise ModelUnusable(f"{file}: cannot be converted to tokenizer.json: {reason}")

    return done.stdout


def _apply_config(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> dict[str, str]:
    """Add the tokens of tokenizer_config.json to the backend. Returns the named special tokens by
    name.

    `add_bos_token` and `add_eos_token` have no effect, because the post-processor in tokenizer.json
    decides that.
    """
    added = config.get("added_tokens_decoder", {})
    by_id = sorted(added.items(), key=lambda entry: int(entry[0]))
    backend.add_tokens([_added_token(token) for _, token in by_id])

    special_tokens: dict[str, AddedToken] = {}
    for name in _NAMED_SPECIAL:
        if config.get(name):
            special_tokens[name] = _added_token(config[name])

    nameless: list[AddedToken] = []
    for key in _EXTRA_SPECIAL:
        tokens = config.get(key)
        if not tokens:
            continue

        if isinstance(tokens, dict):
            for name, token in tokens.items():
                special_tokens[name] = _added_token(token)
        else:
            nameless += [_added_token(token) for token in tokens]

    texts = {token.content for token in backend.get_added_tokens_decoder().values()}
    new_tokens = [token for token in nameless if token.content not in texts]
    backend.add_special_tokens([*special_tokens.values(), *new_tokens])
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    return {name: token.content for name, token in special_tokens.items()}


def _added_token(value: str | dict[str, Any]) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)

    flags: dict[str, bool] = {}
    for name in ("lstrip", "rstrip", "single_word", "normalized"):
        if name in value:
            flags[name] = bool(value[name])

    return AddedToken(value["content"], special=bool(value.get("special", True)), **flags)


def _eos_ids(
    folder: Path, backend: tokenizers.Tokenizer, special_tokens: dict[str, str]
) -> Iterable[int]:
    """Return the ids of the end tokens: those that the model's files name, then `eos_token`."""
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json")
    text_config = config.get("text_config")
    layers = [generation, config]
    if isinstance(text_config, dict):
        layers.append(text_config)

    candidates: list[Any] = []
    for layer in layers:
        declared = layer.get("eos_token_id")
        if declared is not None:
            candidates += declared if isinstance(declared, list) else [declared]
            break

    if "eos_token" in special_tokens:
        candidates.append(backend.token_to_id(special_tokens["eos_token"]))

    return dict.fromkeys(
        token_id for token_id in candidates if type(token_id) is int and token_id >= 0
    )
