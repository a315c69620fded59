"""The settings of one of several models: its serving.properties, and what environment and command line say of models.

Options of the server and names of the model have no effect in its file: the server has settings of its own, and
whoever loads the model names it. Where the server is in secure mode, the model is refused what a model at the start is
refused, and its whole folder is searched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from lmi.errors import ModelUnusable
from lmi.settings.config import ServerConfig
from lmi.settings.model_folder import find_folder
from lmi.settings.model_urls import local_path
from lmi.settings.options import OPTIONS, find, is_of_server, key_of_env
from lmi.settings.other_images import is_of_other_image
from lmi.settings.ports import RANGE
from lmi.settings.properties import Properties, read
from lmi.settings.report import Resolved
from lmi.settings.resolve import resolve
from lmi.settings.secure_mode import as_flags

NAMING = frozenset(("load_models", "option.model_name", "option.served_model_name", "option.model_alias"))
MODEL = "option.model_id"


def resolve_model(name: str, url: str, server: ServerConfig, environ: Mapping[str, str]) -> Resolved:
    """Return the settings of the model in the folder `url`, with a note about options that do not count there.

    Raises BadConfiguration, SecurityRefused or ModelUnusable with the cause, also for a folder outside of model_store.
    """
    path = local_path(url)
    folder = find_folder(str(checked_folder(path, server.model_store)), Path(path))
    assert folder is not None
    file = folder / "serving.properties"
    given = read(file) if file.exists() else Properties()
    counted = {key: entry for key, entry in given.entries.items() if _is_of_model(key)}
    properties = replace(given, entries=counted)
    flags = {key: text for key, text in server.model_flags.items() if _is_of_model(key) and key != MODEL}
    flags |= _of_server(server)
    resolved = resolve(properties, _of_models(environ), flags, folder=folder, cwd=folder, untrusted=[folder])
    model = resolved.config.model
    if resolved.request is not None:
        source = resolved.request.sources[0].source
        raise ModelUnusable(f"{file} names {source}: nothing is downloaded for one of several models")
    checked_folder(model.path, server.model_store)
    config = replace(resolved.config, server=server, model=replace(model, name=name, aliases=()))
    return replace(resolved, config=config, notes=(*resolved.notes, *_notes(given)))


def checked_folder(url: str, store: str) -> Path:
    """Return the folder that `url` names. Raises ModelUnusable unless it is absolute and lies below `store`."""
    path, top = Path(url), Path(store).resolve()
    if "\0" in url or not path.is_absolute():
        raise ModelUnusable(f"url must be an absolute folder below model_store, given {url!r}")
    plain, resolved = Path(os.path.normpath(path)), path.resolve()
    is_below = plain.is_relative_to(top) or plain.is_relative_to(os.path.normpath(Path(store).absolute()))
    if not is_below or top not in resolved.parents:
        raise ModelUnusable(f"url must be a folder below model_store, {url} leads elsewhere")
    if not resolved.is_dir():
        raise ModelUnusable(f"url {url}: {'is not a folder' if resolved.exists() else 'does not exist'}")
    return resolved


def _is_of_model(key: str) -> bool:
    option = find(key)
    return not is_of_server(key) and (option.key if option else key) not in NAMING


def _of_models(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that name a model, belong to the server or were told at its start."""
    return {
        name: text
        for name, text in environ.items()
        if not is_of_other_image(name) and all(_is_of_model(key) and key != MODEL for key in _keys(name))
    }


def _of_server(server: ServerConfig) -> dict[str, str]:
    """Return the server's settings that decide about a model's files and ports, as the command line gives them."""
    given = as_flags(server) | ({"download_dir": server.download_dir} if server.download_dir else {})
    if server.safe_port_range is not None:
        first, last = server.safe_port_range
        given |= {"port": str(server.port), RANGE: f"{first}-{last}"}
    return given


def _keys(name: str) -> Iterator[str]:
    if name.startswith(("OPTION_", "SERVING_")):
        option = find(key_of_env(name))
        yield option.key if option else name
    yield from (option.key for option in OPTIONS if name in (*option.env, *option.platform))


def _notes(given: Properties) -> list[str]:
    ignored = [key for key in given.entries if not _is_of_model(key)]
    reason = "no effect in the file of one of several models"
    return [f"{given.name}: {', '.join(ignored)}: {reason}"] if ignored else []
