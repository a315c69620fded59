"""The LMI API, with a rolling batch: `{"inputs": "...", "parameters": {...}, "stream": false}`.

As in the reference, names that are unknown or without effect are ignored, and null and the
documented defaults mean "left out". The answer is one object, with the best of several sequences,
or a line or event for each step:

    {"generated_text": "...",
     "details": {"finish_reason": "length", "generated_tokens": 8, "inputs": "", "tokens": []}}

    {"token": {"id": 304, "text": "Deep ", "log_prob": -0.05}}
    {"token": {}, "generated_text": "...",
     "details": {"finish_reason": "length", "generated_tokens": 9, "inputs": ""}}

The bytes are the reference's: `", "` and `": "` as separators, UTF-8 not escaped, keys in a fixed
order. Sources: the LMI handlers' inference API schema (v0.28.0), and what the reference passes on
to TGI and vLLM.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from orjson import dumps

from lmi import errors
from lmi.apis.base import parameters, readers
from lmi.apis.base.api import (
    TOO_LONG_AT_TGI,
    Api,
    ErrorFields,
    ErrorRules,
    Formatter,
    Forms,
    Row,
    StepFormatter,
    WholeFormatter,
)
from lmi.apis.base.parameters import (
    ROWS,
    Parameter,
    ParameterTable,
    ParameterValues,
    in_parameters,
    named,
    rows,
)
from lmi.apis.base.readers import Message, Parsed, takes
from lmi.apis.guides.fields import GUIDED, asked_guide
from lmi.settings.config import ModelConfig, SamplingDefaults
from lmi.types import Answer, AnswerFormat, OutputFormat, Token, ranked

DEFAULT_MAX_NEW_TOKENS = 30
KNOWN_FIELDS = ("inputs", "parameters", "stream", "adapters")
NO_LIMIT: dict[str, tuple[int, ...]] = {"temperature": (1,), "top_k": (-1, 0), "top_p": (0, 1)}
FORMATS = tuple(OutputFormat)
STOP_SEQUENCES = ROWS["stop_sequences"].read


@dataclass(frozen=True, slots=True, kw_only=True)
class LmiFormat(AnswerFormat):
    """The format of an answer.

    With `tgi_compat` keys have TGI's names, the special flag is never left out, and a whole answer
    is a list of one.
    """

    tgi_compat: bool = False


@takes({"anyOf": [{"type": "boolean"}, readers.json_schema_of(STOP_SEQUENCES)]})
def _stop(name: str, value: object) -> tuple[str, ...] | bool:
    """Read a list of strings, which clients send, or a boolean, which is documented without a
    meaning.
    """
    return value if isinstance(value, bool) else STOP_SEQUENCES(name, value)


PARAMETERS = ParameterTable(
    rows(
        "do_sample",
        "max_new_tokens",
        "seed",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "min_tokens",
        "truncate",
        "truncation_side",
        "stop_sequences",
        "stop_token_ids",
        "bad_sequences",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "return_full_text",
        "details",
        "n",
        "best_of",
        "length_penalty",
        "early_stopping",
        "no_repeat_ngram_size",
        "logits_post_processor_name",
        "cache_salt",
    )
    | GUIDED
    # The order counts: an engine's refusal names the first parameter that fills the field.
    | rows(
        num_beams="beam_width",
        ignore_eos_token="ignore_eos",
        prompt_logprobs="num_prompt_log_probs",
    )
    | rows("decoder_input_details", logprobs="num_top_log_probs")
    | rows("top_n_tokens")
    | named(
        Parameter("min_length", readers.integer(0), ROWS["min_tokens"].help, (0, 1)),
        Parameter("stop", _stop, "Texts that end the answer.", ((), False)),
        Parameter("output_formatter", readers.choice(FORMATS), "The form of the answer."),
    ),
    in_parameters,
)
WIRE_NAMES = PARAMETERS.wire_names(input_token_ids="inputs", lora_config="adapters")


def read(
    body: bytes, content_type: str | None, model: ModelConfig, *, accepts_events: bool = False
) -> Message[LmiFormat]:
    """Choose the format of the answer first, since a refused parameter is answered in it.

    With `accepts_events` the answer is server-sent events unless body or settings choose another
    format. A body of type `text/plain` is a prompt. Any other type, or none, is read as JSON: `curl
    -d` sends a form's type, boto3 sends none.
    """
    fields = readers.read_inputs(body, content_type)
    if "inputs" not in fields:
        raise errors.MalformedRequest("inputs is missing")

    inputs = fields["inputs"]
    if isinstance(inputs, list):
        raise errors.MalformedRequest(
            "inputs must be one string; a list of them needs option.rolling_batch=disable"
        )

    if not isinstance(inputs, str) or not inputs:
        raise errors.MalformedRequest(
            f"inputs must be a non-empty string, given {errors.shorten(inputs)}"
        )

    readers.check_types(fields)
    return Message(fields, _format(fields, model, accepts_events), model.sampling_defaults)


def _format(fields: dict[str, Any], model: ModelConfig, accepts_events: bool) -> LmiFormat:
    """Return the format of the answer, which a field of `parameters` may ask to hold details."""
    parameter_fields = fields.get("parameters") or {}
    details = parameter_fields.get("details")
    if details is None:
        has_details = model.tgi_compat
    else:
        has_details = details is True

    return LmiFormat(
        output_format=_output_format(fields, model, accepts_events),
        details=has_details,
        tgi_compat=model.tgi_compat,
    )


def _output_format(
    fields: dict[str, Any], model: ModelConfig, accepts_events: bool
) -> OutputFormat:
    """Choose the format: the request's `output_formatter`, else the configured one, else `stream`,
    else Accept.
    """
    parameter_fields = fields.get("parameters") or {}
    name = parameter_fields.get("output_formatter")
    if name not in FORMATS:
        name = model.output_formatter

    if name is not None:
        return OutputFormat(name)

    is_streaming = fields.get("stream")
    if is_streaming is None:
        is_streaming = accepts_events

    if not is_streaming:
        return OutputFormat.JSON

    if model.tgi_compat or accepts_events:
        return OutputFormat.SSE

    return OutputFormat.JSONLINES


def parse(message: Message[LmiFormat]) -> Parsed[LmiFormat]:
    fields = message.fields
    format = message.format
    parameter_fields = fields.get("parameters") or {}
    ignored = parameters.unknown(fields, KNOWN_FIELDS)

    values: dict[str, Any] = {
        "max_new_tokens": DEFAULT_MAX_NEW_TOKENS,
        "details": format.tgi_compat,
    }
    values |= PARAMETERS.read(parameter_fields, ignored)
    if values.get("stop") is True:
        PARAMETERS.drop(values, {"stop": "as true, which names no stop string"}, ignored)

    PARAMETERS.check_together(values, is_streamed=format.is_streamed)
    PARAMETERS.read_search(values)
    if message.sampling_defaults is not None and "beam_width" not in values:
        fill_in(values, parameter_fields, message.sampling_defaults)

    is_zero = values.get("temperature") == 0 or values.get("top_p") == 0
    is_sampling = "do_sample" in values and not is_zero
    is_greedy = "beam_width" not in values and not is_sampling
    reasons = PARAMETERS.without_effect(values, is_greedy=is_greedy)
    reasons |= _without_details(values, format)
    PARAMETERS.drop(values, reasons, ignored)

    num_prompt_log_probs = values.get("num_prompt_log_probs")
    if num_prompt_log_probs is None and "decoder_input_details" in values:
        num_prompt_log_probs = 0

    guide = asked_guide(values, "parameters.")
    needs_ranking = parameters.needs_ranking(values)
    request = parameters.request_of(
        {"num_top_log_probs": values.get("top_n_tokens")} | values,
        is_greedy=is_greedy,
        is_streaming=format.is_streamed,
        prompt=fields["inputs"],
        num_prompt_log_probs=num_prompt_log_probs,
        needs_log_probs=values["details"] or format.is_streamed or needs_ranking,
        guided_decoding=guide.params,
        adapter=readers.adapter("adapters", fields.get("adapters")),
    )

    format = replace(format, details=values["details"], field_names=guide.field_names)
    return Parsed((request,), format, ignored)


def fill_in(values: dict[str, Any], fields: ParameterValues, defaults: SamplingDefaults) -> None:
    """Set do_sample in `values` if the request samples, and then every value that has an effect.

    An engine with its own defaults has no do_sample, which only chooses among them. It decodes
    greedily if the temperature is 0, if top_k is 1, or if top_k and top_p are both 0; if one of the
    two is 0, it is no limit. Source: LMI's page, under the additional parameters of TensorRT-LLM.
    The reference's code has another temperature there; the page counts. `fields` holds the checked
    parameters as the client wrote them, with those that mean the same as leaving them out on other
    engines.
    """
    if "do_sample" in values:
        sampling = asdict(defaults.with_do_sample)
    else:
        sampling = asdict(defaults.without)

    for name in sampling:
        if fields.get(name) is not None:
            sampling[name] = values.get(name, fields[name])

    values.pop("do_sample", None)
    temperature = sampling["temperature"]
    top_k = sampling["top_k"]
    top_p = sampling["top_p"]
    if temperature == 0 or top_k == 1 or (top_k < 1 and top_p == 0):
        return

    values["do_sample"] = True
    for name, value in sampling.items():
        values.pop(name, None)
        if value not in NO_LIMIT[name]:
            values[name] = value


def name_of_several(fields: ParameterValues) -> str:
    """Return the name that an error uses for the parameter that asks for several sequences."""
    names = ("num_beams", "n", "best_of")
    return in_parameters(next(name for name in names if fields.get(name) not in (None, 1)))


def _without_details(values: ParameterValues, format: LmiFormat) -> dict[str, str]:
    """Return the parameters that this form of the answer has no place for, with the reasons."""
    reasons = dict[str, str]()
    if not values["details"]:
        names_in_details = ("decoder_input_details", "num_prompt_log_probs")
        reasons |= dict.fromkeys(names_in_details, "without details")

    if not values["details"] and not format.is_streamed:
        names_of_tops = ("num_top_log_probs", "top_n_tokens")
        reasons |= dict.fromkeys(names_of_tops, "without details or a stream")
    elif "num_top_log_probs" in values:
        reasons["top_n_tokens"] = "beside logprobs"

    return reasons


class LmiFormatter(Formatter[LmiFormat]):
    def __init__(self, parsed: Parsed[LmiFormat]) -> None:
        super().__init__(parsed)
        self._token_json = tgi_token if parsed.format.tgi_compat else lmi_token

    def _details(
        self,
        answer: Answer,
        prefill: list[Token] | None,
        lesser_answers: Sequence[Answer] | None = None,
    ) -> bytes:
        """Write the Details object. A whole answer has the `lesser_answers` beside the best one. A
        stream has none, and has written its tokens before.
        """
        is_whole = lesser_answers is not None
        items = [
            b'"finish_reason": %b' % dumps(answer.finish_reason),
            b'"generated_tokens": %d' % len(answer.tokens),
            b'"inputs": %b' % dumps(self._request.prompt),
        ]
        if is_whole:
            items.append(b'"tokens": %b' % self._tokens(answer.tokens))

        if not self._request.prefill_details:
            prefill = None

        # TGI's client refuses a whole answer without a prefill.
        if prefill is None and is_whole and self._format.tgi_compat:
            prefill = []

        if prefill is not None:
            items.append(b'"prefill": [%b]' % b", ".join(map(self._prompt_token, prefill)))

        if is_whole and self._request.num_top_log_probs:
            top_tokens = [self._tokens(token.top or ()) for token in answer.tokens]
            items.append(b'"top_tokens": [%b]' % b", ".join(top_tokens))

        if lesser_answers:
            sequences = b", ".join(map(self._sequence, lesser_answers))
            items.append(b'"best_of_sequences": [%b]' % sequences)

        return b"{%b}" % b", ".join(items)

    def _sequence(self, answer: Answer) -> bytes:
        fields = (
            b'"finish_reason": %b' % dumps(answer.finish_reason),
            b'"generated_tokens": %d' % len(answer.tokens),
            b'"tokens": %b' % self._tokens(answer.tokens),
            b'"generated_text": %b' % dumps(self._full_text(answer.text)),
        )
        return b"{%b}" % b", ".join(fields)

    def _tokens(self, tokens: Iterable[Token]) -> bytes:
        return b"[%b]" % b", ".join(map(self._token_json, tokens))

    def _prompt_token(self, token: Token) -> bytes:
        plain = self._token_json(token)
        if not self._request.num_prompt_log_probs:
            return plain

        return b'%b, "top_tokens": %b}' % (plain[:-1], self._tokens(token.top or ()))


class LmiWhole(LmiFormatter, WholeFormatter[LmiFormat]):
    """One object, or with tgi_compat a list of one. `Api.whole` adds the newline that ends the
    body.
    """

    def _whole(self, answers: list[Answer]) -> bytes:
        best, *lesser_answers = ranked(self._request, answers)
        body = b'{"generated_text": %b' % dumps(self._full_text(best.text))
        if self._format.details:
            body += b', "details": %b' % self._details(best, answers[0].prefill, lesser_answers)

        body += b"}"
        return b"[%b]" % body if self._format.tgi_compat else body

    @staticmethod
    def error(error: ErrorFields) -> bytes:
        details = (
            b'{"finish_reason": "error", "generated_tokens": null, "inputs": null, "tokens": null}'
        )
        return b'{"generated_text": "", "details": %b, %b}' % (details, error_fields(error))


class LmiStream(LmiFormatter, StepFormatter[LmiFormat]):
    """A line for each step.

    Every line ends with a newline, the last one too, because client libraries loop endlessly on a
    line without one.
    """

    media_type = "application/jsonlines"
    opening = b"{"
    closing = b"}\n"

    def _step(self, token: Token) -> bytes:
        fields = b'"token": ' + self._token_json(token)
        answer = self._answer
        if self._request.num_top_log_probs:
            fields += b', "top_tokens": ' + self._tokens(token.top or ())

        if answer.finish_reason is not None:
            fields += b', "generated_text": %b' % dumps(self._full_text(answer.text))
            if self._format.details:
                fields += b', "details": ' + self._details(answer, answer.prefill)

        return self.record(fields)

    @classmethod
    def error(cls, error: ErrorFields) -> bytes:
        token = b'{"id": -1, "text": "", "logprob": -1, "special": true}'
        if error.kind is None:
            token = b'{"id": -1, "text": "", "log_prob": -1, "special_token": true}'

        details = b'{"finish_reason": "error", "generated_tokens": null, "inputs": null}'
        fields = token, details, error_fields(error)
        return cls.record(b'"token": %b, "generated_text": "", "details": %b, %b' % fields)


class LmiEvents(LmiStream):
    """The lines as server-sent events, without event names, ids or `[DONE]`."""

    media_type = "text/event-stream"
    opening = b"data: {"
    closing = b"}\n\n"


def lmi_token(token: Token) -> bytes:
    end = b', "special_token": true}' if token.is_special else b"}"
    fields = token.id, dumps(token.text), dumps(token.log_prob), end
    return b'{"id": %d, "text": %b, "log_prob": %b%b' % fields


def tgi_token(token: Token) -> bytes:
    end = b"true}" if token.is_special else b"false}"
    fields = token.id, dumps(token.text), dumps(token.log_prob), end
    return b'{"id": %d, "text": %b, "logprob": %b, "special": %b' % fields


def error_fields(error: ErrorFields) -> bytes:
    """Return the two or three keys that every error ends with."""
    fields = b'"error": %b, "code": %d' % (dumps(error.message), error.code)
    if error.kind is None:
        return fields

    return b'%b, "error_type": %b' % (fields, dumps(error.kind))


def _write_error(error: ErrorFields, format: LmiFormat, *, in_answer: bool) -> tuple[str, bytes]:
    kind = error.kind
    if not format.tgi_compat:
        kind = None
    elif in_answer and kind == "overloaded":
        kind = "generation"

    error = error._replace(kind=kind)
    if in_answer:
        return FORMS.write_error(error, format, in_answer=format.is_streamed)

    return LmiWhole.media_type, b"{%b}" % error_fields(error)


# Other APIs answer 400.
INVALID_STATUS = 424
FORMS = Forms(LmiWhole, LmiEvents, LmiStream)
LMI: Api[LmiFormat] = Api(
    name="lmi",
    prefixes=("/",),
    default_format=lambda model: LmiFormat(tgi_compat=model.tgi_compat),
    read=read,
    parse=parse,
    formatter=FORMS.formatter,
    errors=ErrorRules(
        _write_error,
        (
            Row(errors.MalformedRequest, INVALID_STATUS, "validation"),
            Row(
                errors.PromptTooLong,
                INVALID_STATUS,
                "validation",
                in_answer=True,
                opening=TOO_LONG_AT_TGI,
            ),
            Row(errors.InvalidRequest, INVALID_STATUS, "validation", in_answer=True),
            Row(errors.GenerationFailed, 424, "generation", in_answer=True),
            Row(errors.DeadlineExceeded, 504, "generation", in_answer=True),
            Row(errors.OutOfMemory, 507, "generation", in_answer=True),
            Row(errors.EngineLost, 503, "generation", in_answer=True),
        ),
        WIRE_NAMES,
        lambda status: "validation" if status < 500 else "overloaded",
    ),
    read_for_events=partial(read, accepts_events=True),
    takes_user_code=True,
    json_end=b"\n",
)
