"""Anthropic's Messages: `{"max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}`.

Blocks become the messages that chat templates expect: the result of a tool is a message of its own,
and thoughts and calls are fields of the assistant's. A tool with `defer_loading` is described where
a result refers to it, and not before: so the prompt grows at its end alone. Source: the types of
Anthropic's client.
"""

import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from orjson import dumps

from lmi import errors
from lmi.apis.base.api import JSON, SSE, Api, ErrorFields, ErrorRules, Forms, Row
from lmi.apis.base.parameters import Parameter, ParameterTable, ParameterValues, named, rows
from lmi.apis.base.readers import (
    Message,
    Parsed,
    an_object,
    anything,
    boolean,
    check_levels,
    choice,
    text,
)
from lmi.apis.guides.fields import NO_GUIDE, AskedGuide, guide_of_format
from lmi.apis.openai import chat_schema
from lmi.apis.openai.answer_format import OpenAIFormat, default_format
from lmi.apis.openai.calls import AnswerPart, Arguments, Text, Thought, ToolCall
from lmi.apis.openai.chat_formatter import BlockStream, named_event
from lmi.apis.openai.fields import CANNOT, WITHOUT_EFFECT, hidden
from lmi.apis.openai.shared_parameters import SHARED
from lmi.apis.openai.tools import TOOLS, ToolChoice, Tools, flat_tools, function_choice, mode_choice
from lmi.description.parts import (
    WAITING,
    ApiDescription,
    Form,
    Schema,
    about_defaults,
    answer_object,
    array,
    content,
    either,
    or_null,
    request_object,
    table_schemas,
)
from lmi.errors import InvalidParameter, Unsupported, shorten
from lmi.settings.config import Config
from lmi.types import AnswerEnd, Delta

# Our mode for each type of a tool choice.
MODES = {
    "auto": "auto",
    "any": "required",
    "none": "none",
    "tool": "function",
}
read_mode = choice(tuple(MODES))
read_format_type = choice(("json_schema",))
# Further fields are those of the servers that have this API too.
CANNOT_ANSWER = {
    **CANNOT,
    "mcp_servers": "nothing here calls other servers",
    "container": "nothing here runs code",
    "compaction": "no conversation is shortened here",
    "response_format": "it is called output_config.format",
    "stop": "it is called stop_sequences",
}
SILENT = (
    *WITHOUT_EFFECT,
    # The client has these for itself: what they switch on is asked for by other fields.
    "betas",
    "billing_policy",
    # Prompts share what is cached anyway.
    "cache_control",
    # A conversation that is too long is refused, not shortened.
    "context_management",
    "diagnostics",
    "fallback_credit_token",
    # Other models answer what this one declines, and it declines nothing.
    "fallbacks",
    "inference_geo",
    "speed",
    "user_profile_id",
    "workspace_id",
)
# Claude Code writes this block in front of its system prompt. It changes with each conversation, in
# some versions with each request, so with it no prompt would begin as an earlier one.
BILLING = "x-anthropic-billing-header:"


class ThreadUnsupported(Unsupported, label="unsupported"):
    """The body has only what is new of a conversation that this server should keep.

    The tool loops of Anthropic's clients begin so, and send the whole conversation once they have
    read THREAD_DETAILS.
    """


THREAD_DETAILS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def _thread(name: str, value: object) -> None:
    raise ThreadUnsupported(name, "nothing is kept here, so messages holds the whole conversation")


MESSAGES = ParameterTable(
    {
        "model": SHARED["model"],
        "stream": SHARED["stream"],
        "max_tokens": SHARED["max_tokens"],
        "temperature": SHARED["temperature"],
        "top_p": SHARED["top_p"],
        "top_k": SHARED["top_k"],
        "cache_salt": SHARED["cache_salt"],
        "priority": SHARED["priority"],
    }
    | rows("stop_sequences")
    | TOOLS
    | named(
        Parameter("system", anything, "What the model is told before the conversation."),
        chat_schema.CHAT["messages"],
        chat_schema.CHAT["thinking"],
        chat_schema.CHAT["chat_template_kwargs"],
        Parameter("output_config", an_object, "The `format` that the answer must have."),
        Parameter(
            "output_format", an_object, "The `format` of `output_config`, by its first name."
        ),
    ),
    hidden=hidden(CANNOT_ANSWER, SILENT) | {"thread": Parameter("thread", _thread)},
)


