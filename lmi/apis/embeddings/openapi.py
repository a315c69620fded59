"""OpenAI's embeddings."""

from __future__ import annotations

from lmi.apis.base.openapi import ApiDescription, asked, content, either, struct, taken
from lmi.apis.embeddings.api import EMBEDDINGS, PARAMETERS
from lmi.apis.openai.openapi import PROMPT
from lmi.settings.config import Config

EXAMPLE = {"input": "What is the capital of France?"}
SCHEMAS = {
    "EmbeddingsRequest": asked(taken(PARAMETERS) | {"input": PROMPT}, "input", example=EXAMPLE),
    "Embeddings": struct(
        object={"const": "list"},
        data=[struct(object={"const": "embedding"}, index=int, embedding=either([float], str))],
        model=str,
        usage=struct(prompt_tokens=int, total_tokens=int),
    ),
}


def describe(config: Config) -> ApiDescription:
    about, rules = "OpenAI's embeddings, of an embedding model.", [EMBEDDINGS.errors]
    api = ApiDescription("Embeddings", about, config.model, SCHEMAS, content("OpenAIError"), rules)
    api.infer("/v1/embeddings", "Embed texts", "Embeddings", "EmbeddingsRequest")
    return api
