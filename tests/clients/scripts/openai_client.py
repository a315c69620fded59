"""The openai client at the OpenAI API: openai_client.py BASE_URL MODEL."""

import json
import sys

from openai import BadRequestError, NotFoundError, OpenAI

MESSAGES = [{"role": "user", "content": "Hello"}]
PROMPT = "The quick brown"
base_url, model = sys.argv[1:]
client = OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)


def completions() -> dict:
    whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=2)
    chunks = list(client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0, stream=True))
    several = client.completions.create(model=model, prompt=[PROMPT, "a"], max_tokens=2, temperature=0, n=2)
    return {
        "whole": whole.choices[0].text,
        "num_tokens": whole.usage.completion_tokens,
        "log_probs": whole.choices[0].logprobs.token_logprobs,
        "tokens": whole.choices[0].logprobs.tokens,
        "streamed": "".join(chunk.choices[0].text for chunk in chunks if chunk.choices),
        "indexes": [choice.index for choice in several.choices],
    }


def chat() -> dict:
    asked = {"model": model, "messages": MESSAGES, "max_completion_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    return {
        "whole": whole.choices[0].message.content,
        "finish_reason": whole.choices[0].finish_reason,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "usage": chunks[-1].usage.completion_tokens,
    }


def fields_of_vllm() -> dict:
    begun = [*MESSAGES, {"role": "assistant", "content": "The"}]
    body = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    asked = {"model": model, "messages": begun, "max_completion_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked, extra_body=body | {"prompt_logprobs": 1})
    chunks = list(client.chat.completions.create(**asked, extra_body=body, stream=True))
    return {
        "prompt_ids": [whole.prompt_token_ids, chunks[0].prompt_token_ids],
        "num_scored": len(whole.prompt_logprobs),
        "ids": whole.choices[0].token_ids,
        "streamed_ids": [each for chunk in chunks for each in getattr(chunk.choices[0], "token_ids", None) or []],
    }


def refusals() -> list[str]:
    found = []
    for asked, kind in (({"max_tokens": -1}, BadRequestError), ({"model": "nobody"}, NotFoundError)):
        try:
            client.chat.completions.create(**{"model": model, "messages": MESSAGES, **asked})
        except kind as error:
            found.append(error.body["message"])
    return found


print(
    json.dumps(
        {
            "models": [each.id for each in client.models.list()],
            "completions": completions(),
            "chat": chat(),
            "fields_of_vllm": fields_of_vllm(),
            "refusals": refusals(),
        }
    )
)