def parse(message: Message[OpenAIFormat], *, is_counted: bool = False) -> Parsed[OpenAIFormat]:
    """Return the request of a message. With `is_counted` only its prompt counts."""
    ignored: list[str] = []
    values = {"max_new_tokens": None} | MESSAGES.read(message.fields, ignored)

    tools = flat_tools(values.get("tools"), kind="custom", schema="input_schema")
    deferred = set()
    for tool in values.get("tools") or ():
        if tool.get("defer_loading") is True:
            deferred.add(tool["name"])

    messages = _messages(values, {name: tools[name] for name in deferred})
    if not is_counted and values["max_new_tokens"] is None:
        raise InvalidParameter("max_tokens", "an integer of at least 1", None)

    if not is_counted and messages[-1]["role"] == "assistant":
        raise Unsupported(
            "messages",
            "an answer begins a message of its own, so the last one cannot be the assistant's",
        )

    choice = _tool_choice(values, tools)
    guide = _read_output_config(values)
    chat_schema.fill_in(values, MESSAGES, message)
    return chat_schema.chat_request(
        values, message.format, messages, tools, choice, guide, ignored, deferred
    )


def _tool_choice(values: dict[str, Any], tools: Tools) -> ToolChoice:
    """Return the choice. Whether calls may be parallel becomes one of the values."""
    fields = an_object("tool_choice", values.get("tool_choice") or {"type": "auto"})
    mode = MODES[read_mode("tool_choice.type", fields.get("type"))]
    is_single = boolean(
        "tool_choice.disable_parallel_tool_use", fields.get("disable_parallel_tool_use") or False
    )
    values["parallel_tool_calls"] = not is_single
    if mode == "function":
        return function_choice("tool_choice.name", fields.get("name"), tools)

    return mode_choice(mode, tools)


def _read_output_config(values: dict[str, Any]) -> AskedGuide:
    """Return the guide that the fields ask for. The `effort` is passed to the template."""
    config = values.get("output_config", {})
    if config.get("effort") is not None:
        values["reasoning_effort"] = text("output_config.effort", config["effort"])

    format = config.get("format")
    format_by_first_name = values.get("output_format")
    if format is not None and format_by_first_name is not None:
        raise InvalidParameter("output_format", "left out beside output_config.format", "both")

    if format is not None:
        return guide_of_format("output_config.format", format, read_format_type)

    if format_by_first_name is not None:
        return guide_of_format("output_format", format_by_first_name, read_format_type)

    return NO_GUIDE


def _messages(values: ParameterValues, deferred: Tools) -> list[dict[str, Any]]:
    messages_by_place = chat_schema.messages_by_place(values)
    messages: list[dict[str, Any]] = []
    system = _system(values.get("system"))
    if system:
        messages.append({"role": "system", "content": system})

    for name, message in messages_by_place:
        messages += _read_message(name, an_object(name, message), deferred)

    return messages


def _system(value: object) -> object:
    """Read the system prompt, and leave out the blocks that only Anthropic's billing reads."""
    prompt = chat_schema.content("system", value, is_needed=False, has_images=False)
    if not isinstance(value, list):
        return prompt

    blocks = [block for block in value if not str(block.get("text")).startswith(BILLING)]
    return chat_schema.content("system", blocks, has_images=False)


def _read_message(name: str, message: dict[str, Any], deferred: Tools) -> list[dict[str, Any]]:
    """Return a message as templates expect it: each result of a tool is a message of its own. Take
    the tools that it describes from `deferred`.
    """
    role = read_role(f"{name}.role", message.get("role"))
    value = message.get("content")
    if isinstance(value, str):
        return [{"role": role, "content": value}]

    if not isinstance(value, list):
        raise InvalidParameter(f"{name}.content", "a string or a list of blocks", value)

    contents = _read_blocks(f"{name}.content", value, role, deferred)
    results = contents.get("tool_result", [])
    parts = contents["text"]
    if results and not parts:
        return results

    speech: dict[str, Any] = {"role": role, "content": chat_schema.joined(parts)}
    calls = contents.get("tool_use")
    if calls:
        speech["tool_calls"] = calls

    thoughts = contents.get("thinking", [])
    if any(thoughts):
        speech["reasoning_content"] = "\n".join(thoughts)

    return [*results, speech]


