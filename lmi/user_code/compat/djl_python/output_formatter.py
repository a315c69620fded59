"""The decorator of an output formatter, and the classes of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from djl_python.request_io import RequestOutput, Sequence, TextGenerationOutput, Token

F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["RequestOutput", "Sequence", "TextGenerationOutput", "Token", "output_formatter"]


def output_formatter(function: F) -> F:
    """Mark the function that writes the answers of the model."""
    function.is_output_formatter = True  # type: ignore[attr-defined]
    return function
