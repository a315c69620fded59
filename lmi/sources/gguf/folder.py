"""Makes a model's folder of a GGUF file: the files that all else reads, and links to the weights.

Nothing of the file is run. The files made of it are read again as those of any model are.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

from lmi.shared.gguf_file import GgufModel, read_model
from lmi.sources.gguf.config import config_of
from lmi.sources.gguf.tokenizer import text_of, tokenizer_of
from lmi.sources.gguf.values import GgufValues

TEMPLATE = "tokenizer.chat_template"
NAMES_OF_TEMPLATES = "tokenizer.chat_templates"
MAX_TEMPLATES = 16
NAME_OF_TEMPLATE = re.compile("[A-Za-z0-9_-]{1,64}")
SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""The maker's advice, by the names of generation_config.json."""

log = logging.getLogger(__name__)


def open_into(file: Path, folder: Path) -> None:
    """Write config.json, the tokenizer, templates and defaults of a GGUF file into a new folder.

    `file` may be any file of a split model. Raises ModelUnusable for what is broken or not read.
    """
    model = read_model(file)
    values = GgufValues(model)
    config = config_of(model)
    opened = tokenizer_of(values)
    for warning in opened.warnings:
        log.warning("%s", warning)

    _write(folder / "config.json", config)
    _write(folder / "tokenizer_config.json", opened.config)
    _write(folder / "generation_config.json", _defaults(values, opened.end_ids))
    (folder / "tokenizer.json").write_text(text_of(opened.tokenizer), encoding="utf-8")
    _write_templates(values, folder)
    _link(model, folder)


def _defaults(values: GgufValues, end_ids: list[int]) -> dict[str, Any]:
    """Return the content of generation_config.json. Advice that is no number is left out."""
    defaults: dict[str, Any] = {}
    for key, name in SAMPLING.items():
        value = values.metadata.get(key)
        if type(value) in (int, float):
            defaults[name] = value

    defaults["eos_token_id"] = end_ids
    return defaults


def _write_templates(values: GgufValues, folder: Path) -> None:
    """Write the chat template, and others beside it where the file names them."""
    if TEMPLATE not in values:
        return

    (folder / "chat_template.jinja").write_text(values.text(TEMPLATE), encoding="utf-8")
    if NAMES_OF_TEMPLATES not in values:
        return

    names = values.texts(NAMES_OF_TEMPLATES)
    further_templates = folder / "additional_chat_templates"
    for name in names[:MAX_TEMPLATES]:
        key = f"{TEMPLATE}.{name}"
        if NAME_OF_TEMPLATE.fullmatch(name) and key in values:
            further_templates.mkdir(exist_ok=True)
            (further_templates / f"{name}.jinja").write_text(values.text(key), encoding="utf-8")


def _link(model: GgufModel, folder: Path) -> None:
    for file in model.files:
        (folder / file.name).symlink_to(file.absolute())


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
