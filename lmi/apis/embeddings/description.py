"""OpenAI's embeddings in /openapi.json."""

from lmi.apis.embeddings.api import EMBEDDINGS
from lmi.apis.embeddings.schema import PARAMETERS
from lmi.apis.openai.description import PROMPT
from lmi.description.operations import ApiDescription
from lmi.description.schemas import answer_object, content, either, request_object, table_schemas
from lmi.settings.config import Config

EXAMPLE = {"input": "What is the capital of France?"}
SCHEMAS = {
    "EmbeddingsRequest": request_object(
        table_schemas(PARAMETERS) | {"input": PROMPT}, required=("input",), example=EXAMPLE
    ),
    "Embeddings": answer_object(
        {
            "object": {"const": "list"},
            "data": [
                answer_object(
                    {
                        "object": {"const": "embedding"},
                        "index": int,
                        "embedding": either([float], str),
                    }
                )
            ],
            "model": str,
            "usage": answer_object({"prompt_tokens": int, "total_tokens": int}),
        }
    ),
}


def describe(config: Config) -> ApiDescription:
    """Describe the route of OpenAI's embeddings."""
    about = "OpenAI's embeddings, of an embedding model."
    rules = [EMBEDDINGS.errors]
    api = ApiDescription(
        name="Embeddings",
        about=about,
        model=config.model,
        schemas=SCHEMAS,
        error=content("OpenAIError"),
        rules=rules,
    )
    api.add_inference("/v1/embeddings", "Embed texts", "Embeddings", "EmbeddingsRequest")
    return api
