"""Collects the values that were given and picks the one that counts.

Order: command line, SageMaker's platform variables, serving.properties, OPTION_… and SERVING_…, the other environment
names, defaults. This module collects what was given under one key for each option, parses the winner, and remembers
what it shadowed. It does not know what an option does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmi.errors import BadConfiguration, ModelUnusable, shorten
from lmi.settings.kinds import TEXT
from lmi.settings.options import OPTIONS, find, key_of_env, known_keys
from lmi.settings.properties import Properties
from lmi.settings.reference import OTHER_ENV, TRANSLATED

NEARLY_SAME = 0.86  # of difflib: rolling_back is meant as rolling_batch, max_new_tokens is not as max_num_tokens
COMMAND_LINE, PLATFORM, FILE, ENVIRONMENT, OTHER_NAMES = range(5)
SECRET = re.compile(r"token$|secret|password|credential|api_?key|access_?key|^option\.env$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Given:
    """One value that someone gave. Of two, the lower `rank` counts; the same rank twice must agree."""

    key: str  # of its row in the table of options, or as written where it has no row
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
    """The value that counts for one key, and the givens that do not."""

    value: Any
    given: Given
    shadowed: tuple[Given, ...] = ()


@dataclass(slots=True)
class Problems:
    """Faults, warnings and notes for the author of the configuration."""

    faults: list[str] = field(default_factory=list)  # each one stops the start
    warnings: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # those of the warnings that are about unknown keys
    notes: list[str] = field(default_factory=list)
    unusable: ModelUnusable | None = None  # reported after every fault of an option

    def stop_at_faults(self) -> None:
        if self.faults:
            raise BadConfiguration("\n".join(self.faults + self.unknown))
        if self.unusable is not None:
            raise self.unusable


def collect(properties: Properties, environ: Mapping[str, str], flags: Mapping[str, str]) -> list[Given]:
    """Everything that was given, in no order. `flags` are texts by key, as the command line names them."""
    givens = [_given(key, text, _flag_source(key), (COMMAND_LINE, 0)) for key, text in flags.items()]
    for key, entry in properties.entries.items():
        givens.append(_given(key, entry.value, properties.source(key), (FILE, 0)))
    givens += _from_environment(environ)
    return [given for given in givens if given.text]


def pick(givens: list[Given], problems: Problems) -> dict[str, Picked]:
    """The value that counts for each key that was given; a bad one is a fault and is left out."""
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


def fault(given: Given, allowed: str) -> str:
    """The line about a bad value: key, value, source, what is allowed."""
    shown = "***" if given.shown == "***" else shorten(given.text)
    return f"{given.written}={shown} ({given.source}): allowed is {allowed}"


def closest(key: str, further: Iterable[str] = ()) -> str:
    """A hint at the known key that `key` may be a slip of, or nothing. Case and `option.` do not matter.

    `further`: keys that only one engine knows.
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
    """The value in a tuple, since None is a value too; None for a fault."""
    option = find(given.key)
    kind = option.kind if option else TEXT
    try:
        (given.key + given.text).encode()  # half of a surrogate pair and stray bytes of a variable are not text
        return (kind.parse(given.text),)
    except ValueError:
        problems.faults.append(fault(given, kind.allowed))
        return None


def _conflict(givens: list[Given]) -> str:
    said = ", ".join(given.said for given in givens)
    return f"{said}: these mean the same option, allowed is one value"
