"""What OpenAI's two schemas share, and the schema of completions: `{"model": "m", "prompt": "Once", "max_tokens": 16}`.

Sampling is on unless `temperature` is 0. Names, defaults and bounds: OpenAI's API reference; beside them what vLLM's
server takes too (`top_k`, `min_tokens`, `guided_json` …). Fields of theirs that ask for nothing here (`user`,
`store` …) are taken without a word, unknown ones with a line in the log; what would change the answer and cannot be
done is refused.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lmi.errors import InvalidParameter, MalformedRequest, UnknownModel, Unsupported, shorten
from lmi.executor import (
    MAX_PENALTY,
    MAX_SEED,
    REPETITION_PENALTIES,
    SamplingConfig,
)
from lmi.schemas.common import (
    MAX_STOP_SEQUENCES,
    MAX_WORDS,
    Message,
    Parsed,
    Reader,
    boolean,
    check_values,
    choice,
    integer,
    number,
    read_object,
    strings,
    takes,
    text,
    token_ids,
)
from lmi.schemas.guides import GUIDED, an_object, asked_guide, structured_outputs
from lmi.settings.config import ModelConfig
from lmi.types import Frame, GenerationRequest, OutputFormat

DEFAULT_MAX_TOKENS = 16  # of completions
MAX_SEQUENCES = 16  # of one prompt
MAX_PROMPTS = 128
MAX_PROMPT_IDS = 1 << 20
MAX_TEMPERATURE = 2.0
MAX_BIAS = 100.0
MAX_LOG_PROBS = 20
MAX_TOLERATED = 32  # lines for the log of one request
UNNAMED = ("dummy", "tgi")  # what huggingface_hub and TGI's examples say where the URL alone names the model
STREAMS = (OutputFormat.JSONLINES, OutputFormat.SSE)
GREEDY_HAS_NO = ("top_k", "top_p", "min_p", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIFrame(Frame):
    """What the server's settings have to say of an answer."""

    model: str
    adapters: tuple[str, ...] = ()
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """What an answer's writer must know beside the requests.

    `num_choices` of each prompt's sequences are the answer. `function`: the one that a forced call calls, whose
    arguments the whole text is; `tool_calls`: the form of other calls in the text, `reasoning` the form of thoughts.
    """

    id: str
    created: int  # seconds since 1970
    model: str
    has_usage: bool = False  # a stream's last chunk tells it
    has_log_probs: bool = False
    num_top_log_probs: int = 0
    num_choices: int = 1
    echoes_prompt: bool = False
    is_answer_wanted: bool = True  # False: the prompt alone, for its log-probs
    function: str | None = None
    tool_calls: str | None = None
    reasoning: str | None = None


