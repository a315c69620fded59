"""Checks of values. Each raises ValueError with the name of a field, the rule and the value.

A fault is the rule that a value breaks, "" if it breaks none, so that others may raise an error of
their own.
"""

import math
from typing import Any

MAX_INT = 2**63 - 1


def check_int(name: str, value: int | None, minimum: int, maximum: int = MAX_INT) -> None:
    if value is None:
        return

    fault = int_fault(value, minimum, maximum)
    if fault:
        raise broken(name, fault, value)


def check_range(
    name: str, value: float | None, low: float, high: float, *, low_open: bool = False
) -> None:
    if value is None:
        return

    fault = range_fault(value, low, high, low_open=low_open)
    if fault:
        raise broken(name, fault, value)


def int_fault(value: Any, minimum: int, maximum: int) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        return "an integer"

    if value > max(MAX_INT, maximum):
        return "an integer of at most 64 bits"

    if minimum <= value <= maximum:
        return ""

    if maximum == MAX_INT:
        return f"at least {minimum}"

    return f"from {minimum} to {maximum}"


def range_fault(value: Any, low: float, high: float, *, low_open: bool) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "a finite number"

    if low <= value <= high and not (low_open and value == low):
        return ""

    bound = f"over {low:g}" if low_open else f"at least {low:g}"
    if high == math.inf:
        return bound

    return f"{bound} and at most {high:g}"


def broken(name: str, rule: str, value: object) -> ValueError:
    return ValueError(f"{name} must be {rule}, given {value!r}")
