"""The mark of an input formatter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def input_formatter(function: F) -> F:
    """This function reads the requests to the model."""
    function.is_input_formatter = True  # type: ignore[attr-defined]
    return function