def _read_blocks(
    name: str, values: list[object], role: str, deferred: Tools
) -> dict[str, list[Any]]:
    """Return what the blocks of a message hold, by their types. Images stand among the texts."""
    contents: dict[str, list[Any]] = {kind: [] for kind in BLOCKS[role]}
    for n, value in enumerate(values):
        place = f"{name}[{n}]"
        block = _without_references(place, an_object(place, value), deferred)
        kind = block.get("type")
        if not isinstance(kind, str) or kind not in contents:
            raise Unsupported(
                place, f"messages are text alone, given a block of type {shorten(kind)} ({role})"
            )

        block_content = BLOCKS[role][kind](place, block)
        contents["text" if kind == "image" else kind].append(block_content)

    return contents


def _without_references(place: str, block: dict[str, Any], deferred: Tools) -> dict[str, Any]:
    """Return a block with a text for each reference to a tool."""
    parts = block.get("content")
    if not isinstance(parts, list):
        return block

    texts = [
        _without_reference(f"{place}.content[{n}]", part, deferred) for n, part in enumerate(parts)
    ]
    return block | {"content": texts}


def _without_reference(place: str, part: object, deferred: Tools) -> object:
    """Return a part that is no reference, else a text: the description of the tool, or its name
    alone where it has been described.
    """
    if not isinstance(part, dict) or part.get("type") != "tool_reference":
        return part

    name = text(f"{place}.tool_name", part.get("tool_name"))
    if name not in deferred:
        return {"type": "text", "text": name}

    return {"type": "text", "text": dumps(deferred.pop(name)).decode()}


def _text(place: str, block: dict[str, Any]) -> str:
    """Return a text or a thought, which is in the field that the block's type names."""
    field = block["type"]
    return str(text(f"{place}.{field}", block.get(field)))


def _result(place: str, block: dict[str, Any]) -> dict[str, Any]:
    call_id = text(f"{place}.tool_use_id", block.get("tool_use_id"))
    result = chat_schema.content(f"{place}.content", block.get("content"), is_needed=False)
    return {"role": "tool", "content": result, "tool_call_id": call_id}


