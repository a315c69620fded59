"""The decorator of an input formatter, and two decorators of functions that lmi never calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def input_formatter(function: F) -> F:
    """Mark the function that reads the requests to the model."""
    function.is_input_formatter = True  # type: ignore[attr-defined]
    return function


def init_handler(function: F) -> F:
    """Mark a function that loads a model of scikit-learn or XGBoost, which are not served here."""
    function.is_init_handler = True  # type: ignore[attr-defined]
    return function


def prediction_handler(function: F) -> F:
    """Mark a function that runs a model of scikit-learn or XGBoost, which are not served here."""
    function.is_prediction_handler = True  # type: ignore[attr-defined]
    return function
