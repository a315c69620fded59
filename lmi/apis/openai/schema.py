"""The schema of completions, `{"model": "m", "prompt": "Once", "max_tokens": 16}`, and the steps
from a body to its request that chats go through too.

Sampling is on unless `temperature` or `top_p` is 0. A field that would change the answer but is not
supported is refused.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from lmi.apis.base import readers
from lmi.apis.base.body import Message, Parsed, check_values, read_object
from lmi.apis.base.parameters import (
    ROWS,
    SAMPLING,
    SAMPLING_FIELDS,
    Parameter,
    ParameterTable,
    ParameterValues,
    request_of,
    unknown,
)
from lmi.apis.base.readers import anything, boolean, takes, text
from lmi.apis.beams import read_search
from lmi.apis.guides.fields import asked_guide
from lmi.apis.openai.answer_format import OpenAIFormat, default_format
from lmi.apis.openai.fields import CANNOT, hidden
from lmi.apis.openai.shared_parameters import SHARED, STREAM_OPTIONS
from lmi.errors import InvalidParameter, MalformedRequest, Unsupported, shorten
from lmi.settings.config import ModelConfig
from lmi.types import GenerationRequest, OutputFormat

# The default of completions. A chat's is the room in the context.
DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 128
MAX_PROMPT_IDS = 1 << 20
MAX_LOG_PROBS = 20
# Names that the examples of huggingface_hub and TGI send as the model, which only the URL names.
UNNAMED = ("dummy", "tgi")
# The forms that a stream can have.
STREAMS = (OutputFormat.JSONLINES, OutputFormat.SSE)
read_num_log_probs = readers.integer(0, MAX_LOG_PROBS)
read_prompt_ids = readers.token_ids(MAX_PROMPT_IDS)
check_prompts = partial(check_values, max_texts=MAX_PROMPTS)


@takes({"type": ["integer", "boolean"], "minimum": 0, "maximum": MAX_LOG_PROBS})
def read_logprobs(name: str, value: object) -> int | None:
    """Read a number, or true or false, which some clients send as to a chat: false asks for
    none.
    """
    if isinstance(value, bool):
        return 1 if value else None

    return read_num_log_probs(name, value)  # type: ignore[no-any-return]


COMPLETION = ParameterTable(
    SHARED
    | {
        "prompt": Parameter(
            "prompts",
            anything,
            "A text or token ids, or a list of them.",
            fields=("inputs", "input_token_ids"),
        ),
        "max_tokens": replace(ROWS["max_new_tokens"], read=readers.integer(0)),
        "best_of": replace(ROWS["best_of"], off=()),
        "logprobs": Parameter(
            "logprobs",
            read_logprobs,
            "How many alternatives to each token the answer has, with log-probs.",
            fields=("num_top_log_probs", "return_log_probs"),
        ),
        "echo": Parameter(
            "return_full_text", boolean, "Whether the answer begins with the prompt."
        ),
        "suffix": Parameter("suffix", text, "What follows the answer; refused unless it is empty."),
    },
    hidden=hidden(CANNOT),
)


def read(
    body: bytes,
    content_type: str | None,
    model: ModelConfig,
    *,
    check: Callable[[bytes], None] = check_prompts,
    stream_format: OutputFormat | None = None,
) -> Message[OpenAIFormat]:
    """Read a body that passes the `check` of its size. Raises MalformedRequest.

    LMI's own field `adapters` may stand beside the fields of any API of this format. It counts, and
    not `model`, where both name an adapter.

    A stream is server-sent events if `stream_format` is None. Else `output_formatter` says its
    format: that of the body, or else that of the server. Where neither does, it is `stream_format`.
    """
    check(body)
    fields = read_object(body)
    format = default_format(model)

    name = fields.get("model")
    if not isinstance(name, str | None):
        raise MalformedRequest(f"model must be a string, given {shorten(name)}")

    # The server looks up later whether such an adapter is registered.
    if name and name not in UNNAMED and not model.answers_to(name):
        format = replace(format, model=name, adapter=name)

    adapter = readers.adapter("adapters", fields.pop("adapters", None))
    if adapter is not None:
        format = replace(format, model=adapter, adapter=adapter, is_adapter_named=True)

    is_streaming = fields.get("stream")
    if not isinstance(is_streaming, bool | None):
        raise MalformedRequest(f"stream must be true or false, given {shorten(is_streaming)}")

    if is_streaming:
        format = replace(format, output_format=_format_of_stream(fields, model, stream_format))

    return Message(fields, format, generation_defaults=model.generation_defaults)


def _format_of_stream(
    fields: Mapping[str, object], model: ModelConfig, stream_format: OutputFormat | None
) -> OutputFormat:
    """Return the format of a stream as `read` describes it. An `output_formatter` that no stream
    has does not count.
    """
    if stream_format is None:
        return OutputFormat.SSE

    for formatter in (fields.get("output_formatter"), model.output_formatter):
        for format_of_stream in STREAMS:
            if format_of_stream == formatter:
                return format_of_stream

    return stream_format


def parse(message: Message[OpenAIFormat]) -> Parsed[OpenAIFormat]:
    """Check the fields of a completion, and return a request for each of its prompts."""
    ignored: list[str] = []
    values = COMPLETION.read(message.fields, ignored)
    check_stream_options(values, ignored)
    if values.get("suffix"):
        raise Unsupported("suffix", "models here write on from a prompt and fill no gap")

    prompts = prompts_of("prompt", values.get("prompts"), MAX_PROMPTS)
    _check_together(values)
    forget_unused(values, COMPLETION, message.format, ignored)
    fill_in(values, COMPLETION, message)

    guide = asked_guide(values)
    format = replace(
        format_of(values, message.format),
        has_log_probs="logprobs" in values,
        is_answer_wanted=values.get("max_new_tokens") != 0,
    )

    field_names = guide.field_names
    num_top = values.get("logprobs", 0)
    # The prompt stands in the answer, so its tokens have log-probs too.
    if values.get("return_full_text") and format.has_log_probs:
        if format.num_prompt_log_probs is None:
            field_names["num_prompt_log_probs"] = "logprobs"

        values["num_prompt_log_probs"] = max(num_top, format.num_prompt_log_probs or 0)

    has_spare_sequences = values.get("best_of", 1) > format.num_choices
    format = replace(format, field_names=field_names)
    request = openai_request(
        values,
        format,
        max_new_tokens=max(1, values.get("max_new_tokens", DEFAULT_MAX_TOKENS)),
        num_top_log_probs=num_top or None,
        needs_log_probs=format.has_log_probs or has_spare_sequences,
        guided_decoding=guide.params,
    )
    requests = tuple(replace(request, **prompt) for prompt in prompts)
    return Parsed(requests, format, ignored)


def _check_together(values: ParameterValues) -> None:
    """Raise InvalidParameter or Unsupported for fields that contradict each other."""
    COMPLETION.check_together(values)
    is_search = values.get("use_beam_search", False)
    has_spare_sequences = values.get("best_of", 1) > values.get("n", 1)
    if has_spare_sequences and values.get("stream") and not is_search:
        raise Unsupported(
            "best_of", "the best of several is known only at their end, so it cannot be streamed"
        )

    if values.get("max_new_tokens") == 0 and not values.get("return_full_text"):
        raise InvalidParameter("max_tokens", "at least 1 without echo", 0)


def check_stream_options(values: ParameterValues, ignored: list[str]) -> None:
    """Refuse `stream_options` where the answer is not streamed, as OpenAI and vLLM do. Adds a line
    to `ignored` for each unknown name in them.
    """
    options = values.get("stream_options")
    if not options:
        return

    if not values.get("stream"):
        raise InvalidParameter("stream_options", "left out without stream true", options)

    ignored += [f"stream_options.{line}" for line in unknown(options, STREAM_OPTIONS)]


def format_of(values: ParameterValues, format: OpenAIFormat) -> OpenAIFormat:
    """Return the format with the fields that completions and chats have in common."""
    if values.get("stream") and "num_prompt_log_probs" in values:
        raise Unsupported("prompt_logprobs", "a stream has no place for them")

    options = values.get("stream_options", {})
    has_usage = _is_set(options, "include_usage")
    has_running_usage = _is_set(options, "continuous_usage_stats")
    return replace(
        format,
        has_usage=has_usage,
        has_running_usage=has_running_usage and has_usage,
        has_token_ids=values.get("return_token_ids", False),
        num_prompt_log_probs=values.get("num_prompt_log_probs"),
        names_tokens_by_id=values.get("return_tokens_as_token_ids", False),
        num_choices=values.get("n", 1),
    )


def _is_set(options: Mapping[str, object], name: str) -> bool:
    """Return whether an option of a stream is true. Raises InvalidParameter if it is no bool."""
    return bool(boolean(f"stream_options.{name}", options.get(name) or False))


def prompts_of(name: str, value: object, max_prompts: int) -> list[dict[str, Any]]:
    """Read a text, token ids, or a list of these. Returns the fields that each prompt sets in its
    request.
    """
    if not isinstance(value, list) or all(isinstance(token_id, int | float) for token_id in value):
        # It is one prompt, or nothing that can be read.
        return [_prompt(name, value, "a non-empty string, a list of token ids, or a list of such")]

    if len(value) > max_prompts:
        raise InvalidParameter(name, f"a list of at most {max_prompts} prompts", value)

    rule = "a non-empty string or list of token ids"
    return [_prompt(f"{name}[{n}]", prompt, rule) for n, prompt in enumerate(value)]


def _prompt(name: str, value: object, rule: str) -> dict[str, Any]:
    if isinstance(value, str) and value:
        return {"prompt": value}

    if isinstance(value, list) and value:
        return {"prompt_token_ids": read_prompt_ids(name, value)}

    raise InvalidParameter(name, rule, value)


def forget_unused(
    values: dict[str, Any], table: ParameterTable, format: OpenAIFormat, ignored: list[str]
) -> None:
    """Read the fields of a beam search, and drop what has no effect: beside a beam search, or
    because there is none.
    """
    read_search(table, values, is_streamed=format.is_streamed)
    table.drop(values, table.without_effect(values, is_greedy=False), ignored)


def fill_in(values: dict[str, Any], table: ParameterTable, message: Message[OpenAIFormat]) -> None:
    """Set in `values` the model's defaults of sampling, where the client has written nothing.

    A value that means "off" was written too, although it is not in `values`. A beam search has no
    defaults, as in vLLM: nothing is sampled in it, and some engines refuse penalties there.
    """
    if "beam_width" in values:
        return

    names_of_client = table.written(message.fields) | values.keys()
    defaults = {}
    for name, value in message.generation_defaults.values.items():
        may_be_set = name in SAMPLING_FIELDS and name not in names_of_client
        if may_be_set and value not in ROWS[name].off:
            defaults[name] = value

    values.update(defaults)
    values["defaulted"] = frozenset(defaults)


def openai_request(
    values: ParameterValues, format: OpenAIFormat, **api_fields: Any
) -> GenerationRequest:
    """Build a request from the fields that completions and chats share, and `api_fields`. Fields
    that have no effect on greedy decoding are left out silently.
    """
    has_no_choice = values.get("temperature") == 0 or values.get("top_p") == 0
    is_greedy = has_no_choice and "beam_width" not in values
    if is_greedy:
        values = {name: value for name, value in values.items() if name not in SAMPLING}

    return request_of(
        values,
        is_greedy=is_greedy,
        is_streaming=format.is_streamed,
        adapter=format.adapter,
        **api_fields,
    )
