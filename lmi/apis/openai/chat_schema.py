"""The schema of chat completions: `{"model": "m", "messages": [{"role": "user", "content":
"Hello"}]}`.

Messages are passed to the chat template in the form that templates expect: text as one string,
`developer` as `system`, and the arguments of earlier calls as objects.
"""

import binascii
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import orjson

from lmi.apis.base.parameters import Parameter, ParameterTable, ParameterValues, named
from lmi.apis.base.readers import (
    Message,
    Parsed,
    an_object,
    anything,
    boolean,
    check_levels,
    check_size,
    choice,
    integer,
    refused,
    takes,
    text,
)
from lmi.apis.guides.fields import AskedGuide, asked_guide
from lmi.apis.openai import schema
from lmi.apis.openai.answer_format import HARMONY, OpenAIFormat
from lmi.apis.openai.fields import CANNOT, WITHOUT_EFFECT, hidden
from lmi.apis.openai.shared_parameters import SHARED
from lmi.apis.openai.tools import (
    TOOLS,
    ToolChoice,
    Tools,
    call_guide,
    nested_tools,
    tool_call_form,
    tool_choice,
)
from lmi.errors import InvalidParameter, Unsupported, shorten
from lmi.types import Chat, Image

# The last four are those of Responses.
TEXT_PARTS = (
    "text",
    "refusal",
    "input_text",
    "output_text",
    "reasoning_text",
    "summary_text",
)
IMAGE_PARTS = ("image_url", "input_image", "image")
MEDIA_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
# The beginnings of files of these types.
BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"RIFF")
FETCHES_NOTHING = (
    "this server fetches no image: send the file itself in base64 (data:image/png;base64,…)"
)
# So many characters of a URL stand in errors.
MAX_SHOWN = 100
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# A template writes a role beside its marks, so a role can spell none of them.
OTHER_ROLE = re.compile("[A-Za-z0-9_.-]{1,64}")
ROLE_RULE = (
    f"one of {', '.join(ROLES)}, or the chat template's own, of 1 to 64 letters, digits, _ . and -"
)
read_role = choice(ROLES)
read_media_type = choice(MEDIA_TYPES)
THINKING = ("enabled", "adaptive", "between_tools", "disabled")
read_kind_of_thinking = choice(THINKING)


@takes({"type": "object", "required": ["type"], "properties": {"type": {"enum": list(THINKING)}}})
def read_thinking(name: str, value: object) -> bool:
    """Read whether the model may think. `budget_tokens` and `display` have no effect."""
    kind: str = read_kind_of_thinking(f"{name}.type", an_object(name, value).get("type"))
    return kind != "disabled"


def read_effort(name: str, value: object) -> str | None:
    """Return the `effort` of an object, whose other fields have no effect."""
    effort = an_object(name, value).get("effort")
    return None if effort is None else str(text(f"{name}.effort", effort))


CANNOT_CHAT = CANNOT | {
    "functions": "it is called tools now",
    "function_call": "it is called tool_choice now",
    "audio": "models here write text",
    "web_search_options": "nothing here searches",
    "echo": "an answer is a message of its own",
    "chat_template": "the server has its own (option.chat_template)",
    "documents": "templates are given messages and tools alone",
}
# These have no effect where an API has no thoughts.
OF_THOUGHTS = ("include_reasoning", "separate_reasoning")
SILENT = [name for name in WITHOUT_EFFECT if name not in OF_THOUGHTS]
CHAT = ParameterTable(
    SHARED
    | TOOLS
    | named(
        Parameter(
            "messages",
            anything,
            "The conversation so far.",
            fields=("inputs", "input_token_ids", "images"),
        ),
        Parameter(
            "modalities", refused("models here write text alone", ["text"]), "Nothing but `text`."
        ),
        Parameter("max_completion_tokens", integer(1), "The answer ends after so many tokens."),
        Parameter(
            "top_logprobs",
            integer(0, schema.MAX_LOG_PROBS),
            "How many alternatives to each token the answer has; needs `logprobs`.",
            fields=("num_top_log_probs",),
        ),
        Parameter(
            "logprobs",
            boolean,
            "Whether the answer has the log-probs of its tokens.",
            fields=("return_log_probs",),
        ),
        Parameter("parallel_tool_calls", boolean, "Whether an answer may have several calls."),
        Parameter("reasoning_effort", text, "A variable of the chat template."),
        # This and `enable_thinking` are how other servers and clients say it.
        Parameter("thinking", read_thinking, "Whether the chat template lets the model think."),
        # These are vLLM's.
        Parameter(
            "add_generation_prompt", boolean, "Whether the template opens the answer's message."
        ),
        Parameter(
            "continue_final_message",
            boolean,
            "Whether the answer goes on with the last message.",
            (False,),
        ),
        Parameter("chat_template_kwargs", an_object, "Variables of the chat template."),
        Parameter(
            "include_reasoning", boolean, "Whether the answer has the model's thoughts.", (True,)
        ),
        # This is SGLang's.
        Parameter(
            "separate_reasoning", boolean, "Whether thoughts stand apart from the text.", (True,)
        ),
    )
    | {
        "enable_thinking": Parameter(
            "thinking", boolean, "Whether the chat template lets the model think."
        ),
        "reasoning": Parameter(
            "reasoning_effort", read_effort, "Its `effort` is a variable of the chat template."
        ),
    },
    hidden=hidden(CANNOT_CHAT, SILENT),
)


