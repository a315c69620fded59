"""Checks of values. Each raises ValueError with the name of a field, the rule and the value."""

from __future__ import annotations

import math


def check_int(name: str, value: int | None, minimum: int, maximum: int | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise broken(name, "an integer", value)
    if value < minimum or (maximum is not None and value > maximum):
        raise broken(name, f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}", value)


def check_range(name: str, value: float | None, low: float, high: float, *, low_open: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise broken(name, "a finite number", value)
    if value < low or value > high or (low_open and value == low):
        bound = f"over {low:g}" if low_open else f"at least {low:g}"
        raise broken(name, bound if high == math.inf else f"{bound} and at most {high:g}", value)


def broken(name: str, rule: str, given: object) -> ValueError:
    return ValueError(f"{name} must be {rule}, given {given!r}")
