"""The lines of `lmi config`: each option with its value, its source, and the values that it shadows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmi.settings.config import Config
from lmi.settings.options import OPTIONS, find
from lmi.settings.values import Values
from lmi.sources.request import FetchRequest


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of `lmi config`."""

    option: str
    value: str
    source: str
    shadowed: tuple[str, ...] = ()  # "value (source)" of each value that was given and does not count


@dataclass(frozen=True, slots=True)
class Resolved:
    """The configuration, the source of each value, and warnings and notes for its author.

    `request` names the remote sources without which the configuration is not final; None if it is.
    """

    config: Config
    settings: tuple[Setting, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    details: tuple[str, ...] = ()  # for a log at DEBUG
    request: FetchRequest | None = None


def settings(values: Values) -> tuple[Setting, ...]:
    """Return a setting for every option of the table in its order, then for the others that were given."""
    known = [option.key for option in OPTIONS]
    return tuple(setting(values, key) for key in [*known, *sorted(set(values.picked) - set(known))])


def shadows(rows: tuple[Setting, ...]) -> list[str]:
    """Return one sentence for each value that was given and does not count."""
    return [f"{row.option}: {row.value} ({row.source}) counts, not {other}" for row in rows for other in row.shadowed]


def setting(values: Values, key: str) -> Setting:
    value = written(key, values.final(key))
    picked, (_, reason) = values.picked.get(key), values.chosen.get(key, (None, ""))
    if picked is None:
        return Setting(key, value, reason or "default")
    shadowed = tuple(f"{given.shown} ({given.source})" for given in picked.shadowed)
    is_secret = picked.given.shown == "***"
    source = f"{picked.given.source}, {reason}" if reason else picked.given.source
    return Setting(key, "***" if is_secret else value, source, shadowed)


def written(key: str, value: Any) -> str:
    """Return an option's value in the form that serving.properties has."""
    if value is None:
        return option.kind.unset if (option := find(key)) else ""
    if value == {}:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return ";".join(map(str, value)) if isinstance(value, tuple) else str(value)
