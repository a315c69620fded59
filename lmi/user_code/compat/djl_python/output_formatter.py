"""The decorator of an output formatter, and the classes of its arguments."""

from typing import Any

from djl_python.request_io import RequestOutput, Sequence, TextGenerationOutput, Token

__all__ = ["RequestOutput", "Sequence", "TextGenerationOutput", "Token", "output_formatter"]


def output_formatter(function: Any) -> Any:
    """Mark the function that writes the answers of the model."""
    function.is_output_formatter = True
    return function
