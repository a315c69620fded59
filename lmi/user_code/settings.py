"""The model's own code: the file and the functions in it that the server calls, and the
requirements.txt that it needs.

This module reads the code as text. It runs only in its own process, and `requirements.py` installs.
"""

import ast
import hashlib
import os
import platform
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lmi.errors import BadConfiguration, ModelUnusable, shorten
from lmi.settings.engine_choice import NEURON
from lmi.settings.model_choice import user_code_folders
from lmi.settings.replicas import TENSOR
from lmi.settings.start import Fetched
from lmi.settings.steps import Resolution
from lmi.settings.values import Values
from lmi.shared.model_files import facts, read_bounded
from lmi.sources.source import CONFIG, S3Model, parse
from lmi.user_code.options import (
    ENTRY_POINT,
    FORMATTER_WORDS,
    PIP_ARGS,
    RequirementsConfig,
    UserCodeConfig,
    is_built_in,
)
from lmi.user_code.standards import settings as standards

HANDLER = "handle"
# Entry points that call the handler of a model.py first.
TRIES_HANDLER = re.compile(r"djl_python\.lmi_.*|.*async_service")
# The decorators of djl_python.
MARKS = ("output_formatter", "input_formatter")
ENTRY_KEY = "option.entryPoint"
HANDLER_KEY = "option.handler"
REQUIREMENTS = "requirements.txt"
WHEELS = "requirements"
SWITCH = "option.install_requirements"
TRUST = "option.trust_remote_code"
ADAPTER_CODE = "option.adapter_code"
NOT_OF_SEVERAL = (
    "handlers of model-hosting-container-standards are not run for one of several models"
)


class Outline(NamedTuple):
    """What is at the top level of a file: the names that it binds, and decorators of djl_python."""

    names: set[str]
    marks: set[str]


def outline(path: Path) -> Outline:
    """Read a file without running it. Raises ModelUnusable if it is not Python."""
    try:
        body = ast.parse(read_bounded(path), str(path)).body
    except SyntaxError as error:
        raise ModelUnusable(f"{path}: line {error.lineno}: SyntaxError: {error.msg}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnusable(f"{path}: {error}") from None

    names = set[str]()
    decorators = set[str]()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))

        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators.update(map(_last_name, node.decorator_list))

    return Outline(names, decorators.intersection(MARKS))


def _last_name(decorator: ast.expr) -> str:
    """Return `output_formatter` for `@output_formatter`, `@output_formatter()` and
    `@module.output_formatter`.
    """
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name

    return ""


def choose_code(resolution: Resolution) -> None:
    """Choose the file of user code and its functions that are used, none if nothing in it runs."""
    code = _code(resolution)
    values = resolution.values
    if values.final(ADAPTER_CODE):
        if code is None:
            code = UserCodeConfig(path="", runs_adapters=True)
        elif code.handler is None and not code.standards_folder:
            code = replace(code, runs_adapters=True)
        else:
            values.refuse(ADAPTER_CODE, f"false beside the code in {code.path}")

    resolution.code = code


def _code(resolution: Resolution) -> UserCodeConfig | None:
    values = resolution.values
    path = _find_file(resolution)
    script = standards.find_script(values.start.environ, user_code_folders(values))
    if script is not None:
        return _code_for_standards(resolution, script, path)

    _warn_of_missing_script(values)
    if path is None:
        _named_formatters(values, set())
        return None

    try:
        names, marks = outline(path)
    except ModelUnusable as error:
        values.unusable = error
        return None

    handler = _choose_handler(values, path, names)
    formatters = dict.fromkeys(marks, "") | _named_formatters(values, names)
    if handler is None and not formatters:
        _warn_of_nothing_to_run(values, path, names)
        return None

    return UserCodeConfig(
        path=str(path.resolve()),
        handler=handler,
        input_formatter=formatters.get("input_formatter"),
        output_formatter=formatters.get("output_formatter"),
    )


def _code_for_standards(
    resolution: Resolution, script: standards.Script, path: Path | None
) -> UserCodeConfig | None:
    """Return code for AWS's standards. What cannot run ends the start, because it may check who
    asks. `path` is a file for djl-serving.
    """
    values = resolution.values
    reason = _why_not_run(resolution, script, path)
    if reason:
        for name, spec in script.variables.items():
            values.fail(f"{name}={shorten(spec)}: {reason}")

        if script.mark:
            values.unusable = ModelUnusable(f"{script.file}: {script.mark}: {reason}")

        return None

    if script.other_file is not None:
        values.warn(
            f"{script.other_file}: not run, since {script.file} has handlers too, and one file of "
            "them is read"
        )

    return UserCodeConfig(
        path=str(script.file.absolute()), standards_folder=str(script.folder.absolute())
    )


