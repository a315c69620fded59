"""The anthropic client at the Messages API: anthropic_client.py BASE_URL MODEL."""

import json
import sys
from typing import Literal

from anthropic import Anthropic, BadRequestError, NotFoundError, beta_tool

MESSAGES = [{"role": "user", "content": "Hello"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "The weather in a city.", "input_schema": CITY}]
base_url, model = sys.argv[1:]
client = Anthropic(base_url=base_url, api_key="none", max_retries=0)
asked = {"model": model, "messages": MESSAGES, "max_tokens": 8, "extra_body": {"temperature": 0}}


def text() -> dict:
    whole = client.messages.create(**asked, system=[{"type": "text", "text": "Be brief."}])
    counted = client.messages.count_tokens(model=model, messages=MESSAGES, system="Be brief.")
    with client.messages.stream(**asked, system="Be brief.") as stream:
        streamed = "".join(stream.text_stream)
        last = stream.get_final_message()

    usage = whole.usage
    return {
        "whole": whole.content[0].text,
        "streamed": streamed,
        "joined": last.content[0].text,
        "stop_reasons": [whole.stop_reason, last.stop_reason],
        "num_tokens": [usage.output_tokens, last.usage.output_tokens],
        "num_prompt_tokens": [
            counted.input_tokens,
            usage.input_tokens + usage.cache_read_input_tokens,
        ],
    }


def tools() -> dict:
    forced = {
        **asked,
        "max_tokens": 40,
        "tools": TOOLS,
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    called = client.messages.create(**forced)
    with client.messages.stream(**forced) as stream:
        streamed = stream.get_final_message()

    [call] = called.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}
    answered = [
        *MESSAGES,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    last = client.messages.create(
        **{**asked, "messages": answered, "tools": TOOLS, "tool_choice": {"type": "none"}}
    )
    return {
        "inputs": [call.input, streamed.content[0].input],
        "stop_reasons": [called.stop_reason, streamed.stop_reason],
        "answer": last.content[0].text,
    }


@beta_tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather in a city."""
    return "12 degrees"


def loop() -> list[int]:
    """Return the tokens of the prompt at each turn of the client's own loop, which offers to leave
    them to a server.
    """
    runner = client.beta.messages.tool_runner(
        **{**asked, "max_tokens": 60},
        system="Be brief.",
        tools=[weather],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=2,
    )
    usages = [message.usage for message in runner]
    return [usage.input_tokens + usage.cache_read_input_tokens for usage in usages]


def refusals() -> list[str]:
    messages = []
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "AA=="},
    }
    for more, kind in (
        ({"messages": [{"role": "user", "content": [image]}]}, BadRequestError),
        ({"model": "nobody"}, NotFoundError),
    ):
        try:
            client.messages.create(**{**asked, **more})
        except kind as error:
            messages.append(f"{error.type}: {error.api_message}")

    return messages


print(json.dumps({"text": text(), "tools": tools(), "loop": loop(), "refusals": refusals()}))
