"""The small tokenizers of tests/text."""

from tests.text.conftest import byte_level, sentencepiece

__all__ = ["byte_level", "sentencepiece"]
