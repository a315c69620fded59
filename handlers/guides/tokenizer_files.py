"""Reads the vocabulary that guided decoding needs from the tokenizer's files of a model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmi.executor import GuidedDecodingConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
# What tokenizer_config.json may say of a token, beside its text and whether it is special.
TOKEN_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def read_vocabulary(folder: str | Path) -> GuidedDecodingConfig:
    """Return what guided decoding needs of a model: the texts of all tokens by their ids, the
    tokenizer and the end token.

    An id that no token has, between others, gets an empty text.
    """
    from tokenizers import Tokenizer

    folder = Path(folder)
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    config = _read_json(folder / "tokenizer_config.json")
    _add_tokens(tokenizer, config.get("added_tokens_decoder", {}))

    ids = tokenizer.get_vocab()
    texts = [""] * (max(ids.values()) + 1)
    for text, token_id in ids.items():
        texts[token_id] = text

    end_id = ids.get(_end_token(folder, config))
    end_ids = None if end_id is None else [end_id]
    return GuidedDecodingConfig(texts, tokenizer.to_str(), end_ids)


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


def _end_token(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the text of the end token, "" if the files name none."""
    token = config.get("eos_token")
    if not token:
        token = _read_json(folder / "special_tokens_map.json").get("eos_token")

    text: str = token["content"] if isinstance(token, dict) else token or ""
    return text


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, an empty one if there is no such file."""
    if not path.is_file():
        return {}

    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return fields
