"""The schema of OpenAI's Responses: `{"model": "m", "input": "Hello"}`, where input may be a list
of items.

Nothing is kept here, so a request holds the whole conversation. Agents also offer tools of OpenAI's
own servers, whatever they are told: those are left out, and a response repeats only the tools that
the model knows of. Sources: the types of OpenAI's client, and the Open Responses specification.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lmi.apis.base.parameters import ROWS, Parameter, ParameterTable, ParameterValues, named
from lmi.apis.base.readers import Message, Parsed, choice, integer, takes, text
from lmi.apis.guides import (
    CONTRACT_NAME,
    AskedGuide,
    an_object,
    asked_guide,
    check_levels,
    guide_of_format,
)
from lmi.apis.openai.chat_formatter import named_event
from lmi.apis.openai.chat_schema import CHAT, chat_request, content, fill_in, parsed_arguments
from lmi.apis.openai.fields import CANNOT, WITHOUT_EFFECT, hidden
from lmi.apis.openai.schema import MAX_LOG_PROBS, TOOLS, OpenAIFormat, anything
from lmi.apis.openai.tools import flat_tools, tool_choice
from lmi.errors import InvalidParameter, Unsupported, shorten

KEEPS_NOTHING = "nothing is kept here: send store: false, and the whole conversation in input"
CANNOT_RESPOND = CANNOT | {
    "background_options": KEEPS_NOTHING,
    "enable_response_messages": "a response has items alone",
    "image": "models here write text",
    "max_completion_tokens": "it is called max_output_tokens",
    "max_tokens": "it is called max_output_tokens",
    "messages": "it is called input",
    "personality": "instructions tell the model how to speak",
    "previous_input_messages": "it is called input",
    "response_format": "it is called text.format",
    "store": KEEPS_NOTHING,
    "previous_response_id": KEEPS_NOTHING,
    "conversation": KEEPS_NOTHING,
    "prompt": "no prompts are stored here",
    "background": KEEPS_NOTHING,
    "context_management": "no conversation is shortened here",
}
SILENT = [name for name in WITHOUT_EFFECT if name not in ("store", "metadata")]
SILENT += ["access_programs", "client_metadata", "max_tool_calls", "stream_options"]
LOG_PROBS = "message.output_text.logprobs"
# What chats read as well: how tokens are drawn, where an answer ends, what its text has, and what
# it must be.
AS_CHATS = (
    "model stream temperature top_p presence_penalty frequency_penalty cache_salt priority "
    "prompt_cache_key "
    "seed top_k min_p repetition_penalty logit_bias "
    "stop stop_token_ids include_stop_str_in_output no_stop_trim ignore_eos min_tokens bad_words "
    "skip_special_tokens spaces_between_special_tokens add_special_tokens truncate_prompt_tokens "
    "truncation_side "
    "guided_json guided_regex guided_choice guided_grammar regex ebnf grammar json_schema "
    "structured_outputs "
    "logits_post_processor_name parallel_tool_calls chat_template_kwargs enable_thinking thinking "
    "reasoning"
).split()
ROLES = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}  # the template's
read_role = choice(tuple(ROLES))
SETTINGS: dict[str, Any] = {  # of a request that names none
    **dict.fromkeys(("background", "store"), False),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), 0),
    **dict.fromkeys(("temperature", "top_p"), 1),
    **dict.fromkeys(
        ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"), None
    ),
    **dict.fromkeys(("prompt_cache_key", "reasoning", "safety_identifier"), None),
    "metadata": {},
    "parallel_tool_calls": True,
    "service_tier": "default",
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}


@dataclass(slots=True)
class ResponseState:
    """One response: the settings that it repeats, the items that have ended, and how many events
    told of it.
    """

    settings: dict[str, Any]
    output: list[dict[str, Any]] = field(default_factory=list)
    id: str = ""
    created_s: int = 0
    model: str = ""
    num_events: int = 0

    def response(self, status: str, **known: Any) -> dict[str, Any]:
        """Return the response as it is now. `known` are fields that are null until its end."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "model": self.model,
            "output": self.output,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **SETTINGS,
            **self.settings,
            **known,
        }

    def event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self.num_events, **fields}
        self.num_events += 1
        return named_event(kind, data)


@takes({"type": "array", "items": {"type": "string"}})
def _tells_log_probs(name: str, value: object) -> bool:
    """Read what a response should have beside its items. Nothing here has what the other names ask
    for.
    """
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise InvalidParameter(name, "a list of strings", value)

    return LOG_PROBS in value


RESPONSES = ParameterTable(
    {name: CHAT[name] for name in AS_CHATS}
    | TOOLS
    | named(
        Parameter(
            "input",
            anything,
            "A text, or the items of the conversation.",
            fields=CHAT["messages"].fields,
        ),
        Parameter("instructions", text, "What the model is told before the conversation."),
    )
    | {"max_output_tokens": ROWS["max_new_tokens"]}
    | named(
        Parameter("metadata", an_object, "Given back as it is."),
        Parameter("text", an_object, "The `format` that the answer must have."),
        Parameter(
            "truncation", choice(("disabled",)), "A conversation that is too long is refused."
        ),
        Parameter(
            "top_logprobs",
            integer(0, MAX_LOG_PROBS),
            "How many alternatives to each token of a text are told, with log-probs.",
            fields=("num_top_log_probs",),
        ),
    )
    | {
        "include": Parameter(
            "logprobs",
            _tells_log_probs,
            f"With `{LOG_PROBS}` texts have log-probs.",
            (False,),
            ("return_log_probs",),
        )
    },
    hidden=hidden(CANNOT_RESPOND, SILENT),
)


