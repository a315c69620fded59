"""The openai client at an embedding model: openai_embeddings.py BASE_URL MODEL."""

import json
import sys

from openai import BadRequestError, OpenAI

TEXTS = ["The quick brown fox", "She sells sea shells by the sea shore.", "Straße 狐"]
base_url, model = sys.argv[1:]
client = OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)


def embed(given, **more) -> list:
    """The client asks for base64 unless it is told another form."""
    answer = client.embeddings.create(model=model, input=given, **more)
    assert [embedding.index for embedding in answer.data] == list(range(len(answer.data)))
    return [embedding.embedding for embedding in answer.data]


def refusals() -> list[str]:
    messages = []
    for ask in (
        lambda: client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Hello"}]
        ),
        lambda: client.embeddings.create(model=model, input=""),
        lambda: client.embeddings.create(model=model, input="Hello", dimensions=1000),
    ):
        try:
            ask()
        except BadRequestError as error:
            messages.append(error.body["message"])

    return messages


print(
    json.dumps(
        {
            "texts": TEXTS,
            "whole": embed(TEXTS),
            "as_numbers": embed(TEXTS, encoding_format="float"),
            "short": embed(TEXTS[0], dimensions=8),
            "of_ids": embed([[5, 6, 7], [8]]),
            "num_tokens": client.embeddings.create(
                model=model, input=[[5, 6, 7], [8]]
            ).usage.prompt_tokens,
            "refusals": refusals(),
        }
    )
)
