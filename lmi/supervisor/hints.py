"""What an operator can do about a start that failed, as far as its error and message show."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, requires

CHECKPOINT = (
    "a model's folder holds what save_pretrained writes (config.json, a tokenizer, *.safetensors), or a model.py"
)
DAMAGED_FILE = "mend the file that the message names, or copy it again"
LOG = "see the log above"
OPTIONS = "`lmi config` prints every option, its value and where it came from"
SOURCES = "lmi serve takes a folder, OWNER/NAME of a hub, s3://BUCKET/PREFIX or demo"
MISSING_LIBRARY = re.compile(
    r"No module named '(\w+)|the library (\w+) is not installed|No package metadata was found for (\w+)"
)
OF_A_CHECKPOINT = (".json", ".safetensors", ".jinja", ".model")
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+).*; extra == ['\"](?P<extra>[\w-]+)['\"]")
NOT_DAMAGED = re.compile("no architectures|option[.]rolling_batch=|is not installed")

# The label of an error, a pattern of its message, and the hint. The first row that fits counts. A fault without a row
# has no hint, because none is better than a wrong one.
ROWS = (
    ("bad_configuration", "", OPTIONS),
    ("port_unavailable", "", "--host and --port choose another address; a taken port belongs to another process"),
    ("source_unreachable", "^no folder ", "HF_HUB_OFFLINE=1 asks no hub and serves what its cache holds"),
    ("model_unusable", "(HF_HUB|TRANSFORMERS)_OFFLINE=", "without that variable the hub is asked"),
    ("model_unusable", "credentials", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or a role name them"),
    ("model_unusable", "^[^:]+: (does not exist|is not a folder)", SOURCES),
    ("model_unusable", "^option[.]", OPTIONS),
    ("model_unusable", "a model(.s folder)? has |: no tokenizer|: no (weights|model[.]safetensors)|GGUF", CHECKPOINT),
    ("security_refused", r"option[.]\w+=true", "that option switches it on, if you trust the model"),
    ("security_refused", "DISALLOW_", "SAGEMAKER_SECURITY_CONTROLS names what secure mode refuses"),
    ("engine_lost", "did not finish loading", "--model-loading-timeout SECONDS gives it longer"),
    ("engine_lost", "", "its own messages stand further up in this log"),
    ("front_end_lost", "", LOG),
    ("gateway_lost", "", LOG),
    ("start_failed", r"^\w+: |^the fetch failed|died", LOG),
)


def hint(label: str, message: str) -> str:
    """Return what an operator can do about an error of this label and message, or ""."""
    if found := MISSING_LIBRARY.search(message):
        return _missing(next(filter(None, found.groups())), is_user_code=".py: " in message)
    if label == "model_unusable" and _is_damaged(message):
        return DAMAGED_FILE
    return next((hint for known, pattern, hint in ROWS if known == label and re.search(pattern, message)), "")


def _missing(library: str, *, is_user_code: bool) -> str:
    if is_user_code:
        return f"name {library} in a requirements.txt beside the file, or install it where lmi itself is installed"
    extra = extra_with(library)
    if extra is None:
        return f"install {library} where lmi itself is installed"
    return f"scripts/install {extra}, or pip install '.[{extra}]', in a clone of lmi"


def extra_with(library: str) -> str | None:
    """Return the extra of this package that installs a library, None if no extra for users does."""
    try:
        found = [REQUIREMENT.match(line) for line in requires("lmi") or ()]
    except PackageNotFoundError:  # lmi runs from its sources
        return None
    extras = {match["name"].replace("-", "_"): match["extra"] for match in found if match and match["extra"] != "dev"}
    parts = (extra for name, extra in extras.items() if name.startswith(f"{library}_"))  # packages of one namespace
    return extras.get(library) or next(parts, None)


def _is_damaged(message: str) -> bool:
    file = message.partition(": ")[0]
    return file.endswith(OF_A_CHECKPOINT) and os.path.isfile(file) and not NOT_DAMAGED.search(message)
