"""The decorator of an input formatter, and two decorators of functions that lmi never calls."""

from typing import Any


def input_formatter(function: Any) -> Any:
    """Mark the function that reads the requests to the model."""
    function.is_input_formatter = True
    return function


def init_handler(function: Any) -> Any:
    """Mark a function that loads a model of scikit-learn or XGBoost, which are not served here."""
    function.is_init_handler = True
    return function


def prediction_handler(function: Any) -> Any:
    """Mark a function that runs a model of scikit-learn or XGBoost, which are not served here."""
    function.is_prediction_handler = True
    return function