def _why_not_run(resolution: Resolution, script: standards.Script, path: Path | None) -> str:
    """Return why code for AWS's standards cannot run here, or ""."""
    values = resolution.values
    if resolution.start.folder in resolution.start.untrusted:
        return NOT_OF_SEVERAL

    owner = script.model_folder
    if owner is not None and not values.final(TRUST) and _is_unasked(resolution.fetched, owner):
        return f"not run, since it came from a hub or bucket and {TRUST}=false"

    requirements = []
    if values.final(SWITCH):
        requirements = [folder / REQUIREMENTS for folder in _folders_of(values, script.file)]

    if not standards.has_package(requirements):
        return standards.NEEDS_PACKAGE

    if standards.imports(script.file, "djl_python"):
        return "it is for djl_python too, and one of the two runs"

    if path is not None and not _is_same_file(path, script.file):
        names, marks = outline(path)
        if marks or _choose_handler(values, path, names) is not None:
            return f"{path} is for djl_python, and one of the two runs"

    return ""


def refuse_handlers_of_several(resolution: Resolution) -> None:
    """Refuse variables that name code for AWS's standards, where several models come and go."""
    values = resolution.values
    for name in (*standards.HANDLERS, *standards.MIDDLEWARES):
        spec = values.start.environ.get(name, "").strip()
        if spec:
            values.fail(f"{name}={shorten(spec)}: {NOT_OF_SEVERAL}")


def _is_same_file(path: Path, other: Path) -> bool:
    return other.is_file() and path.samefile(other)


def _folders_of(values: Values, file: Path) -> list[Path]:
    """Return the folders in which the requirements.txt of a file may lie."""
    return [file.parent, *user_code_folders(values)]


def _warn_of_missing_script(values: Values) -> None:
    name = values.start.environ.get(standards.SCRIPT, "").strip()
    if name:
        values.warn(f"{standards.SCRIPT}={shorten(name)}: there is no such file, so none is run")


def _find_file(resolution: Resolution) -> Path | None:
    """Return the file that the entry point names, or a model.py; None if neither exists."""
    values = resolution.values
    entry = values.given(ENTRY_KEY, "model.py")
    name = entry
    # An entry point of the reference has no effect, but for images and for Neuron.
    if is_built_in(entry):
        name = "model.py"
        if "stable" in entry:
            values.refuse(ENTRY_KEY, "an entry point that generates text, images are not made here")
        elif "neuron" in entry:
            source = values.how_given(ENTRY_KEY).assignment
            values.warn(f"{source}: {NEURON}, the model runs on GPUs or a CPU")

    files = []
    for folder in user_code_folders(values):
        if (folder / name).is_file():
            files.append(folder / name)

    untrusted_files = set()
    if not values.final(TRUST):
        untrusted_files = {file for file in files if _is_unasked(resolution.fetched, file.parent)}

    for file in untrusted_files:
        values.note(f"{file}: not run, since it came from a hub or bucket and {TRUST}=false")

    path = next((file for file in files if file not in untrusted_files), None)
    if path is None and _is_own_file(values):
        values.refuse(ENTRY_KEY, ENTRY_POINT.allowed)

    return path


def _is_unasked(fetched: Fetched, folder: Path) -> bool:
    """Return whether a fetch brought the folder without its Python files. Another client of a hub
    may have added them.

    An archive is unpacked whole, with its Python files.
    """
    for text, fetched_folder in fetched.items():
        if fetched_folder != folder:
            continue

        source = parse(text)
        is_archive = isinstance(source, S3Model) and source.is_archive
        if not is_archive:
            return True

    return False


def _is_own_file(values: Values) -> bool:
    """Return whether the entry point names a file, which then must exist and hold something to
    run.
    """
    return ENTRY_KEY in values and not is_built_in(values.given(ENTRY_KEY))


def _choose_handler(values: Values, path: Path, names: set[str]) -> str | None:
    """Return the function that is the model: None without one, or if an entry point of the
    reference answers.
    """
    entry: str = values.given(ENTRY_KEY, "")
    handler: str = values.given(HANDLER_KEY, HANDLER)
    if handler in names and (not is_built_in(entry) or TRIES_HANDLER.fullmatch(entry)):
        return handler

    if HANDLER_KEY in values and not is_built_in(entry):
        values.refuse(HANDLER_KEY, f"a function of {path}")

    return None


def _named_formatters(values: Values, names: set[str]) -> dict[str, str]:
    """Return the functions that options name as formatters, by kind. Each must be among `names`."""
    functions = {}
    for kind in MARKS:
        function = values.given(f"option.{kind}")
        if function is None or function in FORMATTER_WORDS:
            continue

        functions[kind] = function
        if function not in names:
            words = f"{', '.join(FORMATTER_WORDS)} or " if kind == "output_formatter" else ""
            values.refuse(f"option.{kind}", f"{words}a function of the model's own model.py")

    return functions


