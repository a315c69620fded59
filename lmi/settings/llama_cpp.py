"""The variables of AWS's llama.cpp image, where SM_LLAMA_CPP_<FLAG> is a flag of llama-server.

Those that name the model, or set what an option here sets, are read. Other variables that name a
model end the start, because another model would be served. Source: AWS's llama.cpp containers.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

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
# Among the variables of AWS's images these come behind those that name a model.
FIRST_ORDER = 10
# Variables that name a model in a way that is not read here.
UNREAD_MODEL = re.compile(
    rf"{PREFIX}(MODELS(_DIR|_PRESET)?|MODEL_URL|DOCKER_REPO|[A-Z0-9_]+_DEFAULT)"
)


FLAGS = (
    # These texts mean llama-server's defaults.
    Flag("CTX_SIZE", "option.max_model_len", words={"0": ""}),
    Flag("PARALLEL", "option.max_rolling_batch_size", words={"-1": ""}),
    Flag("THREADS", "option.num_threads", words={"-1": ""}),
    Flag("ALIAS", "option.served_model_name"),
    Flag("API_KEY", "option.api_key"),
    Flag("HOST", "host"),
    Flag("PORT", "port"),
)
READ = frozenset(
    (FILE, FOLDER, REPOSITORY, FILE_OF_REPOSITORY, *(f"{PREFIX}{flag.name}" for flag in FLAGS))
)


def givens(environ: Mapping[str, str]) -> Iterator[Given]:
    """Yield the values that the image's variables give to options."""
    texts = _texts(environ)
    for order, (name, text) in enumerate(_models(texts), FIRST_ORDER):
        yield Given.of(MODEL, text, name, PLATFORM, order)

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


def _models(texts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the variables that name a model, each with what it names. The first one counts."""
    if FILE in texts:
        yield FILE, texts[FILE]

    if FOLDER in texts:
        yield FOLDER, _first_file(texts[FOLDER])

    if REPOSITORY in texts:
        model = texts[REPOSITORY]
        file = texts.get(FILE_OF_REPOSITORY)
        if file is not None:
            repository, _, _ = model.partition(":")
            model = f"{repository}/{file}"

        yield REPOSITORY, model


def _first_file(folder: str) -> str:
    """Return the first GGUF file of a folder, or the first one in the folders below. If there is
    none, return the folder, for the message about it.
    """
    for pattern in (f"*{GGUF}", f"*/*{GGUF}"):
        files = sorted(Path(folder).glob(pattern))
        if files:
            return str(files[0])

    return folder


def report(resolution: Resolution) -> None:
    """Report each variable that names a model in a way that is not read here, and those that no
    option means.
    """
    values = resolution.values
    start = resolution.start
    texts = _texts(start.environ)
    unread = set(filter(UNREAD_MODEL.fullmatch, texts))
    if FILE_OF_REPOSITORY in texts and REPOSITORY not in texts:
        unread.add(FILE_OF_REPOSITORY)

    in_command = start.is_folder_asked
    if MODEL in values:
        in_command |= values.how_given(MODEL).rank.layer == COMMAND_LINE

    for name in sorted(unread):
        fault = f"{name}={shorten(texts[name])}: names a model and is not read"
        if values.final("multi_model"):
            values.warn(f"{fault}; multi_model starts without a model")
        elif in_command:
            values.warn(f"{fault}, so the model of the command line is served")
        else:
            values.fail(
                f"{fault}; write HF_MODEL_ID with OWNER/NAME:Q4_K_M, OWNER/NAME/FILE.gguf or the "
                "path of a file in its place"
            )

    meaningless = sorted(texts.keys() - READ - unread)
    if meaningless:
        values.warn(f"{', '.join(meaningless)}: flags of llama-server that no option here means")
