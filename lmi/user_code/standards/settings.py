"""Finds code for AWS's model-hosting-container-standards, and says why it cannot run, so that no
server starts without it.

Such code may check who asks, or redact what is answered. Sources: that package, its pages and its
examples.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from lmi.shared.model_files import read_bounded

PACKAGE = "model_hosting_container_standards"
FIXED_NAMES = ("custom_sagemaker_ping_handler", "custom_sagemaker_invocation_handler")
SCRIPT = "CUSTOM_SCRIPT_FILENAME"
SCRIPT_FOLDER = "SAGEMAKER_MODEL_PATH"
PING = "CUSTOM_FASTAPI_PING_HANDLER"
INVOCATION = "CUSTOM_FASTAPI_INVOCATION_HANDLER"
HANDLERS = (PING, INVOCATION)
MIDDLEWARES = (
    "CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE",
    "CUSTOM_FASTAPI_MIDDLEWARE_PRE_POST_PROCESS",
    "CUSTOM_PRE_PROCESS",
    "CUSTOM_POST_PROCESS",
)
NEEDS_PACKAGE = (
    "handlers of model-hosting-container-standards need that package: scripts/install hooks, or a "
    "requirements.txt beside the model that names it"
)
# A line of a requirements.txt that names the package.
REQUIREMENT = re.compile(rb"^\s*model[-_.]hosting[-_.]container[-_.]standards\b", re.I | re.M)


class Script(NamedTuple):
    """What the code is, and who asks for it."""

    # The file, which need not exist where a variable names others.
    file: Path
    # Where the package looks for it, and for files that variables name.
    folder: Path
    # The folder of a model that it belongs to, None for one that a variable names.
    model_folder: Path | None
    # What shows that the file has handlers, as a message about it says it; "" without one.
    mark: str
    # The variables that name handlers or middlewares, with their values.
    variables: dict[str, str]
    # Another file with handlers, of which the package reads only one.
    other_file: Path | None = None


class ScriptPlace(NamedTuple):
    folder: Path
    model_folder: Path | None


def find_script(environ: Mapping[str, str], folders: list[Path]) -> Script | None:
    """Return the code that a variable or a file below the model's `folders` asks to run, or None.

    A file counts if it has handlers, or if a variable names it.
    """
    variables = {}
    for name in (*HANDLERS, *MIDDLEWARES):
        spec = environ.get(name, "").strip()
        if spec:
            variables[name] = spec

    named = environ.get(SCRIPT, "").strip()
    name = named or "model.py"
    places = list(_places(environ, folders))
    files = [(place, place.folder / name) for place in places if (place.folder / name).is_file()]
    marked = [(place, file, mark) for place, file in files if (mark := mark_of(file)) is not None]

    if marked:
        place, file, mark = marked[0]
        other_file = None
        for _, further_file, _ in marked[1:]:
            if not further_file.samefile(file):
                other_file = further_file

        return Script(file, place.folder, place.model_folder, mark, variables, other_file)

    if files and (named or variables):
        place, file = files[0]
        mark = f"{SCRIPT} names it" if named else ""
        return Script(file, place.folder, place.model_folder, mark, variables)

    if not variables:
        return None

    place = _place_of_files(places, variables)
    return Script(place.folder / name, place.folder, place.model_folder, "", variables)


def _places(environ: Mapping[str, str], folders: list[Path]) -> Iterator[ScriptPlace]:
    """Yield where the file may lie: the folder that a variable names, then the model's and `code/`
    in it.
    """
    script_folder = environ.get(SCRIPT_FOLDER, "").strip()
    if script_folder:
        folder = Path(script_folder)
        # It may name the model's own folder.
        owner = next((owner for owner in folders if owner.resolve() == folder.resolve()), None)
        yield ScriptPlace(folder, owner)
        yield ScriptPlace(folder / "code", owner)

    for folder in folders:
        yield ScriptPlace(folder, folder)
        yield ScriptPlace(folder / "code", folder)


def _place_of_files(places: list[ScriptPlace], variables: Mapping[str, str]) -> ScriptPlace:
    """Return the first place with a file that a variable names, or the first."""
    for place in places:
        for spec in variables.values():
            name = spec.partition(":")[0]
            if name.endswith(".py") and (place.folder / name).is_file():
                return place

    return places[0]


def mark_of(file: Path) -> str | None:
    """Return what shows that a file has such handlers, as a message about it says it, or None."""
    tree = _tree_of(file)
    if tree is None:
        return None

    for node in ast.walk(tree):
        if PACKAGE in _imported(node):
            return f"line {node.lineno} imports {PACKAGE}"  # type: ignore[attr-defined]

    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in FIXED_NAMES:
            return f"line {node.lineno} has {node.name}"

    return None


def imports(file: Path, package: str) -> bool:
    """Whether a file imports a package anywhere."""
    tree = _tree_of(file)
    return tree is not None and any(package in _imported(node) for node in ast.walk(tree))


def imported_from(file: Path, package: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the modules of a package from which a file imports names anywhere, with the names."""
    tree = _tree_of(file)
    if tree is None:
        return

    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or package not in _imported(node):
            continue

        names = [alias.name for alias in node.names]
        yield str(node.module), names


def _tree_of(file: Path) -> ast.Module | None:
    try:
        return ast.parse(read_bounded(file), str(file))
    except (OSError, SyntaxError, ValueError, RecursionError):
        # Whoever would run the file reports it.
        return None


def _imported(node: ast.AST) -> set[str]:
    """Return the packages that a node imports."""
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        modules = [node.module or ""]
    else:
        return set()

    return {module.split(".")[0] for module in modules}


def has_package(requirements: list[Path]) -> bool:
    """Whether the package is installed, or one of these files names it, which will be installed."""
    if find_spec(PACKAGE) is not None:
        return True

    for file in requirements:
        try:
            if REQUIREMENT.search(read_bounded(file)):
                return True
        except (OSError, ValueError):
            # Whoever would install it reports it.
            continue

    return False