def _warn_of_nothing_to_run(values: Values, path: Path, names: set[str]) -> None:
    if _is_own_file(values):
        values.refuse(ENTRY_KEY, f"a file with a function {HANDLER} or a formatter")

    handler = values.given(HANDLER_KEY, HANDLER)
    reason = f"has neither a function {handler} nor a formatter"
    if handler in names:
        entry = values.given(ENTRY_KEY)
        reason = (
            f"has no formatter, and option.entryPoint={entry} answers in place of its function "
            f"{handler}"
        )

    if "option.model_id" not in values and not (path.parent / CONFIG).is_file():
        values.unusable = ModelUnusable(
            f"{path}: {reason}, and there is no {CONFIG} of a model beside it"
        )
        return

    values.warn(f"{path}: {reason}, so it is not run")


def choose_properties(resolution: Resolution) -> None:
    """Choose the properties of the handler's first call: every option but secrets, and the model's
    folder.
    """
    values = resolution.values
    options = {}
    for setting in values.picked.values():
        entry = setting.given
        if entry.key.startswith("option.") and entry.shown != "***":
            options[entry.key.removeprefix("option.")] = entry.text

    path = str(resolution.path.resolve())
    options.setdefault("tensor_parallel_degree", str(values.final(TENSOR)))
    # Else option.model_id may be a hub's id, which the code loads itself.
    is_apart = resolution.path != resolution.start.folder
    if is_apart or "model_id" not in options:
        options["model_id"] = path

    options["model_dir"] = path
    options["device_id"] = "0" if resolution.device_ids else "-1"
    resolution.code_properties = options


def choose_requirements(resolution: Resolution) -> None:
    """Choose what is installed for the model's own code, if anything."""
    resolution.requirements = _requirements(resolution.values, resolution.code)


def _requirements(values: Values, code: UserCodeConfig | None) -> RequirementsConfig | None:
    folders = list(user_code_folders(values))
    if code is not None and code.path:
        folders = _folders_of(values, Path(code.path))

    words = values.start.environ.get(PIP_ARGS, "").strip()
    if words and code is not None and values.final(SWITCH):
        return _requirements_of_words(values, words, folders[0])

    if words:
        values.note(f"{PIP_ARGS}: nothing is installed by it, since no code of the model runs")

    files = [folder / REQUIREMENTS for folder in folders]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return None

    if not values.final(SWITCH):
        values.note(f"{file}: not installed, by {values.how_given(SWITCH).assignment}")
        return None

    if code is None and not values.final(TRUST):
        values.note(f"{file}: not installed, since no code of the model runs ({TRUST}=false)")
        return None

    try:
        digest = _digest_of_requirements(file)
    except OSError as error:
        raise ModelUnusable(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelUnusable(f"{file}: cannot be read: {error}") from None

    folder = Path(values.final("download_dir"), "requirements", digest)
    return RequirementsConfig(file=str(file.resolve()), folder=str(folder))


def _requirements_of_words(values: Values, words: str, folder: Path) -> RequirementsConfig:
    """Return what the operator's words for pip install, in place of a requirements.txt. Raises
    BadConfiguration.
    """
    try:
        shlex.split(words)
    except ValueError as error:
        raise BadConfiguration(
            f"{PIP_ARGS}: must be words as a shell reads them, and is not: {error}"
        ) from None

    parts = [platform.python_version(), str(folder.resolve()), words]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    installed = Path(values.final("download_dir"), "requirements", digest)
    file = folder.resolve() / REQUIREMENTS
    return RequirementsConfig(file=str(file), folder=str(installed), has_words=True)


def _digest_of_requirements(file: Path) -> str:
    """Return a digest of what decides what is installed: Python's version, the file, and the names
    of the wheels beside it.
    """
    wheels = file.parent / WHEELS
    names = []
    if wheels.is_dir():
        names = sorted(entry.name for entry in wheels.iterdir())

    parts = [platform.python_version().encode(), read_bounded(file), *map(os.fsencode, names)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def note_unrun_code(resolution: Resolution) -> None:
    """Note that a checkpoint's own code is not run, if its config.json names code."""
    values = resolution.values
    folder = resolution.path
    if values.final(TRUST) or not facts(folder).get("auto_map"):
        return

    fact = f"{folder / CONFIG}: auto_map names Python code of the checkpoint, which is not run"
    advice = f"{TRUST}=true runs it, if you trust it and the engine can"
    values.note(f"{fact}; {advice}")
