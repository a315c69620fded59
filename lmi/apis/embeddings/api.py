"""The row of OpenAI's embeddings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lmi.apis.base.api import Api
from lmi.apis.embeddings import schema
from lmi.apis.embeddings.formatter import EmbeddingsWhole
from lmi.apis.embeddings.schema import EmbeddingFormat
from lmi.apis.openai.api import OPENAI_CHAT, OPENAI_CHAT_ERRORS
from lmi.apis.openai.schema import OpenAIFormat, default_format

EMBEDDINGS: Api[OpenAIFormat] = replace(
    OPENAI_CHAT,
    name="embeddings",
    paths=("/v1/embeddings",),
    prefixes=(),
    default_format=partial(default_format, kind=EmbeddingFormat),
    read=schema.read,
    parse=schema.parse,
    formatter=EmbeddingsWhole,
    errors=replace(OPENAI_CHAT_ERRORS, names=schema.EMBEDDINGS.wire_names(pooling_params="model")),
)
