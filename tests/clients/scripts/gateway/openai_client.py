"""openai at the OpenAI paths of a gateway: openai_client.py URL... . Prints what it
found at each.
"""

import json
import sys

from openai import BadRequestError, OpenAI

ASKED = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 8,
    "temperature": 0,
}


def visit(url: str) -> dict:
    chat = OpenAI(
        base_url=f"{url}/endpoints/demo/openai/v1", api_key="any", max_retries=0
    ).chat.completions
    results = {
        "plain": chat.create(**ASKED).choices[0].message.content,
        "streamed": "".join(
            chunk.choices[0].delta.content or "" for chunk in chat.create(**ASKED, stream=True)
        ),
    }
    try:
        chat.create(**{**ASKED, "max_tokens": -1})
    except BadRequestError as error:
        results["refused"] = str(error)

    return results


print(json.dumps([visit(url) for url in sys.argv[1:]]))
