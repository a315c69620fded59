"""The mark of an input formatter, and those of two more that nothing here calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def input_formatter(function: F) -> F:
    """This function reads the requests to the model."""
    function.is_input_formatter = True  # type: ignore[attr-defined]
    return function


def init_handler(function: F) -> F:
    """This function loads a model of scikit-learn or XGBoost, which are not served here."""
    function.is_init_handler = True  # type: ignore[attr-defined]
    return function


def prediction_handler(function: F) -> F:
    """This function asks a model of scikit-learn or XGBoost, which are not served here."""
    function.is_prediction_handler = True  # type: ignore[attr-defined]
    return function
