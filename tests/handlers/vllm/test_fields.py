"""Every field of vLLM's request classes is known at the API of the same path: read, refused by
name, or harmless.
"""

import importlib

import pytest

from lmi.apis.anthropic.schema import MESSAGES
from lmi.apis.base.parameters import ParameterTable
from lmi.apis.embeddings import schema as embeddings
from lmi.apis.openai.chat_schema import CHAT
from lmi.apis.openai.schema import COMPLETION
from lmi.apis.responses.schema import RESPONSES

ENTRYPOINTS = "vllm.entrypoints"


@pytest.mark.parametrize(
    ("module", "kind", "table"),
    [
        ("openai.chat_completion.protocol", "ChatCompletionRequest", CHAT),
        ("openai.completion.protocol", "CompletionRequest", COMPLETION),
        ("openai.responses.protocol", "ResponsesRequest", RESPONSES),
        ("anthropic.protocol", "AnthropicMessagesRequest", MESSAGES),
        ("anthropic.protocol", "AnthropicCountTokensRequest", MESSAGES),
        ("pooling.embed.protocol", "EmbeddingCompletionRequest", embeddings.PARAMETERS),
    ],
)
def test_every_field_is_read_refused_or_listed_as_harmless(
    module: str, kind: str, table: ParameterTable
) -> None:
    protocol = importlib.import_module(f"{ENTRYPOINTS}.{module}")
    fields = getattr(protocol, kind).model_fields
    assert set(fields) - table.known_names == set()
