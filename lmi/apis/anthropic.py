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
from lmi.apis.base.readers import Message, Parsed, boolean, choice, text
from lmi.apis.guides import AskedGuide, an_object, check_levels, guide_of_format
from lmi.apis.openai import chat_schema
from lmi.apis.openai.calls import AnswerPart, Arguments, Text, Thought, ToolCall
from lmi.apis.openai.chat_formatter import BlockStream, named_event
from lmi.apis.openai.fields import CANNOT, WITHOUT_EFFECT, hidden
from lmi.apis.openai.schema import SHARED, TOOLS, OpenAIFormat, anything, default_format
from lmi.apis.openai.tools import ToolChoice, Tools, flat_tools, function_choice, mode_choice
from lmi.description.parts import (
    WAITING,
    ApiDescription,
    Form,
    Schema,
    about_defaults,
    array,
    asked,
    content,
    either,
    or_null,
    struct,
    taken,
)
from lmi.errors import InvalidParameter, Unsupported, shorten
from lmi.settings.config import Config
from lmi.types import AnswerEnd, Delta

CHOICES = {
    "auto": "auto",
    "any": "required",
    "none": "none",
    "tool": "function",
}  # our mode of each
read_mode = choice(tuple(CHOICES))
read_format_type = choice(("json_schema",))
CANNOT_ANSWER = {  # further fields are those of the servers that have this API too
    **CANNOT,
    "mcp_servers": "nothing here calls other servers",
    "container": "nothing here runs code",
    "compaction": "no conversation is shortened here",
    "response_format": "it is called output_config.format",
    "stop": "it is called stop_sequences",
}
SILENT = (
    *WITHOUT_EFFECT,
    "betas",  # of the client's own; what they switch on is asked for by other fields
    "billing_policy",
    "cache_control",  # prompts share what is cached anyway
    "context_management",  # a conversation that is too long is refused, not shortened
    "diagnostics",
    "fallback_credit_token",
    "fallbacks",  # other models, for a request that this one declines: it declines none
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
        name: SHARED[name]
        for name in "model stream max_tokens temperature top_p top_k cache_salt priority".split()
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
    given = {"max_new_tokens": None} | MESSAGES.read(message.fields, ignored)
    tools = flat_tools(given.get("tools"), kind="custom", schema="input_schema")
    deferred = {
        tool["name"] for tool in given.get("tools") or () if tool.get("defer_loading") is True
    }
    messages = _messages(given, {name: tools[name] for name in deferred})
    if not is_counted and given["max_new_tokens"] is None:
        raise InvalidParameter("max_tokens", "an integer of at least 1", None)

    if not is_counted and messages[-1]["role"] == "assistant":
        raise Unsupported(
            "messages",
            "an answer begins a message of its own, so the last one cannot be the assistant's",
        )

    choice = _tool_choice(given, tools)
    guide = _read_output_config(given)
    chat_schema.fill_in(given, MESSAGES, message)
    return chat_schema.chat_request(
        given, message.format, messages, tools, choice, guide, ignored, deferred
    )


def _tool_choice(given: dict[str, Any], tools: Tools) -> ToolChoice:
    wanted = an_object("tool_choice", given.get("tool_choice") or {"type": "auto"})
    mode = CHOICES[read_mode("tool_choice.type", wanted.get("type"))]
    is_single = boolean(
        "tool_choice.disable_parallel_tool_use", wanted.get("disable_parallel_tool_use") or False
    )
    given["parallel_tool_calls"] = not is_single
    if mode == "function":
        return function_choice("tool_choice.name", wanted.get("name"), tools)

    return mode_choice(mode, tools)


def _read_output_config(given: dict[str, Any]) -> AskedGuide:
    """Return the guide that the fields ask for. The `effort` is passed to the template."""
    config = given.get("output_config", {})
    if config.get("effort") is not None:
        given["reasoning_effort"] = text("output_config.effort", config["effort"])

    asked = {
        "output_config.format": config.get("format"),
        "output_format": given.get("output_format"),
    }
    formats = {name: value for name, value in asked.items() if value is not None}
    if len(formats) > 1:
        raise InvalidParameter("output_format", "left out beside output_config.format", "both")

    for name, value in formats.items():
        return guide_of_format(name, value, read_format_type)

    return None, {}


def _messages(given: ParameterValues, deferred: Tools) -> list[dict[str, Any]]:
    messages = chat_schema.listed_messages(given)
    system = _system(given.get("system"))
    said = [{"role": "system", "content": system}] if system else []
    for name, message in messages:
        said += _read_message(name, an_object(name, message), deferred)

    return said


def _system(value: object) -> object:
    """Read the system prompt, and leave out the blocks that only Anthropic's billing reads."""
    said = chat_schema.content("system", value, is_needed=False, has_images=False)
    if not isinstance(value, list):
        return said

    kept = [block for block in value if not str(block.get("text")).startswith(BILLING)]
    return chat_schema.content("system", kept, has_images=False)


def _read_message(name: str, message: dict[str, Any], deferred: Tools) -> list[dict[str, Any]]:
    """Return the results of tools in a message, and the rest of it. Take what is described from
    `deferred`.
    """
    role = read_role(f"{name}.role", message.get("role"))
    said = message.get("content")
    if isinstance(said, str):
        return [{"role": role, "content": said}]

    if not isinstance(said, list):
        raise InvalidParameter(f"{name}.content", "a string or a list of blocks", said)

    found: dict[str, list[Any]] = {kind: [] for kind in BLOCKS[role]}
    for n, item in enumerate(said):
        place = f"{name}.content[{n}]"
        block = _without_references(place, an_object(place, item), deferred)
        kind = block.get("type")
        if not isinstance(kind, str) or kind not in found:
            raise Unsupported(
                place, f"messages are text alone, given a block of type {shorten(kind)} ({role})"
            )

        found["text" if kind == "image" else kind].append(BLOCKS[role][kind](place, block))

    results, parts, thoughts, calls = (
        found.get(kind, []) for kind in ("tool_result", "text", "thinking", "tool_use")
    )
    rest: dict[str, Any] = {"role": role, "content": chat_schema.joined(parts)}
    rest |= {"tool_calls": calls} if calls else {}
    rest |= {"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {}
    return results if results and not parts else [*results, rest]


def _without_references(place: str, block: dict[str, Any], deferred: Tools) -> dict[str, Any]:
    """Return a block with a text for each reference to a tool: its description, or its name alone
    where it is known.
    """

    def described(n: int, part: object) -> object:
        if not isinstance(part, dict) or part.get("type") != "tool_reference":
            return part

        name = text(f"{place}.content[{n}].tool_name", part.get("tool_name"))
        return {
            "type": "text",
            "text": dumps(deferred.pop(name)).decode() if name in deferred else name,
        }

    said = block.get("content")
    return (
        block | {"content": [described(n, part) for n, part in enumerate(said)]}
        if isinstance(said, list)
        else block
    )


def _said(place: str, block: dict[str, Any]) -> str:
    """Return a text or a thought, which is in the field that the block's type names."""
    field = block["type"]
    return str(text(f"{place}.{field}", block.get(field)))


def _result(place: str, block: dict[str, Any]) -> dict[str, Any]:
    call_id = text(f"{place}.tool_use_id", block.get("tool_use_id"))
    said = chat_schema.content(f"{place}.content", block.get("content"), is_needed=False)
    return {"role": "tool", "content": said, "tool_call_id": call_id}


def _call(place: str, block: dict[str, Any]) -> dict[str, Any]:
    call_id = text(f"{place}.id", block.get("id"))
    name = text(f"{place}.name", block.get("name"))
    arguments = an_object(f"{place}.input", block.get("input"))
    check_levels(f"{place}.input", arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


BLOCKS: dict[str, dict[str, Callable[[str, dict[str, Any]], Any]]] = {  # by role
    "user": {"text": _said, "image": chat_schema.read_image, "tool_result": _result},
    "assistant": {
        "text": _said,
        "thinking": _said,
        "redacted_thinking": lambda place, block: None,  # nobody here can read it
        "tool_use": _call,
    },
    "system": {"text": _said},
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
        self._content: list[dict[str, Any]] = []  # the blocks that have ended

    def _usage(self) -> dict[str, Any]:
        """Return the numbers of tokens. Those of the prompt that were cached count apart."""
        num_prompt_tokens = self._num_prompt_tokens
        num_cached_tokens = self._num_cached_tokens
        if not num_prompt_tokens:  # the answer still waits
            num_prompt_tokens = self._status.num_prompt_tokens
            num_cached_tokens = self._status.num_cached_tokens or 0

        return {
            "input_tokens": num_prompt_tokens - num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached_tokens,
            "output_tokens": self._num_tokens,
        }

    def _message(self, end: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._id, "type": self.kind, "role": "assistant", "model": self._format.model}
        return head | {"content": self._content} | end | {"usage": self._usage()}

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
        if isinstance(part, ToolCall):
            self._block = {
                "type": "tool_use",
                "id": f"toolu_{uuid.uuid4().hex[:24]}",
                "name": part.name,
                "input": {},
            }
        else:
            kind = self.block_types[type(part)]
            self._block = {
                "type": kind,
                kind: "",
                **({"signature": ""} if isinstance(part, Thought) else {}),
            }

        return [
            self._event("content_block_start", index=len(self._content), content_block=self._block)
        ]

    def _grow(self, part: Text | Thought | Arguments) -> bytes:
        kind = self.block_types[type(part)]
        delta = {"type": f"{kind}_delta", kind: part.text}
        if isinstance(part, Arguments):
            delta = {"type": "input_json_delta", "partial_json": part.text}

        return self._event("content_block_delta", index=len(self._content), delta=delta)

    def _close(self, *, is_cut: bool = False) -> list[bytes]:
        """End the block that is open. A call whose arguments are cut has none, those that are no
        object are a text.
        """
        if not self._block:
            return []

        stop = self._event("content_block_stop", index=len(self._content))
        block = self._block
        said = "".join(self._texts)
        if not self.is_streaming and block["type"] != "tool_use":
            block |= {block["type"]: said}
        elif not self.is_streaming:
            value = chat_schema.parsed_arguments(said)
            if isinstance(value, dict):
                block = block | {"input": value}
            elif not is_cut:
                block = {"type": "text", "text": said}

        self._content.append(block)
        return [stop]

    def _end(self, delta: Delta, reason: AnswerEnd) -> tuple[list[bytes], dict[str, Any]]:
        """A call ends the answer, if it is one. The stop string is the one that was found."""
        records = self._close(is_cut=reason is not AnswerEnd.EOS_TOKEN)
        found = delta.stop_reason
        is_called = reason is AnswerEnd.EOS_TOKEN and any(
            block["type"] == "tool_use" for block in self._content
        )
        end = {
            "stop_reason": "tool_use" if is_called else ENDS[reason],
            "stop_sequence": found if isinstance(found, str) else None,
        }
        stop = (
            self._event("message_delta", delta=end, usage=self._usage()),
            self._event("message_stop"),
        )
        return [*records, *stop], self._message(end)

    @classmethod
    def error(cls, error: ErrorFields) -> bytes:
        said: dict[str, Any] = {"type": error.kind, "message": error.message}
        said |= {} if error.details is None else {"details": error.details}
        fields = {"type": "error", "error": said, "request_id": error.request_id}
        return named_event("error", fields) if cls.is_streaming else dumps(fields)


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
TOO_LONG = "prompt is too long: "  # by which agents know that they must shorten a conversation
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
            Row(
                errors.Overloaded, 529
            ),  # its clients know this status, and come back after Retry-After
            Row(errors.GenerationFailed, 500),
        ),
        MESSAGES.wire_names(),
        lambda status: KINDS.get(status, "invalid_request_error" if status < 500 else "api_error"),
    ),
)
COUNT_TOKENS = replace(
    ANTHROPIC, name="anthropic_count", parse=partial(parse, is_counted=True), paths=()
)


def _typed(kind: str, **fields: Form) -> Schema:
    return struct(type={"const": kind}, **fields)


# The description, for /openapi.json.
EXAMPLE = {
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}
SAYS = either(str, [asked({"type": str}, "type")])
FIELDS = taken(MESSAGES) | {
    "max_tokens": {"type": "integer", "minimum": 1},
    "messages": {
        **array(asked({"role": tuple(BLOCKS), "content": SAYS}, "role", "content")),
        "minItems": 1,
    },
    "system": or_null(SAYS),
    "tools": or_null(
        [asked({"name": {"type": "string", "minLength": 1}, "input_schema": dict}, "name")]
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
USAGE = struct(
    **dict.fromkeys(
        ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"),
        int,
    )
)
DELTA = struct(
    *("text", "thinking", "partial_json"),
    type=("text_delta", "thinking_delta", "input_json_delta"),
    **dict.fromkeys(("text", "thinking", "partial_json"), str),
)
SCHEMAS = {
    "AnthropicRequest": asked(FIELDS, "max_tokens", "messages", example=EXAMPLE),
    "AnthropicCount": asked(FIELDS, "messages", example={"messages": EXAMPLE["messages"]}),
    "AnthropicMessage": struct(
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
        struct(
            *WAITING, type={"const": "message_delta"}, delta=struct(**END), usage=USAGE, **WAITING
        ),
        _typed("message_stop"),
    ),
    "AnthropicError": _typed(
        "error", error=struct("details", type=str, message=str, details=dict), request_id=str | None
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
    count = content(struct(input_tokens=int))
    path = "/v1/messages/count_tokens"
    api.infer(path, "Count the tokens of a conversation", count, "AnthropicCount")
    return api