def parse(message: Message[OpenAIFormat]) -> Parsed[OpenAIFormat]:
    ignored: list[str] = []
    given = {"max_new_tokens": None} | RESPONSES.read(message.fields, ignored)
    RESPONSES.check_together(given)
    given["logprobs"] = given.get("logprobs", False) or given.get("top_logprobs", 0) > 0
    messages = _messages(given)
    tools = flat_tools(given.get("tools"), kind="function", schema="parameters", ignored=ignored)
    choice = tool_choice(given.get("tool_choice"), tools, is_flat=True)
    guide = _asked_guide(given)
    fill_in(given, RESPONSES, message)
    settings = _defaults(message) | _settings(message.fields)
    format = replace(message.format, state=ResponseState(settings))
    return chat_request(given, format, messages, tools, choice, guide, ignored)


def _defaults(message: Message[OpenAIFormat]) -> dict[str, Any]:
    """Return the model's defaults for the settings that a response repeats."""
    defaults = message.generation_defaults
    told = defaults.values | {"max_output_tokens": defaults.max_new_tokens}
    return {name: told[name] for name in SETTINGS.keys() & told.keys()}


def _asked_guide(given: ParameterValues) -> AskedGuide:
    """Return the guide of `text.format`, or of the fields by which chats ask for one."""
    of_text = guide_of_format(
        "text.format", given.get("text", {}).get("format") or {"type": "text"}
    )
    of_chats = asked_guide(given)
    if of_text[0] is None:
        return of_chats

    if of_chats[0] is not None:
        raise InvalidParameter(of_chats[1][CONTRACT_NAME], "left out beside text.format", "both")

    return of_text


def _settings(fields: ParameterValues) -> dict[str, Any]:
    """Return the settings that a response repeats, with null for what they leave out. Raises
    InvalidParameter.
    """
    settings = {name: fields[name] for name in SETTINGS if fields.get(name) is not None}
    for name, value in settings.items():
        check_levels(name, {"response": {name: value}})  # as an event shows it

    unsaid = {"description": None, "parameters": None, "strict": None}
    tools = (tool for tool in settings.get("tools", []) if tool.get("type") in ("function", None))
    settings["tools"] = [unsaid | tool for tool in tools]
    settings["text"] = SETTINGS["text"] | {
        "format": settings.get("text", {}).get("format") or {"type": "text"}
    }
    if "reasoning" in settings:
        settings["reasoning"] = {
            name: settings["reasoning"].get(name) for name in ("effort", "summary")
        }

    return settings


def _messages(given: ParameterValues) -> list[dict[str, Any]]:
    items = given.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]

    if not isinstance(items, list) or not items:
        raise InvalidParameter("input", "a string or a non-empty list of items", items)

    instructions = given.get("instructions")
    said: list[dict[str, Any]] = (
        [{"role": "system", "content": instructions}] if instructions else []
    )
    for n, value in enumerate(items):
        place = f"input[{n}]"
        item = an_object(place, value)
        kind = item.get("type") or "message"
        if not isinstance(kind, str) or kind not in ITEMS:
            raise Unsupported(
                place,
                f"a conversation has {', '.join(ITEMS)}, given an item of type {shorten(kind)}",
            )

        _join(said, ITEMS[kind](place, item))

    return said


def _join(said: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message, or continue that of the assistant (thoughts, text and calls) or the system.

    Many templates know only one message of the system, at the start.
    """
    last = said[-1] if said else {"role": ""}
    if last["role"] != message["role"] or last["role"] not in ("assistant", "system"):
        said.append(message)
        return

    for name in ("content", "reasoning_content"):
        if texts := [each[name] for each in (last, message) if each.get(name)]:
            last[name] = "\n".join(texts)

    if "tool_calls" in message:
        last["tool_calls"] = last.get("tool_calls", []) + message["tool_calls"]


def _message(place: str, item: dict[str, Any]) -> dict[str, Any]:
    role = ROLES[read_role(f"{place}.role", item.get("role"))]
    return {
        "role": role,
        "content": content(f"{place}.content", item.get("content"), has_images=role == "user"),
    }


def _thought(place: str, item: dict[str, Any]) -> dict[str, Any]:
    """Read thoughts as they were told, else their summary. What only another server can decrypt has
    no effect.
    """
    said = content(
        place, item.get("content") or item.get("summary"), is_needed=False, has_images=False
    )
    return {"role": "assistant", "content": "", **({"reasoning_content": said} if said else {})}


def _call(place: str, item: dict[str, Any]) -> dict[str, Any]:
    call_id, name = (text(f"{place}.{key}", item.get(key)) for key in ("call_id", "name"))
    arguments = parsed_arguments(text(f"{place}.arguments", item.get("arguments")))
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(place: str, item: dict[str, Any]) -> dict[str, Any]:
    said = content(f"{place}.output", item.get("output"))
    return {
        "role": "tool",
        "content": said,
        "tool_call_id": text(f"{place}.call_id", item.get("call_id")),
    }


ITEMS: dict[str, Callable[[str, dict[str, Any]], dict[str, Any]]] = {
    "message": _message,
    "reasoning": _thought,
    "function_call": _call,
    "function_call_output": _result,
}
