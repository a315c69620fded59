"""What an operator can do about an error of a start."""

import os
import re
from importlib.metadata import PackageNotFoundError, requires
from typing import NamedTuple

CHECKPOINT = (
    "a model's folder holds what save_pretrained writes (config.json, a tokenizer, "
    "*.safetensors), or a model.py"
)
DAMAGED_FILE = "mend the file that the message names, or copy it again"
LOG = "see the log above"
OF_GGUF = "serve another GGUF file of it, or the checkpoint in safetensors that it was made from"
GGUF_ENGINE = (
    "--rolling-batch chooses an engine that reads it; others take the checkpoint in safetensors "
    "that it was made from"
)
GGUF_FILE = "lmi serve takes the GGUF file itself: lmi serve FOLDER/FILE.gguf"
OF_QUANTISED = (
    "serve it with that engine, or the checkpoint that it was made from, with "
    "--quantize int8 where memory is short"
)
OPTIONS = "`lmi config` prints every option, its value and where it came from"
SOURCES = (
    "lmi serve takes a folder, a GGUF file, a name that lmi list shows, OWNER/NAME of a hub "
    "(OWNER/NAME:Q4_K_M of its GGUF files), s3://BUCKET/PREFIX, "
    "https://HOST/FILE.gguf or demo"
)
# The library is the one group that matches.
MISSING_LIBRARY = re.compile(
    r"No module named '(\w+)|the library (\w+) is not installed|No package metadata was found for "
    r"(\w+)"
)
OF_A_CHECKPOINT = (".json", ".safetensors", ".jinja", ".model")
# A requirement of an extra, as the metadata of a package has it.
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+).*; extra == ['\"](?P<extra>[\w-]+)['\"]")
# What messages say of a file that can be read.
NOT_DAMAGED = re.compile("no architectures|option[.]rolling_batch=|is not installed")


class Hint(NamedTuple):
    """What an operator can do about the errors of one label whose message fits a pattern."""

    label: str
    pattern: str
    advice: str


# The first row that fits counts. A fault without a row has no hint, because none is better than a
# wrong one.
HINTS = (
    Hint("bad_configuration", "", OPTIONS),
    Hint(
        "port_unavailable",
        r"[(]lmi-",
        "--takeover takes the port over once this server is ready, --port chooses another",
    ),
    Hint(
        "port_unavailable",
        "",
        "--host and --port choose another address; a taken port belongs to another process",
    ),
    Hint(
        "source_unreachable",
        "^no (folder|file) ",
        "HF_HUB_OFFLINE=1 asks no hub and serves what its cache holds",
    ),
    Hint(
        "model_unusable", "(HF_HUB|TRANSFORMERS)_OFFLINE=", "without that variable the hub is asked"
    ),
    Hint(
        "model_unusable",
        "credentials",
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or a role name them",
    ),
    Hint("model_unusable", "^[^:]+: (does not exist|is not a folder)", SOURCES),
    Hint("model_unusable", "^option[.]", OPTIONS),
    Hint("model_unusable", "does not read GGUF|its weights are GGUF", GGUF_ENGINE),
    Hint(
        "model_unusable", "[.]gguf: (is not a GGUF file|is empty|it ends|.*cut short)", DAMAGED_FILE
    ),
    Hint("model_unusable", "[.]gguf: .*(not read|only .* read|must be one of)", OF_GGUF),
    Hint("model_unusable", "holds .*[.]gguf.*; a model", GGUF_FILE),
    Hint(
        "model_unusable",
        "a model(.s folder)? has |: no tokenizer|: no (weights|model[.]safetensors)",
        CHECKPOINT,
    ),
    Hint("model_unusable", "quantised already", OF_QUANTISED),
    Hint(
        "model_unusable",
        "option[.]rolling_batch=",
        "scripts/install installs other engines, --rolling-batch chooses one",
    ),
    Hint(
        "security_refused",
        r"option[.]\w+=true",
        "that option switches it on, if you trust the model",
    ),
    Hint(
        "security_refused",
        "DISALLOW_",
        "SAGEMAKER_SECURITY_CONTROLS names what secure mode refuses",
    ),
    Hint(
        "engine_lost", "did not finish loading", "--model-loading-timeout SECONDS gives it longer"
    ),
    Hint(
        "engine_lost",
        "memory runs out",
        "a larger limit of memory, or a smaller model, unless somebody else killed it",
    ),
    Hint("engine_lost", "", "its own messages stand further up in this log"),
    Hint("front_end_lost", "", LOG),
    Hint("gateway_lost", "", LOG),
    Hint("start_failed", "memory runs out", "a larger limit of memory"),
    Hint("start_failed", r"^\w+: |^the fetch failed|died", LOG),
)


def hint(label: str, message: str) -> str:
    """Return what an operator can do about an error of this label and message, or ""."""
    missing = MISSING_LIBRARY.search(message)
    if missing is not None:
        library = next(filter(None, missing.groups()))
        return _hint_of_library(library, message)

    if label == "model_unusable" and _names_damaged_file(message):
        return DAMAGED_FILE

    for row in HINTS:
        if row.label == label and re.search(row.pattern, message):
            return row.advice

    return ""


def _hint_of_library(library: str, message: str) -> str:
    """Return how to install a library that is missing."""
    if ".py: " in message:
        return (
            f"name {library} in a requirements.txt beside the file, or install it where lmi "
            "itself is installed"
        )

    extra = _extra_with(library)
    if extra:
        return f"scripts/install {extra}, or pip install '.[{extra}]', in a clone of lmi"

    return f"install {library} where lmi itself is installed"


def _names_damaged_file(message: str) -> bool:
    """Return whether a message begins with a file of a checkpoint, as that of a broken one does."""
    file = message.partition(": ")[0]
    is_of_checkpoint = file.endswith(OF_A_CHECKPOINT) and os.path.isfile(file)
    return is_of_checkpoint and not NOT_DAMAGED.search(message)


def _extra_with(library: str) -> str | None:
    """Return the extra of this package that installs a library, None if no extra for users does."""
    try:
        requirements = requires("lmi") or ()
    except PackageNotFoundError:
        # It runs from its sources.
        return None

    extras = dict[str, str]()
    for line in requirements:
        match = REQUIREMENT.match(line)
        if match and match["extra"] != "dev":
            extras[match["name"].replace("-", "_")] = match["extra"]

    if library in extras:
        return extras[library]

    # Perhaps the library is a namespace of several packages.
    for name, extra in extras.items():
        if name.startswith(f"{library}_"):
            return extra

    return None