class _Part(msgspec.Struct):
    text: msgspec.Raw = msgspec.Raw()
    # The content of a tool's result, or of an item, in other APIs.
    content: msgspec.Raw = msgspec.Raw()
    output: msgspec.Raw = msgspec.Raw()
    image_url: msgspec.Raw = msgspec.Raw()
    source: msgspec.Raw = msgspec.Raw()
    # An image has a URL, or its data.
    url: msgspec.Raw = msgspec.Raw()
    data: msgspec.Raw = msgspec.Raw()


class _Outline(msgspec.Struct):
    """The part of a body that `_num_texts_bytes` measures."""

    messages: list[_Part] = []
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


def _reasoning(values: ParameterValues, format: OpenAIFormat) -> str | None:
    """Return the form of thoughts that are told apart from the text, None if they stay in it."""
    if format.tool_calls == HARMONY:
        return HARMONY

    return format.reasoning if values.get("separate_reasoning", True) else None


def _num_texts_bytes(body: bytes) -> int:
    outline = msgspec.json.decode(body, type=_Outline)
    texts = [
        outline.system,
        outline.instructions,
        outline.input,
    ]
    for message in outline.messages:
        texts.append(message.content)

    return sum(_num_text_bytes(bytes(text)) for text in texts)


def _num_text_bytes(content: bytes, max_levels: int = 3) -> int:
    """Return the length of a text, or of the texts and images in a list of parts."""
    if content[:1] == b'"':
        return len(content)

    if content[:1] not in (b"[", b"{") or not max_levels:
        return 0

    if content[:1] == b"{":
        content = b"[%b]" % content

    num_bytes = 0
    for part in msgspec.json.decode(content, type=list[_Part]):
        for inner in msgspec.structs.astuple(part):
            num_bytes += _num_text_bytes(bytes(inner), max_levels - 1)

    return num_bytes


read = partial(
    schema.read,
    check=partial(check_size, num_text_bytes=_num_texts_bytes, kind="a chat", texts="the texts"),
)


def parse(message: Message[OpenAIFormat]) -> Parsed[OpenAIFormat]:
    ignored: list[str] = []
    # Without a limit an answer has what the context has room for.
    values = {"max_new_tokens": None} | CHAT.read(message.fields, ignored)
    schema.check_stream_options(values, ignored)
    values["max_new_tokens"] = values.pop("max_completion_tokens", values["max_new_tokens"])

    CHAT.check_together(values)
    if values.get("top_logprobs") and not values.get("logprobs"):
        rule = "given together with logprobs true"
        raise InvalidParameter("top_logprobs", rule, values["top_logprobs"])

    if values.get("continue_final_message") and values.get("add_generation_prompt"):
        rule = "false beside add_generation_prompt true"
        raise InvalidParameter("continue_final_message", rule, True)

    schema.forget_unused(values, CHAT, message.format, ignored)
    fill_in(values, CHAT, message)

    tools = nested_tools(values.get("tools"))
    choice = tool_choice(values.get("tool_choice"), tools)
    messages = [_message(name, value) for name, value in messages_by_place(values)]
    guide = asked_guide(values)
    return chat_request(values, message.format, messages, tools, choice, guide, ignored)


def fill_in(values: dict[str, Any], table: ParameterTable, message: Message[OpenAIFormat]) -> None:
    """Set in `values` the model's defaults where the request is silent: of sampling, and of the
    answer's length.
    """
    schema.fill_in(values, table, message)
    if values["max_new_tokens"] is None:
        values["max_new_tokens"] = message.generation_defaults.max_new_tokens


