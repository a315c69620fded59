"""Finds the folder to serve, by the rules of LMI's `serve`, and chooses the model and its names.

Settings are resolved twice for a remote model: before the fetch, so that faults show at once, and
after it.
"""

import difflib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmi.errors import ModelUnusable, shorten
from lmi.settings.annexes import MODELS, NamedModel
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.settings.gguf_choice import is_gguf, opened_folder, with_files
from lmi.settings.handler import announced
from lmi.settings.kinds import local_path
from lmi.settings.properties import Properties
from lmi.settings.values import (
    ENVIRONMENT,
    FILE,
    PLATFORM,
    Given,
    Setting,
    Values,
    collect,
    is_of_server,
)
from lmi.shared.model_files import read_bounded
from lmi.sources.catalogue import CATALOGUE
from lmi.sources.fetches import default_download_dir
from lmi.sources.source import ARCHIVE_SUFFIXES, GGUF, fault, listed, remote

MODEL = "option.model_id"
NAME = "option.model_name"
DRAFT = "option.speculative_draft_model"
DEMO = "demo"
PLATFORM_FOLDER = Path("/opt/ml/model")

Fetched = Mapping[str, Path]
"""The local folder of each source that was fetched, by its text."""


def find_folder(
    text: str | None, cwd: Path, platform_folder: Path = PLATFORM_FOLDER
) -> Path | None:
    """Return the folder to serve: the one that `text` names, SageMaker's, or the current one. None
    means the demo.

    If the folder holds only one other folder, that one is served, because archives are often packed
    so. Raises ModelUnusable if the folder that `text` names does not exist.
    """
    if text is not None:
        folder = cwd / local_path(text)
        if text == DEMO and not folder.exists():
            return demo_folder()

        if not folder.is_dir():
            raise _no_folder(text, folder, cwd)
    elif platform_folder.is_dir() and any(platform_folder.iterdir()):
        folder = platform_folder
    elif any((cwd / name).is_file() for name in ("serving.properties", "config.json")):
        folder = cwd
    else:
        return None

    entries = list(folder.iterdir())
    if len(entries) == 1 and entries[0].is_dir():
        return entries[0]

    return folder


def _no_folder(text: str, folder: Path, cwd: Path) -> ModelUnusable:
    names = [DEMO, *CATALOGUE, *(entry.name for entry in cwd.iterdir() if entry.is_dir())]
    near = difflib.get_close_matches(text, names, 1, 0.8)
    meant = f"; did you mean {near[0]}?" if near else ""

    reason = "does not exist"
    if folder.exists():
        reason = "is not a folder"

    return ModelUnusable(f"{text}: {reason}{meant}")


def named_folder(environ: Mapping[str, str], flags: Mapping[str, str], cwd: Path) -> str | None:
    """Return the folder that `load_models` names, None if it is not there and option.model_id is
    given too.
    """
    entries = sorted(collect(Properties(), environ, flags), key=lambda entry: entry.rank)
    texts = [entry.text for entry in entries if entry.key == "load_models"]
    models: tuple[NamedModel, ...] = ()
    # The row of load_models reports a bad text.
    with suppress(ValueError):
        models = MODELS.parse(texts[0]) if texts else ()

    if not models:
        return None

    url: str = models[0].url
    has_model_id = any(entry.key == MODEL for entry in entries)
    if has_model_id and not (cwd / local_path(url)).is_dir():
        return None

    return url


def place(givens: list[Given], values: Values) -> tuple[list[Given], tuple[str, ...]]:
    """Replace remote sources by the folders that they were fetched to. Returns the given values,
    and the sources that are not fetched yet.

    Notes in `values.fetched` the folder that a GGUF file was opened to before. An id from the
    environment does not count beside a whole model in the served folder, and a warning says so.
    """
    is_whole = values.folder is not None and fault(values.folder) is None
    givens = with_files(_without_images(givens, values, is_whole), values)
    first_ranks: dict[str, tuple[int, int]] = {}
    for entry in givens:
        first_ranks[entry.key] = min(entry.rank, first_ranks.get(entry.key, entry.rank))

    names_model = MODEL in first_ranks and first_ranks[MODEL][0] < ENVIRONMENT
    placed: list[Given] = []
    missing: dict[str, None] = {}
    for entry in givens:
        if not _is_remote(entry, values):
            placed.append(entry)
            continue

        _find_in_cache(entry, givens, values)
        if is_whole and not names_model and entry.key == MODEL:
            values.warn(
                f"{entry.said}: the model in {values.folder} is served and this is not fetched; "
                f"remove {entry.source} "
                "to serve the folder without this warning, or take the model out of the folder to "
                "serve the other"
            )
            continue

        if entry.rank == first_ranks[entry.key]:
            if entry.text in values.fetched:
                entry = replace(entry, text=str(values.fetched[entry.text]))
            else:
                missing[entry.text] = None

        placed.append(entry)

    return placed, tuple(missing)


