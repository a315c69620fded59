"""Reads the variables of AWS's llama.cpp image, in which SM_LLAMA_CPP_<FLAG> is a flag of
llama-server.

The variables that name a model in a file, a folder or a hub's repository give `option.model_id`,
and the flags of FLAGS their options. A variable that names a model in another way ends the start,
because the server would have another model. The rest is reported in a warning. Source: AWS's
llama.cpp containers.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from lmi.errors import shorten
from lmi.settings.flag_variables import Flag
from lmi.settings.given import COMMAND_LINE, PLATFORM, Given
from lmi.settings.steps import Resolution
from lmi.settings.table import MODEL

GGUF = ".gguf"
PREFIX = "SM_LLAMA_CPP_"
FILE = f"{PREFIX}MODEL"
FOLDER = f"{PREFIX}MODEL_DIR"
REPOSITORY = f"{PREFIX}HF_REPO"
FILE_OF_REPOSITORY = f"{PREFIX}HF_FILE"
# The rank of these variables among those of AWS's images: HF_MODEL_ID and its like come first.
FIRST_ORDER = 10
# Variables that name a model in a way that is not read here.
UNREAD_MODEL = re.compile(
    rf"{PREFIX}(MODELS(_DIR|_PRESET)?|MODEL_URL|DOCKER_REPO|[A-Z0-9_]+_DEFAULT)"
)

# The flags that an option means. The texts in `words` stand for a default, and give nothing.
FLAGS = (
    Flag("CTX_SIZE", "option.max_model_len", words={"0": ""}),
    Flag("PARALLEL", "option.max_rolling_batch_size", words={"-1": ""}),
    Flag("THREADS", "option.num_threads", words={"-1": ""}),
    Flag("ALIAS", "option.served_model_name"),
    Flag("API_KEY", "option.api_key"),
    Flag("HOST", "host"),
    Flag("PORT", "port"),
)
# The variables that are read.
READ = {FILE, FOLDER, REPOSITORY, FILE_OF_REPOSITORY} | {PREFIX + flag.name for flag in FLAGS}


class ModelVariable(NamedTuple):
    """A variable that names a model, and the text for `option.model_id`."""

    variable: str
    text: str


def givens(environ: Mapping[str, str]) -> Iterator[Given]:
    """Yield the values that the image's variables give to options."""
    texts = _texts(environ)
    for order, model in enumerate(_models(texts), FIRST_ORDER):
        yield Given.of(MODEL, model.text, model.variable, PLATFORM, order)

    for flag in FLAGS:
        name = f"{PREFIX}{flag.name}"
        text = flag.text(texts.get(name, ""))
        if text:
            yield Given.of(flag.key, text, name, PLATFORM, FIRST_ORDER)


def _texts(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of the image's variables that are set, by variable."""
    texts = {}
    for name, text in environ.items():
        if name.startswith(PREFIX) and text.strip():
            texts[name] = text.strip()

    return texts


def _models(texts: Mapping[str, str]) -> Iterator[ModelVariable]:
    """Yield the models that variables name. The first one counts."""
    if FILE in texts:
        yield ModelVariable(FILE, texts[FILE])

    if FOLDER in texts:
        yield ModelVariable(FOLDER, _first_file(texts[FOLDER]))

    if REPOSITORY in texts:
        model = texts[REPOSITORY]
        file = texts.get(FILE_OF_REPOSITORY)
        if file is not None:
            repository, _, _ = model.partition(":")
            model = f"{repository}/{file}"

        yield ModelVariable(REPOSITORY, model)


def _first_file(folder: str) -> str:
    """Return the first GGUF file of a folder, else the first one of its subfolders.

    Without one, return the folder itself, which a later message then names.
    """
    for pattern in (f"*{GGUF}", f"*/*{GGUF}"):
        files = sorted(Path(folder).glob(pattern))
        if files:
            return str(files[0])

    return folder


def report(resolution: Resolution) -> None:
    """Report the variables that are not read: a fault if the model that one names would be missed,
    else a warning.
    """
    values = resolution.values
    start = resolution.start
    texts = _texts(start.environ)
    unread = set(filter(UNREAD_MODEL.fullmatch, texts))
    if FILE_OF_REPOSITORY in texts and REPOSITORY not in texts:
        unread.add(FILE_OF_REPOSITORY)

    is_in_command = start.is_folder_asked
    if MODEL in values and values.how_given(MODEL).rank.layer == COMMAND_LINE:
        is_in_command = True

    for name in sorted(unread):
        fault = f"{name}={shorten(texts[name])}: names a model and is not read"
        if values.final("multi_model"):
            values.warn(f"{fault}; multi_model starts without a model")
        elif is_in_command:
            values.warn(f"{fault}, so the model of the command line is served")
        else:
            values.fail(
                f"{fault}; write HF_MODEL_ID with OWNER/NAME:Q4_K_M, OWNER/NAME/FILE.gguf or the "
                "path of a file in its place"
            )

    without_option = sorted(texts.keys() - READ - unread)
    if without_option:
        names = ", ".join(without_option)
        values.warn(f"{names}: flags of llama-server that no option here means")
