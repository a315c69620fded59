"""Collects the engine's options that are not fields of a Config, and reports those that the engine does not use."""

from __future__ import annotations

from collections.abc import Mapping

from lmi.settings.engine_choice import ChosenEngine
from lmi.settings.handler import USER_CODE, Handler
from lmi.settings.kinds import LENGTH
from lmi.settings.options import OPTIONS, find
from lmi.settings.reference import ENGINE_KEYS, INSTEAD, REASONS, USUAL, WITHOUT_EFFECT, elsewhere
from lmi.settings.sources import Given, Problems, closest
from lmi.settings.values import Values


def other_options(values: Values, engine: ChosenEngine, problems: Problems) -> dict[str, str]:
    """Return the options for the engine, by name without `option.`. Reports every key that the engine does not use."""
    known = engine.handler.option_keys()
    options = _rows_for_engine(values, known or frozenset())
    for key, picked in values.picked.items():
        if find(key) is not None:
            continue
        _report(picked.given, values, engine, known, problems)
        is_used = known is None or key in known
        if key.startswith("option.") and is_used and key not in WITHOUT_EFFECT:
            options[key.removeprefix("option.")] = picked.value
    return options


def warn_of_some_engines(
    values: Values, engine: ChosenEngine, handlers: Mapping[str, Handler], problems: Problems
) -> None:
    """Warn of each option of the table that has no effect on this engine."""
    for option in OPTIONS:
        key, is_given = option.key, values.given(option.key, option.default) != option.default
        if option.otherwise and is_given and key not in engine.handler.uses:
            users = " or ".join(name for name, handler in handlers.items() if key in handler.uses)
            said = f"has an effect on {users} alone, {option.otherwise}"
            problems.warnings.append(f"{values.how_given(key).place}: {said}")


def _rows_for_engine(values: Values, known: frozenset[str]) -> dict[str, str]:
    """Return the options of the table that engines read themselves, and each length of auto that this engine knows."""
    options = {}
    for key, picked in values.picked.items():
        row = find(key)
        if row is not None and row.is_for_engine:
            options[key.removeprefix("option.")] = picked.given.text
        elif row is not None and row.kind is LENGTH and picked.value is None and key in known:
            options[key.removeprefix("option.")] = "auto"
    return options


def _report(
    given: Given, values: Values, engine: ChosenEngine, known: frozenset[str] | None, problems: Problems
) -> None:
    """Report a key without a row, unless the engine uses it. User code gets every option, so none is unknown."""
    is_option = given.key.startswith("option.")
    if (engine.handler is USER_CODE and is_option) or (given.key, given.text.strip("/")) in USUAL:
        return
    if given.key in WITHOUT_EFFECT:
        reason = f": {REASONS[given.key]}" if given.key in REASONS else ""
        problems.notes.append(f"{given.place}: has no effect here{reason}")
    elif given.key in (known or ()):
        return
    elif given.key in ENGINE_KEYS or given.key in engine.handler.unused:
        _report_of_other_engine(given, engine, known, problems)
    elif is_option and values.final("option.strict"):
        hint = f"; {meaning}" if (meaning := elsewhere(given.key)) else closest(given.key, known or ())
        problems.faults.append(f"{given.place}: unknown option, and option.strict is true{hint}")
    else:
        _warn_of_unknown(given, known, problems)


def _report_of_other_engine(
    given: Given, engine: ChosenEngine, known: frozenset[str] | None, problems: Problems
) -> None:
    if given.key in engine.handler.unused or known is not None:
        instead = engine.handler.unused.get(given.key) or INSTEAD.get(given.key, "")
        problems.warnings.append(f"{given.place}: {engine.name} does not use it{instead and f', {instead}'}")


def _warn_of_unknown(given: Given, known: frozenset[str] | None, problems: Problems) -> None:
    if meaning := elsewhere(given.key):
        problems.warnings.append(f"{given.place}: {meaning}")
        return
    unknown = f"{given.place}: unknown option{closest(given.key, known or ())}"
    problems.warnings.append(unknown)
    if closest(given.key):  # another key may belong to an engine whose name is a fault
        problems.unknown.append(unknown)
