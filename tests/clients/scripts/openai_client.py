"""The openai client at the OpenAI API: openai_client.py BASE_URL MODEL."""

import json
import sys

from openai import BadRequestError, NotFoundError, OpenAI

MESSAGES = [{"role": "user", "content": "Hello"}]
PROMPT = "The quick brown"
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": CITY,
}
base_url, model = sys.argv[1:]
client = OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)


def completions() -> dict:
    whole = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=2
    )
    chunks = list(
        client.completions.create(
            model=model, prompt=PROMPT, max_tokens=8, temperature=0, stream=True
        )
    )
    several = client.completions.create(
        model=model, prompt=[PROMPT, "a"], max_tokens=2, temperature=0, n=2
    )
    return {
        "whole": whole.choices[0].text,
        "num_tokens": whole.usage.completion_tokens,
        "log_probs": whole.choices[0].logprobs.token_logprobs,
        "tokens": whole.choices[0].logprobs.tokens,
        "streamed": "".join(chunk.choices[0].text for chunk in chunks if chunk.choices),
        "indexes": [choice.index for choice in several.choices],
    }


def chat() -> dict:
    arguments = {"model": model, "messages": MESSAGES, "max_completion_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**arguments)
    chunks = list(
        client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
    )

    return {
        "whole": whole.choices[0].message.content,
        "finish_reason": whole.choices[0].finish_reason,
        "streamed": "".join(
            chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
        ),
        "usage": chunks[-1].usage.completion_tokens,
    }


def responses() -> dict:
    arguments = {"model": model, "input": "Hello", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**arguments)
    with client.responses.stream(**arguments) as stream:
        events = list(stream)

    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1].response
    return {
        "whole": whole.output_text,
        "streamed": text,
        "last": last.output_text,
        "statuses": [whole.status, last.status],
        "num_tokens": [whole.usage.output_tokens, last.usage.output_tokens],
    }


def response_tools() -> dict:
    conversation = [{"role": "user", "content": "Hello"}]
    arguments = {"model": model, "max_output_tokens": 40, "temperature": 0, "tools": [WEATHER]}
    forced = arguments | {
        "input": conversation,
        "tool_choice": {"type": "function", "name": "weather"},
    }
    called = client.responses.create(**forced)
    with client.responses.stream(**forced) as stream:
        streamed = stream.get_final_response()

    [call] = called.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    last = client.responses.create(
        **arguments, input=[*conversation, *called.output, result], tool_choice="none"
    )
    form = {"format": {"type": "json_schema", "name": "city", "schema": CITY}}
    in_its_form = client.responses.create(model=model, input="Hello", temperature=0, text=form)
    return {
        "arguments": [call.arguments, streamed.output[0].arguments],
        "answer": last.output_text,
        "in_its_form": in_its_form.output_text,
    }


def fields_of_vllm() -> dict:
    begun = [*MESSAGES, {"role": "assistant", "content": "The"}]
    body = {
        "continue_final_message": True,
        "add_generation_prompt": False,
        "return_token_ids": True,
    }
    arguments = {"model": model, "messages": begun, "max_completion_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**arguments, extra_body=body | {"prompt_logprobs": 1})
    chunks = list(client.chat.completions.create(**arguments, extra_body=body, stream=True))
    return {
        "prompt_ids": [whole.prompt_token_ids, chunks[0].prompt_token_ids],
        "num_scored": len(whole.prompt_logprobs),
        "ids": whole.choices[0].token_ids,
        "streamed_ids": [
            token_id
            for chunk in chunks
            for token_id in getattr(chunk.choices[0], "token_ids", None) or []
        ],
    }


def refusals() -> list[str]:
    messages = []
    for fields, kind in (
        ({"max_tokens": -1}, BadRequestError),
        ({"model": "nobody"}, NotFoundError),
    ):
        try:
            client.chat.completions.create(**{"model": model, "messages": MESSAGES, **fields})
        except kind as error:
            messages.append(error.body["message"])

    try:
        client.responses.create(model=model, input="Hello", previous_response_id="resp_1")
    except BadRequestError as error:
        messages.append(error.body["message"])

    return messages


print(
    json.dumps(
        {
            "models": [each.id for each in client.models.list()],
            "completions": completions(),
            "chat": chat(),
            "responses": responses(),
            "response_tools": response_tools(),
            "fields_of_vllm": fields_of_vllm(),
            "refusals": refusals(),
        }
    )
)
