"""Collects the values that were given for each option and picks the one that counts.

The order is: command line, SageMaker's platform variables, serving.properties, OPTION_… and SERVING_…, the other
environment names, defaults. This module groups the values by the option's key, parses the one that counts, and keeps
those that it shadows. It does not know what an option does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmi.errors import BadConfiguration, ModelUnusable, shorten
from lmi.settings.kinds import TEXT, TooLarge
from lmi.settings.options import OPTIONS, find, key_of_env, known_keys
from lmi.settings.other_images import is_of_other_image
from lmi.settings.properties import Properties
from lmi.settings.reference import OTHER_ENV, TRANSLATED

NEARLY_SAME = (
    0.86  # a ratio of difflib: rolling_back is a slip for rolling_batch, max_new_tokens is not one for max_num_tokens
)
PLATFORM_PREFIX = "SAGEMAKER_"
COMMAND_LINE, PLATFORM, FILE, ENVIRONMENT, OTHER_NAMES = range(5)
SECRET = re.compile(r"token$|secret|password|credential|api_?key|access_?key|^option\.env$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Given:
    """One value that was given for an option. The one with the lowest `rank` counts; equal ranks must agree."""

    key: str  # the key of its row in the table of options, or as written if it has no row
    written: str  # the key or name as it was written
    text: str
    source: str  # file:line, the name of a variable, a flag
    rank: tuple[int, int]  # layer, order inside the layer

    @property
    def said(self) -> str:
        """Its name in messages, with its value and source."""
        return f"{self.written}={self.shown} ({self.source})"

    @property
    def place(self) -> str:
        """Its name in messages, with its source."""
        return f"{self.written} ({self.source})"

    @property
    def shown(self) -> str:
        if SECRET.search(self.key):
            return "***"
        return self.text if self.text.isprintable() else ascii(self.text)[1:-1]


@dataclass(frozen=True, slots=True)
class Picked:
    """The value that counts for one key, and the given values that do not count."""

    value: Any
    given: Given
    shadowed: tuple[Given, ...] = ()


@dataclass(slots=True)
class Problems:
    """Faults, warnings and notes for the author of the configuration."""

    faults: list[str] = field(default_factory=list)  # each one stops the start
    warnings: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # the warnings about unknown keys, which `warnings` holds too
    notes: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)  # for who looks for the cause of something
    unusable: ModelUnusable | None = None  # reported after every fault of an option

    def stop_at_faults(self) -> None:
        if self.faults:
            raise BadConfiguration("\n".join(self.faults + self.unknown))
        if self.unusable is not None:
            raise self.unusable


def collect(properties: Properties, environ: Mapping[str, str], flags: Mapping[str, str]) -> list[Given]:
    """Return all values that were given, in no order. `flags` holds the texts of the command line by key."""
    givens = [_given(key, text, _flag_source(key), (COMMAND_LINE, 0)) for key, text in flags.items()]
    for key, entry in properties.entries.items():
        givens.append(_given(key, entry.value, properties.source(key), (FILE, 0)))
    givens += _from_environment(environ)
    return [given for given in givens if given.text]


def pick(givens: list[Given], problems: Problems) -> dict[str, Picked]:
    """Return the value that counts for each key that was given. A bad value is a fault and is left out."""
    by_key: dict[str, list[Given]] = {}
    for given in sorted(givens, key=lambda given: given.rank):
        by_key.setdefault(given.key, []).append(given)
    picked = {}
    for key, candidates in by_key.items():
        rivals = [given for given in candidates if given.rank == candidates[0].rank]
        values = [parsed[0] for given in rivals if (parsed := _parse(given, problems)) is not None]
        if len(values) < len(rivals):
            continue
        if any(value != values[0] for value in values):
            problems.faults.append(_conflict(rivals))
            continue
        picked[key] = Picked(values[0], candidates[0], tuple(candidates[1:]))
    return picked


def unused_of_platform(environ: Mapping[str, str]) -> list[str]:
    """Return the line about SageMaker's variables that set no option, or no line."""
    used = {name for option in OPTIONS for name in option.platform}
    named = {name for name in environ if name.startswith(PLATFORM_PREFIX) and not is_of_other_image(name)}
    unused = sorted(named - used)
    return [f"{', '.join(unused)}: set no option"] if unused else []


def fault(given: Given, allowed: str) -> str:
    """Return the line about a bad value: key, value, source, allowed values."""
    shown = "***" if given.shown == "***" else shorten(given.text)
    return f"{given.written}={shown} ({given.source}): allowed is {allowed}"


def closest(key: str, further: Iterable[str] = ()) -> str:
    """Return a hint at a known key that is spelt nearly like `key`, or "". Case and `option.` do not matter.

    `further` holds keys that only one engine knows.
    """
    known = {name.removeprefix("option.").lower(): name for name in [*known_keys(), *further]}
    matches = difflib.get_close_matches(key.removeprefix("option.").lower(), known, 1, NEARLY_SAME)
    return f"; the closest known key is {known[matches[0]]}" if matches else ""


def _given(written: str, text: str, source: str, rank: tuple[int, int]) -> Given:
    option = find(written)
    shown = written if written.isprintable() else ascii(written)[1:-1]
    return Given(option.key if option else written, shown[:100], text.strip(), source, rank)


def _flag_source(key: str) -> str:
    option = find(key)
    return option.flag if option and option.key == key and option.has_flag else f"--set {key}"


def _from_environment(environ: Mapping[str, str]) -> Iterator[Given]:
    for name, text in sorted(environ.items()):
        if name.startswith(("OPTION_", "SERVING_")):
            yield _given(key_of_env(name), text, name, (ENVIRONMENT, 0))
    for option in OPTIONS:
        for layer, names in ((PLATFORM, option.platform), (OTHER_NAMES, option.env)):
            for order, name in enumerate(names):
                yield _given(option.key, _translated(name, environ), name, (layer, order))
    for name, key in OTHER_ENV.items():
        yield _given(key, _translated(name, environ), name, (OTHER_NAMES, 0))


def _translated(name: str, environ: Mapping[str, str]) -> str:
    text = environ.get(name, "").strip()
    return TRANSLATED[name](text) if text and name in TRANSLATED else text


def _parse(given: Given, problems: Problems) -> tuple[Any] | None:
    """Return the value in a tuple, because None is a value too. Returns None for a fault."""
    option = find(given.key)
    kind = option.own_kinds.get(given.source, option.kind) if option else TEXT
    try:
        (given.key + given.text).encode()  # raises for a lone surrogate, which also stands for a byte that is not UTF-8
        return (kind.parse(given.text),)
    except ValueError as error:
        problems.faults.append(fault(given, str(error) if isinstance(error, TooLarge) else kind.allowed))
        return None


def _conflict(givens: list[Given]) -> str:
    said = ", ".join(given.said for given in givens)
    return f"{said}: these mean the same option, allowed is one value"
