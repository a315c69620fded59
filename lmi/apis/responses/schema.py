"""The schema of OpenAI's Responses: `{"model": "m", "input": "Hello"}`, where input may be a list
of items.

Nothing is kept here, so a request holds the whole conversation. Agents also offer tools of OpenAI's
own servers, whatever they are told: those are left out, and a response repeats only the tools that
the model knows of. Sources: the types of OpenAI's client, and the Open Responses specification.
"""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from lmi.apis.base.body import Message, Parsed
from lmi.apis.base.parameters import ROWS, Parameter, ParameterTable, ParameterValues, named
from lmi.apis.base.readers import an_object, anything, check_levels, choice, integer, takes, text
from lmi.apis.guides.fields import AskedGuide, asked_guide, guide_of_format
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.apis.openai.chat_content import content
from lmi.apis.openai.chat_messages import parsed_arguments
from lmi.apis.openai.chat_schema import CHAT, chat_request, fill_in
from lmi.apis.openai.fields import CANNOT, WITHOUT_EFFECT, hidden
from lmi.apis.openai.schema import MAX_LOG_PROBS
from lmi.apis.openai.tools import TOOLS, flat_tools, tool_choice
from lmi.apis.responses.state import DEFAULT_SETTINGS, PLAIN_TEXT, ResponseState
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
AS_CHATS = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "cache_salt",
    "priority",
    "prompt_cache_key",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "no_stop_trim",
    "ignore_eos",
    "min_tokens",
    "bad_words",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "regex",
    "ebnf",
    "grammar",
    "json_schema",
    "structured_outputs",
    "logits_post_processor_name",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "enable_thinking",
    "thinking",
    "reasoning",
)
# The role in the template for each role of an item.
ROLES = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}
read_role = choice(tuple(ROLES))


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
    """Check the fields of a response, and return its request."""
    ignored: list[str] = []
    values = {"max_new_tokens": None} | RESPONSES.read(message.fields, ignored)
    RESPONSES.check_together(values)
    # Alternatives have log-probs, also where `include` asks for none.
    if values.get("top_logprobs", 0) > 0:
        values["logprobs"] = True

    values.setdefault("logprobs", False)

    messages = _conversation(values)
    tools = flat_tools(values.get("tools"), kind="function", schema="parameters", ignored=ignored)
    chosen_tool = tool_choice(values.get("tool_choice"), tools, is_flat=True)
    guide = _asked_guide(values)
    fill_in(values, RESPONSES, message)

    settings = _model_defaults(message) | _repeated_settings(message.fields)
    format = replace(message.format, state=ResponseState(settings))
    return chat_request(values, format, messages, tools, chosen_tool, guide, ignored)


def _model_defaults(message: Message[OpenAIFormat]) -> dict[str, Any]:
    """Return the model's defaults for the settings that a response repeats."""
    defaults = message.generation_defaults
    values = defaults.values | {"max_output_tokens": defaults.max_new_tokens}
    return {name: values[name] for name in DEFAULT_SETTINGS.keys() & values.keys()}


def _asked_guide(values: ParameterValues) -> AskedGuide:
    """Return the guide of `text.format`, or of the fields by which chats ask for one."""
    format = values.get("text", {}).get("format") or PLAIN_TEXT
    guide_of_text = guide_of_format("text.format", format)
    guide_of_chats = asked_guide(values)
    if guide_of_text.params is None:
        return guide_of_chats

    if guide_of_chats.field is not None:
        raise InvalidParameter(guide_of_chats.field, "left out beside text.format", "both")

    return guide_of_text


def _repeated_settings(fields: ParameterValues) -> dict[str, Any]:
    """Return the settings that a response repeats, with null for what they leave out. Raises
    InvalidParameter.
    """
    settings = {name: fields[name] for name in DEFAULT_SETTINGS if fields.get(name) is not None}
    for name, value in settings.items():
        # An event shows the value at this depth.
        check_levels(name, {"response": {name: value}})

    left_out = {"description": None, "parameters": None, "strict": None}
    functions = []
    for tool in settings.get("tools", []):
        if tool.get("type") in ("function", None):
            functions.append(left_out | tool)

    settings["tools"] = functions

    format = settings.get("text", {}).get("format") or PLAIN_TEXT
    settings["text"] = DEFAULT_SETTINGS["text"] | {"format": format}

    reasoning = settings.get("reasoning")
    if reasoning is not None:
        settings["reasoning"] = {
            "effort": reasoning.get("effort"),
            "summary": reasoning.get("summary"),
        }

    return settings


def _conversation(values: ParameterValues) -> list[dict[str, Any]]:
    """Return the messages that `instructions` and the items of `input` are for the template. Raises
    InvalidParameter or Unsupported.
    """
    items = values.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]

    if not isinstance(items, list) or not items:
        raise InvalidParameter("input", "a string or a non-empty list of items", items)

    messages: list[dict[str, Any]] = []
    instructions = values.get("instructions")
    if instructions:
        messages.append({"role": "system", "content": instructions})

    for n, value in enumerate(items):
        place = f"input[{n}]"
        fields = an_object(place, value)
        kind = fields.get("type") or "message"
        if not isinstance(kind, str) or kind not in ITEMS:
            reason = f"a conversation has {', '.join(ITEMS)}, given an item of type {shorten(kind)}"
            raise Unsupported(place, reason)

        _join(messages, ITEMS[kind](place, fields))

    return messages


def _join(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message, or continue that of the assistant (thoughts, text and calls) or the system.

    Many templates know only one message of the system, at the start.
    """
    last = messages[-1] if messages else {"role": ""}
    if last["role"] != message["role"] or last["role"] not in ("assistant", "system"):
        messages.append(message)
        return

    for name in ("content", "reasoning_content"):
        pieces = filter(None, (last.get(name), message.get(name)))
        joined = "\n".join(pieces)
        if joined:
            last[name] = joined

    if "tool_calls" in message:
        last["tool_calls"] = last.get("tool_calls", []) + message["tool_calls"]


def _message(place: str, fields: dict[str, Any]) -> dict[str, Any]:
    role = ROLES[read_role(f"{place}.role", fields.get("role"))]
    text_or_parts = content(f"{place}.content", fields.get("content"), has_images=role == "user")
    return {"role": role, "content": text_or_parts}


def _thought(place: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Read thoughts, or their summary if they are left out. Thoughts that only another server can
    decrypt have no effect.
    """
    value = fields.get("content") or fields.get("summary")
    thought = content(place, value, is_needed=False, has_images=False)
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if thought:
        message["reasoning_content"] = thought

    return message


def _call(place: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Read a call of an earlier answer."""
    call_id = text(f"{place}.call_id", fields.get("call_id"))
    name = text(f"{place}.name", fields.get("name"))
    arguments = text(f"{place}.arguments", fields.get("arguments"))

    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": parsed_arguments(arguments)},
    }
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(place: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Read the result of a call."""
    output = content(f"{place}.output", fields.get("output"))
    call_id = text(f"{place}.call_id", fields.get("call_id"))
    return {"role": "tool", "content": output, "tool_call_id": call_id}


ITEMS: dict[str, Callable[[str, dict[str, Any]], dict[str, Any]]] = {
    "message": _message,
    "reasoning": _thought,
    "function_call": _call,
    "function_call_output": _result,
}
