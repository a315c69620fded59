"""The small tokenizers, each trained once."""

from __future__ import annotations

import pytest

from lmi.text.tokenizer import Tokenizer
from tests.text.small_tokenizers import byte_level_backend, sentencepiece_backend, unigram_backend


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_backend())


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_backend())


@pytest.fixture(scope="session")
def unigram() -> Tokenizer:
    return Tokenizer(unigram_backend())
