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
# The oldest llguidance. Those before it obey escapes that leave a schema.
OLDEST = (1, 9)
NO_TEXTS = "guides need the texts of tokens, which option.skip_tokenizer_init leaves out"
TOKEN_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def why_no_guides(folder: Path | None) -> str:
    """Why the engine cannot guide decoding with the vocabulary in a folder, or "" if it can."""
    if importlib.util.find_spec("llguidance") is None:
        return "llguidance is not installed"

    installed = version("llguidance")
    numbers = tuple(map(int, installed.split(".")[:2]))
    if numbers < OLDEST:
        return f"llguidance {installed} is too old for guides: pip install 'llguidance>=1.9'"

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
    eos_token = config.get("eos_token")
    if not eos_token:
        eos_token = _read_json(folder / "special_tokens_map.json").get("eos_token")

    _add_tokens(tokenizer, config.get("added_tokens_decoder", {}))
    ids = tokenizer.get_vocab()
    texts = [""] * (max(ids.values()) + 1)
    for text, token_id in ids.items():
        texts[token_id] = text

    if isinstance(eos_token, dict):
        eos_token = eos_token["content"]

    eos_id = ids.get(eos_token or "")
    end_ids = None if eos_id is None else [eos_id]
    return GuidedDecodingConfig(texts, tokenizer.to_str(), end_ids)


class Vocabulary:
    """What guides must know of the tokens. A mask is int32 (vocab / 32,), with a bit for each
    token.
    """

    def __init__(self, config: GuidedDecodingConfig, vocab_size: int) -> None:
        """`vocab_size` is the width of the logits. No guide allows an id that the config does not
        have.
        """
        from handlers.guides.tokenizer import new_tokenizer

        self.size = vocab_size
        end_ids = config.stop_token_ids or ()
        self.end_ids = frozenset(end_id for end_id in end_ids if 0 <= end_id < vocab_size)
        self.tokenizer = new_tokenizer(config, vocab_size)

        # The tokens by which llguidance marks an end or an error.
        marks = self.tokenizer.eos_tokens
        self.marks = self.mask_of(token_id for token_id in marks if token_id < vocab_size)

        # The tokenizer may be wider than the logits.
        num_words = -(-self.tokenizer.vocab_size // WORD_BITS)
        self._row = np.zeros(num_words, np.int32)

    def mask_of(self, token_ids: Iterable[int]) -> Mask:
        """Return the mask, int32 (size / 32, rounded up), with a bit for each of these tokens."""
        bits = np.zeros(-(-self.size // WORD_BITS) * WORD_BITS, bool)
        bits[list(token_ids)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)

    def mask_from(self, matcher: "LLMatcher") -> Mask:
        """The tokens that may come next, up to the next call. llguidance's own end ids are among
        them at an end.
        """
        matcher.unsafe_compute_mask_ptr(self._row.ctypes.data, self._row.nbytes)
        return self._row[: -(-self.size // WORD_BITS)]


def _add_tokens(tokenizer: "Tokenizer", tokens: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the tokens that only tokenizer_config.json has. `tokens` are all of its tokens by id."""
    from tokenizers import AddedToken

    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token_id in sorted(tokens, key=int):
        token = tokens[token_id]
        if token["content"] in present:
            continue

        flags = {name: token[name] for name in TOKEN_FLAGS if name in token}
        is_special = token.get("special", False)
        tokenizer.add_tokens([AddedToken(token["content"], special=is_special, **flags)])


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}

    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return fields
