"""Chooses the names of a model: those that clients use, and those of vLLM's clients."""

import re
from pathlib import Path

from lmi.errors import shorten
from lmi.settings.annexes import NamedModel
from lmi.settings.kinds import local_path
from lmi.settings.served_folder import PLATFORM_FOLDER, find_folder
from lmi.settings.steps import Resolution
from lmi.settings.table import MODEL
from lmi.settings.values import Values
from lmi.sources.source import ARCHIVE_SUFFIXES, GGUF

NAME = "option.model_name"
ALIASES = "option.model_alias"


def choose_names(values: Values, loaded_name: str, name: str) -> None:
    """Choose the names of the model: answers have the first, requests may use any.

    The first is the one that an option gives, or `load_models`, whose name is `loaded_name`. Where
    neither does, it is made of `name`.
    """
    # Why a name is one of the model, by name.
    reasons: dict[str, str] = {}
    for served_name in values.given("option.served_model_name", ()):
        reasons[served_name] = "option.served_model_name"

    if loaded_name:
        reasons[loaded_name] = "load_models"

    if reasons:
        first, reason = next(iter(reasons.items()))
        values.choose(NAME, first, reason)
    else:
        values.choose(NAME, model_name(name), "the model's last name")

    given_aliases = values.given(ALIASES, ())
    chosen_name = values.final(NAME)
    aliases = tuple(alias for alias in (*given_aliases, *reasons) if alias != chosen_name)
    if aliases != given_aliases:
        values.settle(ALIASES, tuple(dict.fromkeys(aliases)), "further names that were given")


def name_by_load_models(values: Values, served: Path) -> str:
    """Return the name that `load_models` gives to the served model, or "". Warns of each model of
    it that is not served.
    """
    models: tuple[NamedModel, ...] = values.given("load_models", ())
    if not models:
        return ""

    place = values.how_given("load_models").place
    for model in models[1:]:
        values.warn(f"{place}: one model is served, so {shorten(str(model), 300)} is not")

    cwd = values.start.cwd
    folder = cwd / local_path(models[0].url)
    if folder.is_dir() and find_folder(str(folder), cwd) != values.start.folder:
        values.warn(f"{place}: the model in {served} is served and this is not")
        return ""

    return models[0].name


def source_name(text: str) -> str:
    """Return what the model of a source is called: the last part of the source, without the suffix
    of an archive or a file.
    """
    name = text.rstrip("/").rpartition("/")[2]
    if name.endswith(GGUF):
        return name.rpartition(":")[2].removesuffix(GGUF)

    for suffix in ARCHIVE_SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix)

    return name


def model_name(text: str) -> str:
    """Return a text as a name: with _ in the place of each character that means something in a
    URL's path or in a log line.
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip("._-")
    return name[:128] or "model"


def sources_of(resolution: Resolution) -> tuple[str, ...]:
    """Return what clients of vLLM call the model: the text that names it, its folder, and the
    folder in which the platform puts models.
    """
    values = resolution.values
    path = resolution.path
    names = [str(path), str(path.absolute())]
    if MODEL in values:
        text = values.how_given(MODEL).text
        fetched_from = {str(folder): source for source, folder in resolution.fetched.items()}
        names += [text, fetched_from.get(text, "")]

    folder = resolution.start.folder
    if folder is not None:
        names.append(str(folder))
        if PLATFORM_FOLDER in (folder, *folder.parents):
            names.append(str(PLATFORM_FOLDER))

    # A name without a slash may be that of an adapter.
    sources = [name.rstrip("/") for name in names]
    return tuple(dict.fromkeys(source for source in sources if "/" in source))