def _call(place: str, block: dict[str, Any]) -> dict[str, Any]:
    call_id = text(f"{place}.id", block.get("id"))
    name = text(f"{place}.name", block.get("name"))
    arguments = an_object(f"{place}.input", block.get("input"))
    check_levels(f"{place}.input", arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


BLOCKS: dict[str, dict[str, Callable[[str, dict[str, Any]], Any]]] = {
    "user": {"text": _text, "image": chat_schema.read_image, "tool_result": _result},
    "assistant": {
        "text": _text,
        "thinking": _text,
        # Nobody here can read a redacted thought.
        "redacted_thinking": lambda place, block: None,
        "tool_use": _call,
    },
    "system": {"text": _text},
}
read_role = choice(tuple(BLOCKS))
ENDS = {
    AnswerEnd.LENGTH: "max_tokens",
    AnswerEnd.EOS_TOKEN: "end_turn",
    AnswerEnd.STOP_SEQUENCE: "stop_sequence",
}


class MessageStream(BlockStream):
    kind = "message"
    id_prefix = "msg_"
    block_types = {Text: "text", Thought: "thinking", ToolCall: "tool_use", Arguments: "tool_use"}

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._ended_blocks: list[dict[str, Any]] = []

    def _usage(self) -> dict[str, Any]:
        """Return the numbers of tokens. Those of the prompt that were cached count apart."""
        num_prompt_tokens = self._num_prompt_tokens
        num_cached_tokens = self._num_cached_tokens

        # While the answer waits, the engine has told only these.
        if not num_prompt_tokens:
            num_prompt_tokens = self._status.num_prompt_tokens
            num_cached_tokens = self._status.num_cached_tokens or 0

        return {
            "input_tokens": num_prompt_tokens - num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached_tokens,
            "output_tokens": self._num_tokens,
        }

    def _message(self, end: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": self.kind,
            "role": "assistant",
            "model": self._format.model,
            "content": self._ended_blocks,
            **end,
            "usage": self._usage(),
        }

    def _begin(self) -> list[bytes]:
        message = self._message({"stop_reason": None, "stop_sequence": None})
        return [self._event("message_start", message=message), self._event("ping")]

    def _wait(self, fields: dict[str, Any]) -> bytes:
        """Claude Code gives up a request after 300 s of silence. It counts this event, and not
        `ping`.
        """
        nothing = {"stop_reason": None, "stop_sequence": None}
        return self._event("message_delta", delta=nothing, usage=self._usage(), **fields)

    def _open(self, part: AnswerPart) -> list[bytes]:
        kind = self.block_types[type(part)]
        if isinstance(part, ToolCall):
            call_id = f"toolu_{uuid.uuid4().hex[:24]}"
            self._block = {"type": kind, "id": call_id, "name": part.name, "input": {}}
        else:
            self._block = {"type": kind, kind: ""}
            if isinstance(part, Thought):
                self._block["signature"] = ""

        index = len(self._ended_blocks)
        return [self._event("content_block_start", index=index, content_block=self._block)]

    def _grow(self, part: Text | Thought | Arguments) -> bytes:
        kind = self.block_types[type(part)]
        delta = {"type": f"{kind}_delta", kind: part.text}
        if isinstance(part, Arguments):
            delta = {"type": "input_json_delta", "partial_json": part.text}

        return self._event("content_block_delta", index=len(self._ended_blocks), delta=delta)

    def _close(self, *, is_cut: bool = False) -> list[bytes]:
        """End the block that is open. A call whose arguments were cut gets none. A call whose
        arguments are no object becomes a text.
        """
        if not self._block:
            return []

        stop = self._event("content_block_stop", index=len(self._ended_blocks))
        block = self._block
        if not self.is_streaming:
            block = self._whole_block(block, "".join(self._texts), is_cut=is_cut)

        self._ended_blocks.append(block)
        return [stop]

    def _whole_block(self, block: dict[str, Any], text: str, *, is_cut: bool) -> dict[str, Any]:
        kind = block["type"]
        if kind != "tool_use":
            return block | {kind: text}

        value = chat_schema.parsed_arguments(text)
        if isinstance(value, dict):
            return block | {"input": value}

        return block if is_cut else {"type": "text", "text": text}

    def _end(self, delta: Delta, reason: AnswerEnd) -> tuple[list[bytes], dict[str, Any]]:
        """Return the last events and the whole message. An answer with calls that was not cut ends
        for them.
        """
        is_whole = reason is AnswerEnd.EOS_TOKEN
        records = self._close(is_cut=not is_whole)
        has_calls = any(block["type"] == "tool_use" for block in self._ended_blocks)
        stop_reason = "tool_use" if is_whole and has_calls else ENDS[reason]
        stop_string = delta.stop_reason if isinstance(delta.stop_reason, str) else None

        end = {"stop_reason": stop_reason, "stop_sequence": stop_string}
        records.append(self._event("message_delta", delta=end, usage=self._usage()))
        records.append(self._event("message_stop"))
        return records, self._message(end)

    @classmethod
    def error(cls, error: ErrorFields) -> bytes:
        error_object: dict[str, Any] = {"type": error.kind, "message": error.message}
        if error.details is not None:
            error_object["details"] = error.details

        fields = {"type": "error", "error": error_object, "request_id": error.request_id}
        return named_event("error", fields) if cls.is_streaming else dumps(fields)


def _kind_of_status(status: int) -> str:
    default = "invalid_request_error" if status < 500 else "api_error"
    return KINDS.get(status, default)


class MessageWhole(MessageStream):
    media_type = JSON
    is_streaming = False


KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# By these words agents know that they must shorten a conversation.
TOO_LONG = "prompt is too long: "
FORMS = Forms(MessageWhole, MessageStream)
ANTHROPIC: Api[OpenAIFormat] = Api(
    name="anthropic",
    paths=("/v1/messages",),
    default_format=default_format,
    read=chat_schema.read,
    parse=parse,
    formatter=FORMS.formatter,
    errors=ErrorRules(
        FORMS.write_error,
        (
            Row(ThreadUnsupported, 400, details=THREAD_DETAILS),
            Row(errors.UnknownModel, 404),
            Row(errors.UnknownAdapter, 404),
            Row(errors.PromptTooLong, 400, opening=TOO_LONG),
            # Its clients know this status, and come back after Retry-After.
            Row(errors.Overloaded, 529),
            Row(errors.GenerationFailed, 500),
        ),
        MESSAGES.wire_names(),
        _kind_of_status,
    ),
)
COUNT_TOKENS = replace(
    ANTHROPIC, name="anthropic_count", parse=partial(parse, is_counted=True), paths=()
)


def _typed(kind: str, **fields: Form) -> Schema:
    return answer_object(type={"const": kind}, **fields)


# The description, for /openapi.json.
EXAMPLE = {
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}
SAYS = either(str, [request_object({"type": str}, required=("type",))])
FIELDS = table_schemas(MESSAGES) | {
    "max_tokens": {"type": "integer", "minimum": 1},
    "messages": {
        **array(
            request_object(
                {"role": tuple(BLOCKS), "content": SAYS},
                required=("role", "content"),
            )
        ),
        "minItems": 1,
    },
    "system": or_null(SAYS),
    "tools": or_null(
        [
            request_object(
                {"name": {"type": "string", "minLength": 1}, "input_schema": dict},
                required=("name",),
            )
        ]
    ),
}
SAID = either(
    _typed("text", text=str),
    _typed("thinking", thinking=str, signature=str),
    _typed("tool_use", id=str, name=str, input=dict),
)
END: dict[str, Form] = {
    "stop_reason": or_null((*ENDS.values(), "tool_use")),
    "stop_sequence": str | None,
}
USAGE = answer_object(
    input_tokens=int,
    cache_creation_input_tokens=int,
    cache_read_input_tokens=int,
    output_tokens=int,
)
DELTA = answer_object(
    optional=("text", "thinking", "partial_json"),
    type=("text_delta", "thinking_delta", "input_json_delta"),
    text=str,
    thinking=str,
    partial_json=str,
)
SCHEMAS = {
    "AnthropicRequest": request_object(
        FIELDS,
        required=("max_tokens", "messages"),
        example=EXAMPLE,
    ),
    "AnthropicCount": request_object(
        FIELDS, required=("messages",), example={"messages": EXAMPLE["messages"]}
    ),
    "AnthropicMessage": answer_object(
        id=str,
        type={"const": "message"},
        role={"const": "assistant"},
        model=str,
        content=[SAID],
        **END,
        usage=USAGE,
    ),
    "AnthropicEvent": either(
        _typed("message_start", message="AnthropicMessage"),
        _typed("ping"),
        _typed("content_block_start", index=int, content_block=SAID),
        _typed("content_block_delta", index=int, delta=DELTA),
        _typed("content_block_stop", index=int),
        answer_object(
            optional=WAITING,
            type={"const": "message_delta"},
            delta=answer_object(**END),
            usage=USAGE,
            **WAITING,
        ),
        _typed("message_stop"),
    ),
    "AnthropicError": _typed(
        "error",
        error=answer_object(optional=("details",), type=str, message=str, details=dict),
        request_id=str | None,
    ),
}


def describe(config: Config) -> ApiDescription:
    about = "Anthropic's API, with which coding agents work." + about_defaults(config.model)
    rules = [ANTHROPIC.errors]
    api = ApiDescription(
        "Anthropic", about, config.model, SCHEMAS, content("AnthropicError"), rules
    )
    ok = content("AnthropicMessage") | content(either("AnthropicEvent", "AnthropicError"), SSE)
    api.infer("/v1/messages", "Answer a conversation", ok, "AnthropicRequest")
    count = content(answer_object(input_tokens=int))
    path = "/v1/messages/count_tokens"
    api.infer(path, "Count the tokens of a conversation", count, "AnthropicCount")
    return api