def _find_in_cache(entry: Given, givens: list[Given], values: Values) -> None:
    """Note the folder that a GGUF file, also one of the catalogue, was opened to before, so that no
    process opens it again.
    """
    is_file = entry.text in CATALOGUE or is_gguf(entry.text)
    if not is_file or entry.text in values.fetched:
        return

    candidates = [candidate for candidate in givens if candidate.key == "download_dir"]
    if candidates:
        first = min(candidates, key=lambda candidate: candidate.rank)
        download_dir = values.cwd / first.text
    else:
        download_dir = default_download_dir(values.environ)

    folder = opened_folder(entry.text, download_dir.absolute())
    if folder is not None:
        values.fetched = {**values.fetched, entry.text: folder}


def _without_images(givens: list[Given], values: Values, is_whole: bool) -> list[Given]:
    """Return `givens` without the models that variables of AWS's images name, if the command line
    names another.

    The command line names one by a folder that holds a whole model, or whose serving.properties has
    option.model_id.
    """
    is_in_file = any(entry.key == MODEL and entry.rank[0] == FILE for entry in givens)
    if not values.is_folder_asked or not (is_whole or is_in_file):
        return givens

    of_images = [entry for entry in givens if entry.key == MODEL and entry.rank[0] == PLATFORM]
    for entry in of_images:
        values.warn(
            f"{entry.said}: has no effect beside {values.folder}, which the command line names"
        )

    return [entry for entry in givens if entry not in of_images]


def without_model(values: Values, flags: Mapping[str, str]) -> Config:
    """Return the settings of a server with several models. Each model's are resolved when it is
    loaded.
    """
    for winner in values.picked.values():
        if winner.given.key in (MODEL, "load_models"):
            values.warn(f"{winner.given.said}: not served, multi_model starts without a model")
        elif winner.given.rank[0] == FILE and not is_of_server(winner.given.key):
            values.note(
                f"{winner.given.place}: no effect with multi_model, each model has its own file"
            )

    values.stop_at_faults()
    of_models = {key: text for key, text in flags.items() if not is_of_server(key)}
    server = ServerConfig(
        **values.fields("server"),
        model_flags=of_models,
        keeps_queue_short="max_queue_wait" not in values,
    )
    return Config(server=server, model=ModelConfig(path="", name="model"), engine=EngineConfig())


def source_name(text: str) -> str:
    """Return the last part of a source, without the suffix of an archive or a file: what its model
    is called.
    """
    name = text.rstrip("/").rpartition("/")[2]
    for suffix in (*ARCHIVE_SUFFIXES, GGUF):
        if name.endswith(suffix):
            return name.removesuffix(suffix)

    return name


def model_name(text: str) -> str:
    """Return `text` with each character replaced that has a meaning in a URL's path or in a log
    line.
    """
    return re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip("._-")[:128] or "model"


def demo_folder() -> Path:
    """Return the folder of the model that is served if none is named. Raises ModelUnusable if no
    engine brings one.
    """
    demos = [handler.demo for handler in announced().values() if handler.demo is not None]
    if not demos:
        raise ModelUnusable("no engine is installed that brings a demo model")

    return demos[0]


def user_code_folders(values: Values) -> list[Path]:
    """Return the folders that may hold the model's code: the model's, then that of
    serving.properties.
    """
    folder = values.folder
    try:
        path = _model_path(values)
    except ModelUnusable:
        path = folder or values.cwd

    if folder is None or folder == path:
        return [path]

    return [path, folder]


def _is_remote(entry: Given, values: Values) -> bool:
    """Whether a process must fetch the model that an entry names, or open its GGUF file."""
    if entry.key not in (MODEL, DRAFT) or entry.text == DEMO:
        return False

    if entry.key == MODEL and is_gguf(entry.text):
        return Path(entry.text).is_file()

    path = local_path(entry.text)
    is_here = any((base / path).is_dir() for base in (values.folder or values.cwd, values.cwd))
    try:
        return remote(path, exists_locally=is_here) is not None
    except ModelUnusable as error:
        raise ModelUnusable(f"{error} ({entry.source})") from None


def choose_model(values: Values, is_user_code: bool, missing: tuple[str, ...]) -> Path:
    """Choose the model and its names. Returns the model's folder as the options name it.

    `missing` has the remote sources that were not fetched yet. Of user code that is the model the
    folder may hold nothing else, because the code may load its files from anywhere. Raises
    ModelUnusable, which names the option or says that none was given.
    """
    model_id = values.given(MODEL)
    if model_id is not None and model_id in missing:
        _choose_names(values, "", source_name(model_id))
        return Path(model_id)

    folder = values.folder
    try:
        path = user_code_folders(values)[0] if is_user_code else _whole_model(values)
        name = DEMO if path == demo_folder() else Path(model_id or path).name
    except ModelUnusable as error:
        place = Setting.of(values, MODEL).source if MODEL in values else f"no {MODEL}"
        raise ModelUnusable(f"{error} ({place})") from None

    # The option's text of a fetched model is its folder, and the source has the name.
    sources = {str(path): source for source, path in values.fetched.items()}
    if model_id in sources:
        name = source_name(sources[model_id])

    resolved_path = path.resolve()
    _warn_of_other_models(values, resolved_path)
    values.choose(MODEL, str(resolved_path), "the folder" if folder else "the built-in demo")
    loaded_name = _loaded_name(values, folder or resolved_path)
    _choose_names(values, loaded_name, name)
    return path


