"""The vocabulary that guided decoding needs: what each token writes, and which tokens may end an answer."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from handlers.base.utf8_tokens import SECOND, is_middle, is_part_of_text
from lmi.executor import GuidedDecodingConfig, GuidedDecodingParams, GuideType

if TYPE_CHECKING:
    from xgrammar import TokenizerInfo, VocabType

Mask = NDArray[np.int32]

WORD_BITS = 32
FILE_NAME = "tokenizer.json"
NO_TEXTS = "guides need the texts of tokens, which option.skip_tokenizer_init leaves out"
CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")  # all but line ends, which may stand between values


def why_no_guides(folder: Path | None) -> str:
    """Why the engine cannot guide decoding with the vocabulary in a folder, or "" if it can."""
    if importlib.util.find_spec("xgrammar") is None:
        return "xgrammar is not installed"
    if folder is not None and not (folder / FILE_NAME).is_file():
        return f"the model's folder has no {FILE_NAME}"
    return ""


def read_config(folder: str | Path) -> GuidedDecodingConfig:
    """Read the tokenizer's files in a folder. An id between others that no token has gets an empty text."""
    folder = Path(folder)
    tokenizer = Tokenizer.from_file(str(folder / FILE_NAME))
    config = _read_json(folder / "tokenizer_config.json")
    eos_token = config.get("eos_token") or _read_json(folder / "special_tokens_map.json").get("eos_token")
    _add_tokens(tokenizer, config.get("added_tokens_decoder", {}))
    ids = tokenizer.get_vocab()
    texts = [""] * (max(ids.values()) + 1)
    for text, token_id in ids.items():
        texts[token_id] = text
    eos_id = ids.get(eos_token["content"] if isinstance(eos_token, dict) else eos_token or "")
    return GuidedDecodingConfig(texts, tokenizer.to_str(), None if eos_id is None else [eos_id])


class Vocabulary:
    """What guides must know of the tokens. A mask is int32 (vocab / 32,), with a bit for each token."""

    def __init__(self, config: GuidedDecodingConfig, vocab_size: int) -> None:
        """`vocab_size` is the width of the logits. No guide allows an id that the config does not have."""
        from xgrammar import TokenizerInfo, VocabType

        self.size = vocab_size
        self.end_ids = frozenset(one for one in config.stop_token_ids or () if 0 <= one < vocab_size)
        stop_ids = sorted(self.end_ids) or None
        described = json.loads(config.tokenizer_str or "{}")
        texts = _texts(config, described)[:vocab_size]
        decoded = TokenizerInfo(texts, _vocab_type(described), vocab_size=vocab_size).decoded_vocab
        written = [one if is_part_of_text(one) else b"" for one in decoded]
        self.info = TokenizerInfo(written, VocabType.RAW, vocab_size=vocab_size, stop_token_ids=stop_ids)
        # xgrammar's strings of a given length would have control characters, which no string of JSON has.
        written = [b"" if CONTROL.search(one) else one for one in written]
        self.json_info = TokenizerInfo(written, VocabType.RAW, vocab_size=vocab_size, stop_token_ids=stop_ids)
        self._last_bytes = {token_id: one[-1] for token_id, one in enumerate(decoded) if one and one[-1] in SECOND}
        self._masks_after = {byte: self.mask_of(_fitting(decoded, seconds)) for byte, seconds in SECOND.items()}

    def info_for(self, params: GuidedDecodingParams) -> TokenizerInfo:
        return self.json_info if params.guide_type in (GuideType.JSON, GuideType.JSON_SCHEMA) else self.info

    def mask_after(self, token_id: int) -> Mask | None:
        """The mask of the tokens that may follow in valid UTF-8, or None if all may that xgrammar allows."""
        return self._masks_after[self._last_bytes[token_id]] if token_id in self._last_bytes else None

    def mask_of(self, token_ids: Iterable[int]) -> Mask:
        bits = np.zeros(-(-self.size // WORD_BITS) * WORD_BITS, bool)
        bits[list(token_ids)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)


def _texts(config: GuidedDecodingConfig, described: Mapping[str, Any]) -> list[str]:
    """The texts of the tokens. That of a special token is empty: nothing of it is written into an answer."""
    texts = list(config.encoded_vocab)
    for token in described.get("added_tokens", ()):
        if token["special"] and token["id"] < len(texts):
            texts[token["id"]] = ""
    return texts


def _fitting(written: Sequence[bytes], seconds: range) -> list[int]:
    """The tokens that go on with one of these bytes, or that do not go on with a character."""
    return [token_id for token_id, one in enumerate(written) if not is_middle(one) or one[0] in seconds]


def _vocab_type(described: Mapping[str, Any]) -> VocabType:
    """How the texts of tokens become bytes."""
    from xgrammar import VocabType

    decoders = set(_decoders(described.get("decoder")))
    if "ByteLevel" in decoders:
        return VocabType.BYTE_LEVEL
    # This type also turns the mark of a word's begin into a space.
    return VocabType.BYTE_FALLBACK if decoders & {"ByteFallback", "Metaspace"} else VocabType.RAW


def _decoders(decoder: Mapping[str, Any] | None) -> Iterator[str]:
    if decoder is not None:
        yield decoder["type"]
        for one in decoder.get("decoders", ()):
            yield from _decoders(one)


def _add_tokens(tokenizer: Tokenizer, listed: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the tokens that only tokenizer_config.json has."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            flags = {name: token[name] for name in ("lstrip", "rstrip", "single_word", "normalized") if name in token}
            tokenizer.add_tokens([AddedToken(token["content"], special=token.get("special", False), **flags)])


def _read_json(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return read
