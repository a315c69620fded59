"""Reads the files of a model's tokenizer: the library's object, the special tokens by name, and the
tokens that end an answer.

The files have the precedence that they have in transformers. A folder without tokenizer.json is
converted by a child process (convert.py), because transformers would import torch here.
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from lmi.errors import ModelUnusable, cause_line
from lmi.shared.model_files import read_bounded
from lmi.text.library_errors import explained

CONVERSION_TIMEOUT_S = 120.0
# The keys of tokenizer_config.json that have one special token each.
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Those that have several, with names or without.
FURTHER_TOKENS = ("additional_special_tokens", "extra_special_tokens")
# The files of older forms.
OLDER_FILES = (
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.txt",
)


class TokenizerFiles(NamedTuple):
    """What the files of a model say of its tokenizer."""

    backend: tokenizers.Tokenizer
    # "bos_token" → "<s>", and so on.
    special_tokens: dict[str, str]
    eos_ids: Iterable[int]


def load_files(folder: Path) -> TokenizerFiles:
    """Load the tokenizer of a model folder. Raises ModelUnusable with one line that names the
    file.
    """
    tokenizer_file = folder / "tokenizer.json"
    config_file = folder / "tokenizer_config.json"
    config = _read_json(folder / "special_tokens_map.json")
    for name, value in _read_json(config_file).items():
        if value is not None:
            config[name] = value

    with explained(ModelUnusable, f"{tokenizer_file}: not a tokenizer"):
        if tokenizer_file.is_file():
            backend = tokenizers.Tokenizer.from_file(str(tokenizer_file))
        else:
            backend = tokenizers.Tokenizer.from_str(_convert(folder))

    try:
        special_tokens = _apply_config(backend, config)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {cause_line(error)}"
        raise ModelUnusable(f"{config_file}: a token is not described as one ({reason})") from error

    return TokenizerFiles(backend, special_tokens, _eos_ids(folder, backend, special_tokens))


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
    files = [folder / name for name in OLDER_FILES if (folder / name).is_file()]
    if not files:
        raise ModelUnusable(
            f"{folder}: no tokenizer: tokenizer.json is missing, and so are "
            f"{', '.join(OLDER_FILES)}"
        )

    file = files[0]
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
    """Add the tokens of tokenizer_config.json to the backend. Returns the special tokens that have
    names, by name.

    `add_bos_token` and `add_eos_token` have no effect: the post-processor in tokenizer.json decides
    which tokens are added to a prompt.
    """
    added = config.get("added_tokens_decoder", {})
    by_id = sorted(added.items(), key=lambda entry: int(entry[0]))
    backend.add_tokens([_added_token(token) for _, token in by_id])

    special_tokens: dict[str, AddedToken] = {}
    for name in NAMED_TOKENS:
        if config.get(name):
            special_tokens[name] = _added_token(config[name])

    nameless: list[AddedToken] = []
    for key in FURTHER_TOKENS:
        tokens = config.get(key) or []
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
    """Return the ids of the end tokens: those of the first configuration that names some, then
    `eos_token`.
    """
    config = _read_json(folder / "config.json")
    configurations = [_read_json(folder / "generation_config.json"), config]
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        configurations.append(text_config)

    candidates: list[Any] = []
    for configuration in configurations:
        eos_token_id = configuration.get("eos_token_id")
        if isinstance(eos_token_id, list):
            candidates += eos_token_id
            break

        if eos_token_id is not None:
            candidates.append(eos_token_id)
            break

    if "eos_token" in special_tokens:
        candidates.append(backend.token_to_id(special_tokens["eos_token"]))

    return dict.fromkeys(
        token_id for token_id in candidates if type(token_id) is int and token_id >= 0
    )
