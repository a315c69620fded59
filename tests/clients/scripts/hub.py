"""huggingface_hub's InferenceClient at the TGI API and at the OpenAI API: hub.py BASE_URL."""

import dataclasses
import json
import sys

from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

PROMPT = "The quick brown"
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "ok", "schema": SCHEMA}}
client = InferenceClient(sys.argv[1])


def refusal() -> str:
    try:
        client.text_generation(PROMPT, max_new_tokens=4, temperature=-1.0)
    except ValidationError as error:
        return str(error)

    return ""


def chat() -> dict:
    messages = [{"role": "user", "content": "Hello"}]
    whole = client.chat_completion(messages, max_tokens=8, temperature=0)
    streamed = list(client.chat_completion(messages, max_tokens=8, temperature=0, stream=True))
    formed = client.chat_completion(messages, max_tokens=200, response_format=FORM)
    return {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(
            chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices
        ),
        "finish_reason": whole.choices[0].finish_reason,
        "in_its_form": formed.choices[0].message.content,
        "num_tokens": whole.usage.completion_tokens,
    }


events = list(client.text_generation(PROMPT, max_new_tokens=8, stream=True, details=True))
print(
    json.dumps(
        {
            "plain": client.text_generation(PROMPT, max_new_tokens=8),
            "details": dataclasses.asdict(
                client.text_generation(
                    PROMPT, max_new_tokens=8, details=True, decoder_input_details=True
                )
            ),
            "streamed": list(client.text_generation(PROMPT, max_new_tokens=8, stream=True)),
            "last_event": dataclasses.asdict(events[-1]),
            "refusal": refusal(),
            "chat": chat(),
        }
    )
)
