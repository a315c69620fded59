"""Whether an engine can guide decoding: llguidance must be there, and the texts of tokens."""

import importlib.util
from importlib.metadata import version
from pathlib import Path

from handlers.guides.tokenizer_files import TOKENIZER_FILE

# Older ones allow escapes by which an answer leaves its schema.
MIN_LLGUIDANCE = (1, 9)
NO_TEXTS = "guides need the texts of tokens, which option.skip_tokenizer_init leaves out"


def why_no_guides(folder: Path | None) -> str:
    """Return why the engine cannot guide decoding, or "" if it can.

    `folder` has the tokenizer's files. None: the vocabulary is known without them.
    """
    if importlib.util.find_spec("llguidance") is None:
        return "llguidance is not installed"

    installed = version("llguidance")
    numbers = tuple(map(int, installed.split(".")[:2]))
    if numbers < MIN_LLGUIDANCE:
        return f"llguidance {installed} is too old for guides: pip install 'llguidance>=1.9'"

    if folder is not None and not (folder / TOKENIZER_FILE).is_file():
        return f"the model's folder has no {TOKENIZER_FILE}"

    return ""
