"""The schema of chat completions: `{"model": "m", "messages": [{"role": "user", "content":
"Hello"}]}`, and the steps to a request that Anthropic's API and Responses go through too.
"""

from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from lmi.apis.base.body import Message, Parsed
from lmi.apis.base.parameters import Parameter, ParameterTable, ParameterValues, named
from lmi.apis.base.readers import (
    an_object,
    anything,
    boolean,
    choice,
    integer,
    refused,
    takes,
    text,
)
from lmi.apis.guides.fields import AskedGuide, asked_guide
from lmi.apis.openai import schema
from lmi.apis.openai.answer_format import HARMONY, OpenAIFormat
from lmi.apis.openai.chat_messages import messages_by_place, read_message
from lmi.apis.openai.chat_size import check_chat_size
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
from lmi.errors import InvalidParameter
from lmi.types import Chat

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
# These have no effect where an API has no thoughts, but have one here.
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
        # Other servers and clients have this name, or `enable_thinking`.
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


read = partial(schema.read, check=check_chat_size)


def parse(message: Message[OpenAIFormat]) -> Parsed[OpenAIFormat]:
    """Check the fields of a chat, and return its request."""
    ignored: list[str] = []
    # Without a limit an answer has what the context has room for.
    values = {"max_new_tokens": None} | CHAT.read(message.fields, ignored)
    schema.check_stream_options(values, ignored)
    values["max_new_tokens"] = values.pop("max_completion_tokens", values["max_new_tokens"])

    _check_together(values)
    schema.forget_unused(values, CHAT, message.format, ignored)
    fill_in(values, CHAT, message)

    tools = nested_tools(values.get("tools"))
    choice = tool_choice(values.get("tool_choice"), tools)
    messages = [read_message(name, value) for name, value in messages_by_place(values)]
    guide = asked_guide(values)
    return chat_request(values, message.format, messages, tools, choice, guide, ignored)


def _check_together(values: ParameterValues) -> None:
    """Raise InvalidParameter for fields that contradict each other."""
    CHAT.check_together(values)
    if values.get("top_logprobs") and not values.get("logprobs"):
        rule = "given together with logprobs true"
        raise InvalidParameter("top_logprobs", rule, values["top_logprobs"])

    if values.get("continue_final_message") and values.get("add_generation_prompt"):
        rule = "false beside add_generation_prompt true"
        raise InvalidParameter("continue_final_message", rule, True)


def fill_in(values: dict[str, Any], table: ParameterTable, message: Message[OpenAIFormat]) -> None:
    """Set in `values` the model's defaults of sampling and of the answer's length, where the client
    has written nothing.
    """
    schema.fill_in(values, table, message)
    if values["max_new_tokens"] is None:
        values["max_new_tokens"] = message.generation_defaults.max_new_tokens


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
    """Return the request of a chat, from checked fields. Messages and tools are in the form that
    templates expect. The template does not get the `deferred` tools, named here.
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

    # A guide holds from the first token on, so the answer cannot begin with a thought.
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


def _reasoning(values: ParameterValues, format: OpenAIFormat) -> str | None:
    """Return the form of thoughts that are told apart from the text, or None if they stay in it."""
    if format.tool_calls == HARMONY:
        return HARMONY

    if not values.get("separate_reasoning", True):
        return None

    return format.reasoning


def _tools_of_template(
    tools: Tools, choice: ToolChoice, deferred: Container[str]
) -> list[dict[str, Any]] | None:
    """Return the tools that the template describes, or None if the model may call none."""
    if choice.mode == "none":
        return None

    return [tool for name, tool in tools.items() if name not in deferred]


def _chat(
    values: ParameterValues,
    messages: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None,
) -> Chat:
    """Return what the template gets: messages, tools, and the variables that fields set."""
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
