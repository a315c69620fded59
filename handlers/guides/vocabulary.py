"""The vocabulary that guided decoding needs: what each token writes, and which tokens may end an
answer.
"""

import importlib.util
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lmi.executor import GuidedDecodingConfig

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from tokenizers import Tokenizer

Mask = NDArray[np.int32]

WORD_BITS = 32
FILE_NAME = "tokenizer.json"
OLDEST = 1, 9  # of llguidance: those before obey escapes that leave a schema
NO_TEXTS = "guides need the texts of tokens, which option.skip_tokenizer_init leaves out"


def why_no_guides(folder: Path | None) -> str:
    """Why the engine cannot guide decoding with the vocabulary in a folder, or "" if it can."""
    if importlib.util.find_spec("llguidance") is None:
        return "llguidance is not installed"

    if tuple(map(int, (found := version("llguidance")).split(".")[:2])) < OLDEST:
        return f"llguidance {found} is too old for guides: pip install 'llguidance>=1.9'"

    if folder is not None and not (folder / FILE_NAME).is_file():
        return f"the model's folder has no {FILE_NAME}"

    return ""


def read_config(folder: str | Path) -> GuidedDecodingConfig:
    """Read the tokenizer's files in a folder. An id between others that no token has gets an empty
    text.
    """
    from tokenizers import Tokenizer

    folder = Path(folder)
    tokenizer = Tokenizer.from_file(str(folder / FILE_NAME))
    config = _read_json(folder / "tokenizer_config.json")
    eos_token = config.get("eos_token") or _read_json(folder / "special_tokens_map.json").get(
        "eos_token"
    )
    _add_tokens(tokenizer, config.get("added_tokens_decoder", {}))
    ids = tokenizer.get_vocab()
    texts = [""] * (max(ids.values()) + 1)
    for text, token_id in ids.items():
        texts[token_id] = text

    eos_id = ids.get(eos_token["content"] if isinstance(eos_token, dict) else eos_token or "")
    return GuidedDecodingConfig(texts, tokenizer.to_str(), None if eos_id is None else [eos_id])


class Vocabulary:
    """What guides must know of the tokens. A mask is int32 (vocab / 32,), with a bit for each
    token.
    """

    def __init__(self, config: GuidedDecodingConfig, vocab_size: int) -> None:
        """`vocab_size` is the width of the logits. No guide allows an id that the config does not
        have.
        """
        from handlers.guides.text import new_tokenizer

        self.size = vocab_size
        self.end_ids = frozenset(
            one for one in config.stop_token_ids or () if 0 <= one < vocab_size
        )
        self.tokenizer = new_tokenizer(config, vocab_size)
        self.marks = self.mask_of(
            one for one in self.tokenizer.eos_tokens if one < vocab_size
        )  # of an end or an error
        self._row = np.zeros(
            -(-self.tokenizer.vocab_size // WORD_BITS), np.int32
        )  # the tokenizer may be wider

    def mask_of(self, token_ids: Iterable[int]) -> Mask:
        bits = np.zeros(-(-self.size // WORD_BITS) * WORD_BITS, bool)
        bits[list(token_ids)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)

    def mask_from(self, matcher: "LLMatcher") -> Mask:
        """The tokens that may come next, up to the next call. llguidance's own end ids are among
        them at an end.
        """
        matcher.unsafe_compute_mask_ptr(self._row.ctypes.data, self._row.nbytes)
        return self._row[: -(-self.size // WORD_BITS)]


def _add_tokens(tokenizer: "Tokenizer", listed: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the tokens that only tokenizer_config.json has."""
    from tokenizers import AddedToken

    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            flags = {
                name: token[name]
                for name in ("lstrip", "rstrip", "single_word", "normalized")
                if name in token
            }
            tokenizer.add_tokens(
                [AddedToken(token["content"], special=token.get("special", False), **flags)]
            )


def _read_json(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return read
