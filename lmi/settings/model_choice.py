"""Chooses the model to serve and its names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lmi.errors import ModelUnusable, shorten
from lmi.settings.model_folder import find_folder, find_model, find_user_code_model, model_name
from lmi.settings.model_sources import MODEL, source_name
from lmi.settings.model_urls import NamedModel, local_path
from lmi.settings.report import setting
from lmi.settings.sources import Problems
from lmi.settings.values import Values

NAME = "option.model_name"


def choose_model(
    values: Values, folder: Path | None, cwd: Path, is_user_code: bool, sources: Mapping[str, str], problems: Problems
) -> tuple[Values, Path]:
    """Return the values with the model and its names, and the model's folder as the options name it.

    `sources` has the remote source of each model that is not local, by its option's text, which is its folder once it
    was fetched. Raises ModelUnusable, which names the option or says that none was given.
    """
    model_id: str | None = values.given(MODEL)
    source = sources.get(model_id or "")
    if model_id is not None and source == model_id:
        return _choose_names(values, "", model_name(source_name(source))), Path(source)
    find = find_user_code_model if is_user_code else find_model
    try:
        path, name = find(model_id, folder, cwd)
    except ModelUnusable as error:
        place = setting(values, MODEL).source if MODEL in values else f"no {MODEL}"
        raise ModelUnusable(f"{error} ({place})") from None
    if source is not None:
        name = model_name(source_name(source))
    _warn_of_other_models(values, folder, path.resolve(), problems)
    reason = "the folder" if folder else "the built-in demo"
    values = values.choose(MODEL, str(path.resolve()), reason)
    return _choose_names(values, _loaded_name(values, folder or path.resolve(), folder, cwd, problems), name), path


def _choose_names(values: Values, loaded: str, name: str) -> Values:
    """Choose the names: answers carry the first, requests may use any. `name` is the first if no option gives one."""
    served = values.given("option.served_model_name", ())
    given = {**dict.fromkeys(served, "option.served_model_name"), **({loaded: "load_models"} if loaded else {})}
    first, reason = next(iter(given.items()), (name, "the model's last name"))
    values = values.choose(NAME, first, reason)
    aliases = values.given("option.model_alias", ())
    others = tuple(one for one in (*aliases, *given) if one != values.final(NAME))
    if others == aliases:
        return values
    return values.settle("option.model_alias", tuple(dict.fromkeys(others)), "further names that were given")


def _loaded_name(values: Values, served: Path, folder: Path | None, cwd: Path, problems: Problems) -> str:
    """Return the name that `load_models` gives to the served model, or "". Warns of each model that is not served."""
    models: tuple[NamedModel, ...] = values.given("load_models", ())
    if not models:
        return ""
    place = values.how_given("load_models").place
    for model in models[1:]:
        said = shorten(str(model), 300)
        problems.warnings.append(f"{place}: one model is served, so {said} is not")
    named = cwd / local_path(models[0].url)
    if named.is_dir() and find_folder(str(named), cwd) != folder:
        problems.warnings.append(f"{place}: the model in {served} is served and this is not")
        return ""
    return models[0].name


def _warn_of_other_models(values: Values, folder: Path | None, path: Path, problems: Problems) -> None:
    """Warn if options name two models, because only one is served."""
    if (picked := values.picked.get(MODEL)) is None:
        return
    if folder is not None and folder.resolve() != path and (folder / "config.json").is_file():
        problems.warnings.append(f"{picked.given.place}: it is served and the model in {folder} is not")
    for given in [given for given in picked.shadowed if given.text != picked.given.text]:
        problems.warnings.append(f"{given.said}: has no effect beside {picked.given.source}")
