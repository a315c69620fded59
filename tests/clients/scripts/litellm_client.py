"""litellm at three APIs: litellm_client.py BASE_URL MODEL."""

import json
import sys

import litellm

base_url, model = sys.argv[1:]
litellm.suppress_debug_info = True
MESSAGES = [{"role": "user", "content": "The quick brown"}]
PLACES = {
    "triton": {"model": f"triton/{model}", "api_base": f"{base_url}/v2/models/{model}/generate"},
    "openai": {"model": f"openai/{model}", "api_base": f"{base_url}/v1", "api_key": "none"},
    "sagemaker": {"model": "sagemaker/it", "sagemaker_base_url": f"{base_url}/invocations"},
}


def ask(place: str, **more: object):
    if place == "openai":
        # The default of the other APIs
        more["temperature"] = 0

    return litellm.completion(
        messages=MESSAGES, max_tokens=8, num_retries=0, **PLACES[place], **more
    )


def streamed(place: str) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in ask(place, stream=True))


def error_of_a_long_prompt() -> str:
    """Return the error on which litellm asks a model with a longer context."""
    messages = [{"role": "user", "content": "a word of many " * 2000}]
    try:
        litellm.completion(messages=messages, max_tokens=8, num_retries=0, **PLACES["openai"])
    except litellm.BadRequestError as error:
        return type(error).__name__

    return "none"


found = {place: {"plain": ask(place).choices[0].message.content} for place in PLACES}
# SageMaker frames streams in its own way
for place in ("triton", "openai"):
    found[place]["streamed"] = streamed(place)
found["too_long"] = error_of_a_long_prompt()
print(json.dumps(found))
