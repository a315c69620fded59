"""A client says whether its prompt begins with the special tokens of the tokenizer, and the prompt
does.
"""

import asyncio
from typing import Any, cast

import pytest

from lmi.engine.client import Engines
from lmi.executor import EngineInfo, SamplingConfig
from lmi.pipeline import Pipeline
from lmi.settings.config import ModelConfig
from lmi.text.tokenizer import Tokenizer
from lmi.types import Chat, GenerationRequest
from tests.text.small_tokenizers import sentencepiece_backend

# <s>, which this tokenizer writes before every text
BEGIN = 1
INFO = EngineInfo(name="none", vocab_size=999, max_sequence_length=99, max_num_sequences=1)
CHAT = Chat(messages=[{"role": "user", "content": "Hello"}])


@pytest.mark.parametrize(
    ("fields", "adds"),
    [
        ({"prompt": "Hello"}, True),
        ({"prompt": "Hello", "add_special_tokens": True}, True),
        ({"prompt": "Hello", "add_special_tokens": False}, False),
        ({"chat": CHAT}, False),
        ({"chat": CHAT, "add_special_tokens": True}, True),
        ({"chat": CHAT, "add_special_tokens": False}, False),
    ],
)
def test_a_prompt_begins_with_special_tokens_where_that_is_usual_or_asked_for(
    fields: dict[str, Any], adds: bool
) -> None:
    request = GenerationRequest(max_new_tokens=9, sampling=SamplingConfig(), **fields)
    model = ModelConfig(path="demo", name="demo", chat_template="{{ messages[0].content }}")
    pipeline = Pipeline(Tokenizer(sentencepiece_backend()), cast(Engines, None), model)
    _, ids = asyncio.run(pipeline.encode(request, INFO))

    assert (ids[0] == BEGIN) is adds and BEGIN not in ids[1:]
