"""The table of options: it is read from the fields of the settings, and finds an option by any of its names.

It does not know files or precedence. Source of the names: LMI's serving.properties and TGI's environment variables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from lmi.settings.config import EngineConfig, ModelConfig, ServerConfig
from lmi.settings.option import ROW, Option
from lmi.settings.reference import ENGINE_KEYS, WITHOUT_EFFECT


def _options(part: str, settings: type) -> Iterator[Option]:
    """Yield the options of a class of settings in its order, those of its fields and those that fill none."""
    filling = {one.name: one.metadata[ROW] for one in fields(settings) if ROW in one.metadata}
    for name in settings.__annotations__:
        if name in filling:
            row = filling[name]
            yield replace(row, key=row.key or name, part=part, field=f"{part}.{name}")
        elif isinstance(row := getattr(settings, name), Option):
            yield replace(row, key=row.key or name, part=part)


OPTIONS = (*_options("server", ServerConfig), *_options("model", ModelConfig), *_options("engine", EngineConfig))
_BY_KEY = {key: option for option in OPTIONS for key in (option.key, *option.aliases)}
_BY_ENV_NAME = {key.removeprefix("option.").replace("_", "").lower(): key for key in _BY_KEY}


def find(key: str) -> Option | None:
    """Return the option of a key or alias of serving.properties, or None if no field is that option."""
    return _BY_KEY.get(key)


def default(key: str) -> Any:
    option = find(key)
    return None if option is None else option.default


def is_of_server(key: str) -> bool:
    """Return whether an option belongs to the whole server, and not to a model of it."""
    option = find(key)
    return option is not None and option.part == "server"


def key_of_env(name: str) -> str:
    """Return the key that OPTION_X_Y or SERVING_X_Y means.

    SERVING_MIN_WORKERS means minWorkers. The name of an unknown key becomes lower case, if it is all upper case.
    """
    prefix, _, rest = name.partition("_")
    known = _BY_ENV_NAME.get(rest.replace("_", "").lower())
    if known is not None:
        return known
    lowered = rest.lower() if rest.isupper() else rest
    return f"option.{lowered}" if prefix == "OPTION" else lowered


def known_keys() -> list[str]:
    return sorted({*_BY_KEY, *WITHOUT_EFFECT, *ENGINE_KEYS})