@takes({"type": ["string", "array"], "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOP_SEQUENCES})
def _stop(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return STOPS(name, [value]) if value else ()
    return STOPS(name, value)  # type: ignore[no-any-return]


@takes({"type": "object", "maxProperties": MAX_WORDS})
def _biases(name: str, value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or len(value) > MAX_WORDS:
        raise InvalidParameter(name, f"an object of at most {MAX_WORDS} token ids and numbers", value)
    biases = []
    for token_id, bias in value.items():
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) < 10):
            raise InvalidParameter(name, "an object whose keys are token ids", token_id)
        biases.append((int(token_id), BIAS(f"{name}.{token_id}", bias)))
    return tuple(biases)


@takes({"type": ["integer", "boolean"], "minimum": 0, "maximum": MAX_LOG_PROBS})
def _logprobs(name: str, value: object) -> int:
    """A number in completions; some clients send true or false as for chat."""
    return int(value) if isinstance(value, bool) else TOP(name, value)


STOPS, BIAS = strings(MAX_STOP_SEQUENCES), number(-MAX_BIAS, MAX_BIAS)
TOP = integer(0, MAX_LOG_PROBS)

SHARED: dict[str, Reader] = {
    "model": text,
    "stream": boolean,
    "stream_options": an_object,
    "n": integer(1, MAX_SEQUENCES),
    "stop": _stop,
    "seed": integer(0, MAX_SEED),
    "temperature": number(0, MAX_TEMPERATURE),
    "top_p": number(0, 1),
    "presence_penalty": number(-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": number(-MAX_PENALTY, MAX_PENALTY),
    "logit_bias": _biases,
    # vLLM's
    "top_k": integer(-1),
    "min_p": number(0, 1),
    "repetition_penalty": number(*REPETITION_PENALTIES),
    "ignore_eos": boolean,
    "min_tokens": integer(0),
    "stop_token_ids": token_ids(MAX_WORDS),
    "bad_words": strings(MAX_WORDS),
    "skip_special_tokens": boolean,
    "spaces_between_special_tokens": boolean,
    "include_stop_str_in_output": boolean,
    "truncate_prompt_tokens": integer(1),
    "structured_outputs": structured_outputs,
    **GUIDED,
    # the LMI schema's, at /invocations
    "output_formatter": choice([format.value for format in OutputFormat]),
}
COMPLETION: dict[str, Reader] = SHARED | {
    "prompt": lambda name, value: value,
    "max_tokens": integer(0),
    "best_of": integer(1, MAX_SEQUENCES),
    "logprobs": _logprobs,
    "echo": boolean,
    "suffix": text,
}
# Fields of OpenAI's and vLLM's that change nothing in an answer from here.
WITHOUT_EFFECT = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention verbosity priority "
    "request_id cache_salt guided_decoding_backend guided_whitespace_pattern return_token_ids "
    "include_reasoning separate_reasoning length_penalty".split()
)
CANNOT: dict[str, str] = {
    "use_beam_search": "no engine here searches with beams yet",
    "prompt_logprobs": "echo with logprobs gives those of the prompt",
    "logits_processors": "engines take no code",
    "allowed_token_ids": "engines take no such list",
    "prompt_embeds": "engines take token ids",
}
WIRE_NAMES = {
    "input_token_ids": "prompt",
    "inputs": "prompt",
    "num_top_log_probs": "logprobs",
    "num_prompt_log_probs": "logprobs",
    "return_log_probs": "logprobs",
    "embedding_bias": "logit_bias",
    "stop_words": "stop_token_ids",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
    "lora_config": "model",
}
"""The contract's words for what a client of these doors calls otherwise."""


def default_frame(model: ModelConfig) -> OpenAIFrame:
    return OpenAIFrame(
        model=model.name,
        adapters=model.adapters,
        tool_call_parser=model.tool_call_parser,
        reasoning_parser=model.reasoning_parser,
    )


def read(
    body: bytes, content_type: str | None, model: ModelConfig, *, stream_format: OutputFormat | None = None
) -> Message:
    """The body as a whole. Raises MalformedRequest, or UnknownModel for a name that is not the model's.

    `stream_format` None: a stream is server-sent events; else it is what `output_formatter` or the server's settings
    say, or this where they name no form of a stream.
    """
    check_values(body, MAX_PROMPTS)
    return message(body, model, stream_format)


def message(body: bytes, model: ModelConfig, stream_format: OutputFormat | None = None) -> Message:
    fields, frame = read_object(body), default_frame(model)
    name, is_streaming = fields.get("model"), fields.get("stream")
    if not isinstance(name, str | None):
        raise MalformedRequest(f"model must be a string, given {shorten(name)}")
    if name and name not in (model.name, "model", *UNNAMED, *model.aliases, *model.adapters):
        served = f"{model.name!r} is served here" + (f" with {', '.join(model.adapters)}" if model.adapters else "")
        raise UnknownModel(f"the model {shorten(name)} does not exist, only {served}")
    if not isinstance(is_streaming, bool | None):
        raise MalformedRequest(f"stream must be true or false, given {shorten(is_streaming)}")
    if is_streaming:
        frame = replace(frame, output_format=_stream_format(fields.get("output_formatter"), model, stream_format))
    return Message(fields, frame)


def _stream_format(wanted: object, model: ModelConfig, usual: OutputFormat | None) -> OutputFormat:
    """The request's own form beats the configured one, which beats the usual; one that is no stream's says nothing."""
    if usual is None:
        return OutputFormat.SSE
    named = (form for name in (wanted, model.output_formatter) for form in STREAMS if form == name)
    return next(named, usual)


def parse(message: Message) -> Parsed:
    """The requests of a completion, one for each prompt. Raises InvalidParameter or Unsupported."""
    given, tolerated = read_fields(message.fields, COMPLETION, CANNOT)
    if given.get("suffix"):
        raise Unsupported("suffix", "models here write on from a prompt and fill no gap")
    prompts = _prompts(given.get("prompt"))
    num_choices, best_of = given.get("n", 1), given.get("best_of", given.get("n", 1))
    if best_of < num_choices:
        raise InvalidParameter("best_of", f"at least n ({num_choices})", best_of)
    if best_of > num_choices and given.get("stream"):
        raise Unsupported("best_of", "the best of several is known only at their end, so it cannot be streamed")
    max_tokens, num_log_probs = given.get("max_tokens", DEFAULT_MAX_TOKENS), given.get("logprobs")
    if max_tokens == 0 and not given.get("echo"):
        raise InvalidParameter("max_tokens", "at least 1 without echo", 0)
    shared = shared_fields(given, message.frame, num_sequences=best_of)
    guide, field_names = asked_guide(given)
    shared |= {
        "max_new_tokens": max(1, max_tokens),
        "needs_log_probs": num_log_probs is not None or best_of > num_choices,
        "num_top_log_probs": num_log_probs or None,
        "return_full_text": given.get("echo", False),
        "guided_decoding": guide,
    }
    if given.get("echo") and num_log_probs is not None:
        shared |= {"prefill_details": True, "num_prompt_log_probs": num_log_probs}
    echo = Echo(
        id=f"cmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=shared["adapter"] or message.frame.model,  # type: ignore[attr-defined]
        has_usage=wants_usage(given),
        has_log_probs=num_log_probs is not None,
        num_top_log_probs=num_log_probs or 0,
        num_choices=num_choices,
        echoes_prompt=given.get("echo", False),
        is_answer_wanted=max_tokens > 0,
    )
    requests = tuple(GenerationRequest(**prompt, **shared) for prompt in prompts)
    return Parsed(requests, tolerated, echo, field_names)


def _prompts(value: object) -> list[dict[str, Any]]:
    """Each prompt's own fields of a request: a text, token ids, or a list of such."""
    if isinstance(value, str) and value:
        return [{"prompt": value}]
    rule = "a non-empty string, a list of token ids, or a list of such"
    if not isinstance(value, list) or not value:
        raise InvalidParameter("prompt", rule, value)
    if all(isinstance(item, int) for item in value):
        return [{"prompt_token_ids": PROMPT_IDS("prompt", value)}]
    if len(value) > MAX_PROMPTS:
        raise InvalidParameter("prompt", f"a list of at most {MAX_PROMPTS} prompts", value)
    prompts: list[dict[str, Any]] = []
    for n, item in enumerate(value):
        if isinstance(item, str) and item:
            prompts.append({"prompt": item})
        elif isinstance(item, list) and item:
            prompts.append({"prompt_token_ids": PROMPT_IDS(f"prompt[{n}]", item)})
        else:
            raise InvalidParameter(f"prompt[{n}]", "a non-empty string or list of token ids", item)
    return prompts


PROMPT_IDS = token_ids(MAX_PROMPT_IDS)


def read_fields(
    fields: Mapping[str, Any], known: Mapping[str, Reader], cannot: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The given fields, checked, and a line on each that nobody knows. null is as if left out."""
    given: dict[str, Any] = {}
    tolerated: list[str] = []
    for name, value in fields.items():
        if name in known:
            if value is not None:
                given[name] = known[name](name, value)
        elif name in cannot:
            if not _is_off(value):
                raise Unsupported(name, cannot[name])
        elif value is not None and name not in WITHOUT_EFFECT:
            tolerated.append(f"{shorten(name)}: unknown")
    return given, tuple(tolerated[:MAX_TOLERATED])


def _is_off(value: object) -> bool:
    """Whether what cannot be done is not asked for either."""
    return value is None or value is False or value in ([], {})


def wants_usage(given: Mapping[str, Any]) -> bool:
    options = given.get("stream_options", {})
    wanted: bool = boolean("stream_options.include_usage", options.get("include_usage") or False)
    return wanted


def shared_fields(given: Mapping[str, Any], frame: Frame, *, num_sequences: int) -> dict[str, Any]:
    """The fields of a request that both schemas make in the same way."""
    assert isinstance(frame, OpenAIFrame)
    max_tokens, name = given.get("max_tokens"), given.get("model")
    if max_tokens is not None and given.get("min_tokens", 0) > max_tokens:
        raise InvalidParameter("min_tokens", f"at most max_tokens ({max_tokens})", given["min_tokens"])
    return {
        "sampling": _sampling(given, num_sequences),
        "adapter": name if name in frame.adapters else None,
        "is_streaming": frame.output_format is not OutputFormat.JSON,
        "output_format": frame.output_format,
        "stop_sequences": given.get("stop", ()),
        "bad_sequences": given.get("bad_words", ()),
        "stop_token_ids": given.get("stop_token_ids", ()),
        "ignore_eos": given.get("ignore_eos", False),
        "truncate": given.get("truncate_prompt_tokens"),
        "include_stop_str_in_output": given.get("include_stop_str_in_output", False),
        "skip_special_tokens": given.get("skip_special_tokens", True),
        "spaces_between_special_tokens": given.get("spaces_between_special_tokens", True),
        "token_biases": given.get("logit_bias", ()),
    }


def _sampling(given: Mapping[str, Any], num_sequences: int) -> SamplingConfig:
    """What is off becomes None; what greedy decoding cannot use is forgotten, so that no engine refuses it."""
    is_greedy = given.get("temperature") == 0 or given.get("top_p") == 0
    used = {name: value for name, value in given.items() if not (is_greedy and name in GREEDY_HAS_NO)}
    top_k, top_p = used.get("top_k", 0), used.get("top_p", 1)
    repetition_penalty = used.get("repetition_penalty", 1)
    return SamplingConfig(
        num_return_sequences=num_sequences,
        temperature=0.0 if is_greedy else _unless(used.get("temperature"), 1),
        top_k=top_k if top_k > 0 else None,
        top_p=None if top_p == 1 else top_p,
        min_p=used.get("min_p") or None,
        seed=used.get("seed"),
        min_tokens=used.get("min_tokens") or None,
        repetition_penalty=None if repetition_penalty == 1 else repetition_penalty,
        presence_penalty=used.get("presence_penalty") or None,
        frequency_penalty=used.get("frequency_penalty") or None,
    )


def _unless(value: float | None, off: float) -> float | None:
    return None if value == off else value