def messages_by_place(values: ParameterValues) -> list[tuple[str, object]]:
    """Return each message with its place in the request."""
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidParameter("messages", "a non-empty list of messages", messages)

    return [(f"messages[{n}]", message) for n, message in enumerate(messages)]


def chat_request(
    values: ParameterValues,
    format: OpenAIFormat,
    messages: Sequence[Mapping[str, Any]],
    tools: Tools,
    choice: ToolChoice,
    guide: AskedGuide,
    ignored: Sequence[str],
    deferred: Container[str] = (),
) -> Parsed[OpenAIFormat]:
    """Return the request of checked fields, messages and tools, which are in the form that
    templates expect.

    The template does not get the tools that are `deferred`.
    """
    format = replace(
        schema.format_of(values, format),
        has_log_probs=values.get("logprobs", False),
        function=choice.function,
        is_forced=choice.is_forced,
        tool_calls=tool_call_form(choice, format.tool_calls),
        reasoning=_reasoning(values, format),
        has_thoughts=values.get("include_reasoning", True),
        tools=tools,
    )

    if choice.is_forced:
        params = call_guide(choice, tools, values.get("parallel_tool_calls", True))
        guide = AskedGuide(params, "tool_choice")

    # A guide holds from the first token on, so the answer begins with no thought.
    if guide.params is not None:
        format = replace(format, reasoning=None)

    # Some models have the marks of calls and thoughts as special tokens.
    if not choice.is_forced and (format.tool_calls or format.reasoning):
        values = {"skip_special_tokens": False, **values}

    chat = _chat(values, messages, _tools_of_template(tools, choice, deferred))
    request = schema.openai_request(
        values,
        format,
        chat=chat,
        num_top_log_probs=values.get("top_logprobs") or None,
        needs_log_probs=format.has_log_probs,
        guided_decoding=guide.params,
    )

    field_names = guide.field_names
    for n, image in enumerate(chat.images):
        field_names[f"images[{n}]"] = image.place

    return Parsed((request,), replace(format, field_names=field_names), ignored)


def _tools_of_template(
    tools: Tools, choice: ToolChoice, deferred: Container[str]
) -> list[dict[str, Any]] | None:
    if choice.mode == "none":
        return None

    return [tool for name, tool in tools.items() if name not in deferred]


def _chat(
    values: ParameterValues,
    messages: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None,
) -> Chat:
    variables = {}
    if "reasoning_effort" in values:
        variables["reasoning_effort"] = values["reasoning_effort"]

    if "thinking" in values:
        variables["enable_thinking"] = values["thinking"]

    is_continued = values.get("continue_final_message", False)
    return Chat(
        messages=messages,
        tools=tools,
        variables={**variables, **values.get("chat_template_kwargs", {})},
        add_generation_prompt=values.get("add_generation_prompt", not is_continued),
        continue_final_message=is_continued,
    )


def _role(name: str, value: object) -> str:
    """Read a role: one that every model has, or one of the template's own, which refuses those that
    it does not know.
    """
    if not isinstance(value, str) or not (value in ROLES or OTHER_ROLE.fullmatch(value)):
        raise InvalidParameter(name, ROLE_RULE, value)

    return value


def _message(name: str, value: object) -> dict[str, Any]:
    """Return a message as templates expect it. What is empty is left out, as clients dump whole
    objects, and templates ask only whether a message has a field.
    """
    fields = an_object(name, value)
    role = _role(f"{name}.role", fields.get("role"))
    message: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": content(
            f"{name}.content",
            fields.get("content"),
            is_needed=role != "assistant",
            has_images=role in ("user", "tool"),
        ),
    }

    # These two are passed to templates unchanged.
    for key in ("name", "tool_call_id"):
        if fields.get(key) is not None and text(f"{name}.{key}", fields[key]):
            message[key] = fields[key]

    thought = _past_thought(name, fields)
    if thought:
        message["reasoning_content"] = thought

    if fields.get("tool_calls") is not None:
        calls = _past_calls(f"{name}.tool_calls", fields["tool_calls"])
        if calls:
            message["tool_calls"] = calls

    return message


def _past_thought(name: str, fields: Mapping[str, object]) -> str:
    """Return the thoughts of an earlier answer, which stand under either name, or under both if all
    are given back.
    """
    thoughts = []
    for key in ("reasoning", "reasoning_content"):
        if fields.get(key) is not None:
            thoughts.append(str(text(f"{name}.{key}", fields[key])))

    return next(filter(None, thoughts), "")


