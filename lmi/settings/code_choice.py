"""Chooses the user code: a file in the model's folder, and the functions in it that the server calls."""

from __future__ import annotations

from pathlib import Path

from lmi.errors import ModelUnusable
from lmi.settings import user_code
from lmi.settings.config import UserCodeConfig
from lmi.settings.kinds import BUILT_IN, ENTRY_POINT, FORMATTER_WORDS, is_built_in
from lmi.settings.model_folder import user_code_folders
from lmi.settings.reference import NEURON
from lmi.settings.sources import Problems
from lmi.settings.values import Values
from lmi.sources.files import CONFIG

ENTRY_KEY, HANDLER_KEY = "option.entryPoint", "option.handler"


def choose_code(values: Values, folder: Path | None, cwd: Path, problems: Problems) -> UserCodeConfig | None:
    """Return the file of user code and its functions that are used, or None if nothing in it runs."""
    path = _find_file(values, folder, cwd, problems)
    if path is None:
        _named_formatters(values, frozenset(), problems)
        return None
    try:
        outline = user_code.outline(path)
    except ModelUnusable as error:
        problems.unusable = error
        return None
    handler = _choose_handler(values, path, outline.names, problems)
    named = _named_formatters(values, outline.names, problems)
    kinds = outline.marks | named.keys()
    if handler is None and not kinds:
        _warn_of_nothing_to_run(values, path, outline.names, problems)
        return None
    return UserCodeConfig(
        path=str(path.resolve()),
        handler=handler,
        output_formatter=named.get("output_formatter"),
        input_formatter=named.get("input_formatter"),
        has_output_formatter="output_formatter" in kinds,
        has_input_formatter="input_formatter" in kinds,
    )


def _find_file(values: Values, folder: Path | None, cwd: Path, problems: Problems) -> Path | None:
    """Return the file that the entry point names, or a model.py; None if neither exists."""
    entry: str = values.given(ENTRY_KEY, "model.py")
    name = "model.py" if is_built_in(entry) else entry
    if is_built_in(entry):
        _check_built_in(values, entry.removeprefix(BUILT_IN), problems)
    places = user_code_folders(values.given("option.model_id"), folder, cwd)
    path = next((place / name for place in places if (place / name).is_file()), None)
    if path is None and _is_own_file(values):
        values.refuse(ENTRY_KEY, ENTRY_POINT.allowed, problems)
    return path


def _is_own_file(values: Values) -> bool:
    """Return whether the entry point names a file, which then must exist and hold something to run."""
    return ENTRY_KEY in values and not is_built_in(values.given(ENTRY_KEY))


def _check_built_in(values: Values, name: str, problems: Problems) -> None:
    """Refuse an entry point of the reference that makes images, and warn of one for Neuron. Others have no effect."""
    if "stable" in name:
        values.refuse(ENTRY_KEY, "an entry point that generates text, images are not made here", problems)
    elif "neuron" in name:
        said = values.how_given(ENTRY_KEY).said
        problems.warnings.append(f"{said}: {NEURON}, the model runs on GPUs or a CPU")


def _choose_handler(values: Values, path: Path, names: frozenset[str], problems: Problems) -> str | None:
    """Return the function that is the model.

    Returns None if the file does not have it, or if an entry point of the reference answers in its place.
    """
    entry: str = values.given(ENTRY_KEY, "")
    is_hidden = is_built_in(entry) and not user_code.TRIES_HANDLER.fullmatch(entry)
    handler: str = values.given(HANDLER_KEY, user_code.HANDLER)
    if handler in names and not is_hidden:
        return handler
    if HANDLER_KEY in values and not is_built_in(entry):
        values.refuse(HANDLER_KEY, f"a function of {path}", problems)
    return None


def _named_formatters(values: Values, names: frozenset[str], problems: Problems) -> dict[str, str]:
    """Return the functions that options name as formatters, by kind. Each must be among `names`."""
    named = {}
    for kind in user_code.MARKS:
        wanted = values.given(f"option.{kind}")
        if wanted is None or wanted in FORMATTER_WORDS:
            continue
        named[kind] = wanted
        if wanted not in names:
            words = f"{', '.join(FORMATTER_WORDS)} or " if kind == "output_formatter" else ""
            values.refuse(f"option.{kind}", f"{words}a function of the model's own model.py", problems)
    return named


def _warn_of_nothing_to_run(values: Values, path: Path, names: frozenset[str], problems: Problems) -> None:
    if _is_own_file(values):
        values.refuse(ENTRY_KEY, f"a file with a function {user_code.HANDLER} or a formatter", problems)
    wanted = values.given(HANDLER_KEY, user_code.HANDLER)
    lacks = f"has neither a function {wanted} nor a formatter"
    if wanted in names:
        entry = values.given(ENTRY_KEY)
        lacks = f"has no formatter, and option.entryPoint={entry} answers in place of its function {wanted}"
    if "option.model_id" not in values and not (path.parent / CONFIG).is_file():
        problems.unusable = ModelUnusable(f"{path}: {lacks}, and there is no {CONFIG} of a model beside it")
        return
    problems.warnings.append(f"{path}: {lacks}, so it is not run")
