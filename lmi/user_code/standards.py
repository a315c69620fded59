"""Finds code for AWS's model-hosting-container-standards, which is not run here, so that no server
starts without it.

Such code may check who asks, or redact what is answered. Sources: that package's pages and its
examples.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from lmi.errors import ModelUnusable, shorten
from lmi.settings.values import Values
from lmi.shared.model_files import read_bounded

PACKAGE = "model_hosting_container_standards"
FIXED_NAMES = ("custom_sagemaker_ping_handler", "custom_sagemaker_invocation_handler")
SCRIPT = "CUSTOM_SCRIPT_FILENAME"
SCRIPT_FOLDER = "SAGEMAKER_MODEL_PATH"
VARIABLES = (
    "CUSTOM_FASTAPI_PING_HANDLER",
    "CUSTOM_FASTAPI_INVOCATION_HANDLER",
    "CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE",
    "CUSTOM_FASTAPI_MIDDLEWARE_PRE_POST_PROCESS",
    "CUSTOM_PRE_PROCESS",
    "CUSTOM_POST_PROCESS",
)
INSTEAD = (
    "handlers of model-hosting-container-standards are not run here; LMI's handle and "
    "formatters of a model.py are"
)


def refuse_unrun_handlers(values: Values, folders: list[Path]) -> None:
    """Refuse variables that name such a handler, and each file below `folders` that has one."""
    for name in VARIABLES:
        spec = values.start.environ.get(name, "").strip()
        if spec:
            values.fail(f"{name}={shorten(spec)}: {INSTEAD}")

    for file in _scripts(values, folders):
        mark = _mark(file)
        if mark is not None:
            values.unusable = ModelUnusable(f"{file}: {mark}: {INSTEAD}")
            return


def _scripts(values: Values, folders: list[Path]) -> Iterator[Path]:
    """Yield the files in which that package would look for handlers."""
    script_folder = values.start.environ.get(SCRIPT_FOLDER, "").strip()
    if script_folder:
        folders = [*folders, Path(script_folder)]

    name = values.start.environ.get(SCRIPT, "").strip() or "model.py"
    for folder in dict.fromkeys(folders):
        for file in (folder / name, folder / "code" / name):
            if file.is_file():
                yield file


def _mark(file: Path) -> str | None:
    """Return what shows that a file has such handlers, as a message about it says it, or None."""
    try:
        tree = ast.parse(read_bounded(file), str(file))
    except (OSError, SyntaxError, ValueError, RecursionError):
        # Whoever would run the file reports it.
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            continue

        if any(module.split(".")[0] == PACKAGE for module in modules):
            return f"line {node.lineno} imports {PACKAGE}"

    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in FIXED_NAMES:
            return f"line {node.lineno} has {node.name}"

    return None