def content(
    name: str, value: object, *, is_needed: bool = True, has_images: bool = True
) -> str | list[str | Image]:
    """Read a text, or a list of parts, which may be images where the message may have them."""
    if isinstance(value, str):
        return value

    if value is None and not is_needed:
        return ""

    if not isinstance(value, list):
        raise InvalidParameter(name, "a string or a list of text parts", value)

    parts: list[str | Image] = []
    for n, part_value in enumerate(value):
        place = f"{name}[{n}]"
        part = an_object(place, part_value)
        if has_images and part.get("type") in IMAGE_PARTS:
            parts.append(read_image(place, part))
        else:
            parts.append(_text_part(place, part))

    return joined(parts)


def joined(parts: Sequence[str | Image]) -> str | list[str | Image]:
    """Return the content of a message: its texts, which newlines join, or all parts if images are
    among them.
    """
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else list(parts)


def _text_part(name: str, part: dict[str, Any]) -> str:
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise Unsupported(name, f"messages are text alone, given a part of type {shorten(kind)}")

    field = "refusal" if kind == "refusal" else "text"
    return str(text(f"{name}.{field}", part.get(field)))


def read_image(place: str, part: dict[str, Any]) -> Image:
    """Return the image of a part, whose type is one of IMAGE_PARTS. Raises InvalidParameter or
    Unsupported.
    """
    if part["type"] == "image":
        return Image(_source_bytes(f"{place}.source", part.get("source")), place, "image")

    if part.get("file_id") is not None:
        raise Unsupported(f"{place}.file_id", "no files are stored here")

    name = f"{place}.image_url"
    url = part.get("image_url")
    if isinstance(url, dict):
        name = f"{name}.url"
        url = url.get("url")

    return Image(_url_bytes(name, url), place, part["type"])


def _source_bytes(name: str, value: object) -> bytes:
    """Return the file in a `source`, which is how Anthropic's API has images."""
    source = an_object(name, value)
    if source.get("type") != "base64":
        reason = f"{FETCHES_NOTHING}, given {shorten(source.get('type'))}"
        raise Unsupported(f"{name}.type", reason)

    read_media_type(f"{name}.media_type", source.get("media_type"))
    return _image_bytes(f"{name}.data", text(f"{name}.data", source.get("data")))


def _url_bytes(name: str, url: object) -> bytes:
    """Return the file in a data URL."""
    if not isinstance(url, str):
        raise InvalidParameter(name, "a data URL", url)

    head, _, data = url.partition(",")
    if not head.startswith("data:"):
        raise Unsupported(name, f"{FETCHES_NOTHING}, given {shorten(url[:MAX_SHOWN])}")

    media_type, _, encoding = head.removeprefix("data:").partition(";")
    if encoding != "base64" or media_type not in MEDIA_TYPES:
        rule = f"a data URL of one of {', '.join(MEDIA_TYPES)} in base64"
        raise InvalidParameter(name, rule, head[:MAX_SHOWN])

    return _image_bytes(name, data)


def _image_bytes(name: str, data: str) -> bytes:
    try:
        file = binascii.a2b_base64(data, strict_mode=True)
    except ValueError as error:
        # Text that is not ASCII raises one too.
        raise InvalidParameter(name, f"base64 ({error})", data[-MAX_SHOWN:]) from None

    if not file.startswith(BEGINNINGS):
        rule = f"a file of one of {', '.join(MEDIA_TYPES)}"
        raise InvalidParameter(name, rule, file[:8].hex(" "))

    return file


def _past_calls(name: str, value: object) -> list[dict[str, Any]]:
    """Read the calls of an earlier answer. The wire has their arguments as text, but templates
    expect objects.
    """
    if not isinstance(value, list):
        raise InvalidParameter(name, "a list of calls", value)

    calls = []
    for n, call_value in enumerate(value):
        place = f"{name}[{n}]"
        call = an_object(place, call_value)
        check_levels(place, call)
        function = an_object(f"{place}.function", call.get("function"))
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = parsed_arguments(arguments)

        calls.append(call | {"function": function | {"arguments": arguments}})

    return calls


def parsed_arguments(arguments: str) -> Any:
    """Return the arguments as an object if templates can walk through it, else as they are.

    They cannot where it is no JSON, or nested too deeply to be written in a message or an answer.
    """
    try:
        value = orjson.loads(arguments or "{}")
        orjson.dumps([[[[value]]]])
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return arguments

    return value if isinstance(value, dict) else arguments