def _whole_model(values: Values) -> Path:
    """Return the model's folder. Raises ModelUnusable unless its files are there."""
    path = _model_path(values)
    if not (path / "config.json").is_file():
        content = "does not exist"
        if path.is_dir():
            content = listed(sorted(entry.name for entry in path.iterdir()))

        raise ModelUnusable(f"{path}: {content}; a model's folder has a config.json")

    if any(path.glob(f"*{GGUF}")):
        reason = fault(path)
        if reason:
            raise ModelUnusable(f"{path}: {reason}")

    return path


def _model_path(values: Values) -> Path:
    folder = values.folder
    cwd = values.cwd
    if MODEL not in values:
        return folder or demo_folder()

    model_id = local_path(values.given(MODEL))
    for base in (folder or cwd, cwd):
        if (base / model_id).is_dir():
            return base / model_id

    if model_id == DEMO:
        return demo_folder()

    if model_id.endswith(GGUF):
        raise ModelUnusable(f"{shorten(model_id)}: no such file in {folder or cwd}")

    raise ModelUnusable(f"{shorten(model_id)}: no such folder in {folder or cwd}")


def facts(folder: Path) -> Mapping[str, Any]:
    """Return a model's config.json, or nothing if it cannot be read, which the engine reports."""
    with suppress(OSError, ValueError, RecursionError):
        config = json.loads(read_bounded(folder / "config.json"))
        if isinstance(config, dict):
            return config

    return {}


def sources_of(values: Values, path: Path) -> tuple[str, ...]:
    """Return what a client of vLLM calls the model: the text that names it, its folder, and the
    platform's folder.
    """
    names = [str(path), str(path.absolute())]
    if MODEL in values:
        text = values.how_given(MODEL).text
        fetched_from = {str(folder): source for source, folder in values.fetched.items()}
        names += [text, fetched_from.get(text, "")]

    folder = values.folder
    if folder is not None:
        names.append(str(folder))
        if PLATFORM_FOLDER in (folder, *folder.parents):
            names.append(str(PLATFORM_FOLDER))

    # Without a slash it may be the name of an adapter.
    names = [name.rstrip("/") for name in names]
    return tuple(dict.fromkeys(name for name in names if "/" in name))


def _choose_names(values: Values, loaded_name: str, name: str) -> None:
    """Choose the names: answers carry the first, requests may use any.

    The first is the one that an option or `load_models` gives, which is `loaded_name`, else it is
    made of `name`.
    """
    served_names = values.given("option.served_model_name", ())
    reasons = dict.fromkeys(served_names, "option.served_model_name")
    if loaded_name:
        reasons[loaded_name] = "load_models"

    first, reason = next(iter(reasons.items()), (model_name(name), "the model's last name"))
    values.choose(NAME, first, reason)

    given_aliases = values.given("option.model_alias", ())
    first = values.final(NAME)
    aliases = tuple(alias for alias in (*given_aliases, *reasons) if alias != first)
    if aliases != given_aliases:
        values.settle(
            "option.model_alias", tuple(dict.fromkeys(aliases)), "further names that were given"
        )


def _loaded_name(values: Values, served: Path) -> str:
    """Return the name that `load_models` gives to the served model, or "". Warns of each model that
    is not served.
    """
    models: tuple[NamedModel, ...] = values.given("load_models", ())
    if not models:
        return ""

    place = values.how_given("load_models").place
    for model in models[1:]:
        values.warn(f"{place}: one model is served, so {shorten(str(model), 300)} is not")

    cwd = values.cwd
    folder = cwd / local_path(models[0].url)
    if folder.is_dir() and find_folder(str(folder), cwd) != values.folder:
        values.warn(f"{place}: the model in {served} is served and this is not")
        return ""

    return models[0].name


def _warn_of_other_models(values: Values, path: Path) -> None:
    """Warn if options name two models, because only one is served."""
    winner = values.picked.get(MODEL)
    if winner is None:
        return

    folder = values.folder
    if folder is not None and folder.resolve() != path and (folder / "config.json").is_file():
        values.warn(f"{winner.given.place}: it is served and the model in {folder} is not")

    for rival in winner.shadowed:
        if rival.text != winner.given.text:
            values.warn(f"{rival.said}: has no effect beside {winner.given.source}")
