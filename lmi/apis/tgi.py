"""TGI's API, as Text Generation Inference 3.3 has it: names, rules and defaults, and the bytes of
its answers.

Each of temperature, top_k, top_p and typical_p turns sampling on, and stop strings stay in the
text. A temperature of 0 means greedy decoding here, while TGI refuses it. The most probable of
several sequences is the answer.
"""

import secrets
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from orjson import dumps

from lmi import errors
from lmi.apis.base import parameters, readers
from lmi.apis.base.api import (
    NO_TOKEN,
    SSE,
    TOO_LONG_AT_TGI,
    Api,
    ErrorFields,
    ErrorRules,
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
    rows,
)
from lmi.apis.base.readers import (
    Message,
    Parsed,
    boolean,
    check_types,
    check_values,
    integer,
    number,
    read_object,
)
from lmi.apis.guides.fields import CONTRACT_NAME, HELP, tgi_grammar
from lmi.description.parts import (
    NOTHING,
    ApiDescription,
    Form,
    answer_object,
    content,
    either,
    or_null,
    request_object,
    table_schemas,
)
from lmi.settings.config import Config, ModelConfig
from lmi.types import (
    Answer,
    AnswerFormat,
    GenerationRequest,
    OutputFormat,
    Token,
    WaitStatus,
    ranked,
)

# A client in JavaScript can send such a number again.
DRAWN_SEED_BITS = 53
# The default of TGI's API description. The context may have room for fewer.
DEFAULT_MAX_NEW_TOKENS = 1024
KNOWN_FIELDS = ("inputs", "parameters", "stream", "adapters")
# Each of these asks for sampling.
SAMPLING = ("temperature", "top_k", "top_p", "typical_p")


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiFormat(AnswerFormat):
    """The format of an answer. With `is_list` a whole answer is a list of one, as at `/`."""

    is_list: bool = False


PARAMETERS = ParameterTable(
    rows(
        "do_sample",
        "max_new_tokens",
        "temperature",
        "typical_p",
        "seed",
        "repetition_penalty",
        "frequency_penalty",
        "truncate",
        "truncation_side",
        "return_full_text",
        "details",
        "decoder_input_details",
        "best_of",
        stop="stop_sequences",
        adapter_id="adapter",
    )
    | {
        "top_k": replace(ROWS["top_k"], read=integer(1)),
        "top_p": replace(ROWS["top_p"], read=number(0, 1, low_open=True)),
        "top_n_tokens": replace(
            ROWS["num_top_log_probs"], read=integer(0, parameters.MAX_TOP_N_TOKENS)
        ),
        "grammar": Parameter("guided_decoding", tgi_grammar, HELP, fields=(CONTRACT_NAME,)),
        "watermark": Parameter("watermark", boolean, "No effect.", (False,)),
    },
    in_parameters,
)
NOT_HERE = {"watermark": "no engine here marks its text"}
NOT_STREAMED = {
    "best_of": parameters.ONE_SEQUENCE_STREAMED,
    "decoder_input_details": "the prompt's tokens come only in an answer that is not streamed",
}


def read(
    body: bytes, content_type: str | None, model: ModelConfig, *, stream: bool | None = None
) -> Message[TgiFormat]:
    """With `stream` None the body says whether the answer is streamed, and a whole answer is a
    list.
    """
    check_values(body)
    fields = read_object(body)
    inputs = fields.get("inputs")
    if not isinstance(inputs, str) or not inputs:
        fault = f", given {errors.shorten(inputs)}" if "inputs" in fields else ""
        raise errors.MalformedRequest(f"inputs must be a non-empty string{fault}")

    check_types(fields, has_stream=stream is None)
    is_streaming = fields.get("stream") if stream is None else stream
    output_format = OutputFormat.SSE if is_streaming else OutputFormat.JSON
    return Message(fields, TgiFormat(output_format=output_format, is_list=stream is None))


def parse(message: Message[TgiFormat]) -> Parsed[TgiFormat]:
    fields = message.fields
    format = message.format
    parameter_fields = fields.get("parameters") or {}
    ignored = parameters.unknown(fields, KNOWN_FIELDS)
    values: dict[str, Any] = {"max_new_tokens": DEFAULT_MAX_NEW_TOKENS}
    values |= PARAMETERS.read(parameter_fields, ignored)

    # LMI's own field counts before `adapter_id`.
    adapter = readers.adapter("adapters", fields.get("adapters"))
    if adapter is not None:
        values["adapter"] = adapter

    is_greedy = _is_greedy(parameter_fields, values)
    has_prefill = "decoder_input_details" in values
    format = replace(format, details=values.get("details", False) or has_prefill)
    _check_together(values, is_streamed=format.is_streamed, is_greedy=is_greedy)

    reasons = PARAMETERS.without_effect(values, is_greedy=is_greedy)
    if not format.is_streamed and not format.details:
        reasons["num_top_log_probs"] = "without details or a stream"

    PARAMETERS.drop(values, reasons, ignored)

    # The details of an answer have its seed, so it is drawn here.
    if format.details and not is_greedy:
        values.setdefault("seed", secrets.randbits(DRAWN_SEED_BITS))

    needs_ranking = parameters.needs_ranking(values)
    request = parameters.request_of(
        values,
        is_greedy=is_greedy,
        is_streaming=format.is_streamed,
        prompt=fields["inputs"],
        needs_full_room=parameter_fields.get("max_new_tokens") is not None,
        include_stop_str_in_output=True,
        num_prompt_log_probs=0 if has_prefill else None,
        needs_log_probs=format.details or format.is_streamed or needs_ranking,
    )
    return Parsed((request,), format, ignored)


def _is_greedy(fields: dict[str, Any], values: dict[str, Any]) -> bool:
    """Whether decoding is greedy. As in TGI, a value without effect (temperature 1) samples only
    beside best_of.
    """
    is_sampling = bool(values.keys() & {"do_sample", *SAMPLING})
    if "best_of" in values:
        is_sampling = is_sampling or any(fields.get(name) is not None for name in SAMPLING)

    return values.get("temperature") == 0 or not is_sampling


def _check_together(values: ParameterValues, *, is_streamed: bool, is_greedy: bool) -> None:
    refusals = NOT_HERE | NOT_STREAMED if is_streamed else NOT_HERE
    for name, reason in refusals.items():
        if name in values:
            raise errors.Unsupported(in_parameters(name), reason)

    if "best_of" not in values:
        return

    if is_greedy:
        rule = "1 without sampling"
        raise errors.InvalidParameter(in_parameters("best_of"), rule, values["best_of"])

    if "seed" in values:
        rule = "left out with best_of"
        raise errors.InvalidParameter(in_parameters("seed"), rule, values["seed"])


class TgiWhole(WholeFormatter[TgiFormat]):
    def _whole(self, answers: list[Answer]) -> bytes:
        best, *lesser_answers = ranked(self._request, answers)
        whole: dict[str, Any] = {"generated_text": self._full_text(best.text)}
        if self._format.details:
            whole["details"] = self._sequence_details(best)
            if lesser_answers:
                whole["details"]["best_of_sequences"] = [
                    self._lesser_sequence(answer) for answer in lesser_answers
                ]

        return dumps([whole] if self._format.is_list else whole)

    def _lesser_sequence(self, answer: Answer) -> dict[str, Any]:
        text = self._full_text(answer.text)
        return {"generated_text": text} | self._sequence_details(answer)

    def _sequence_details(self, answer: Answer) -> dict[str, Any]:
        place = next(n for n, candidate in enumerate(self._answers) if candidate is answer)
        details = _end(self._request, answer, place)
        details["prefill"] = [_prompt_token(token) for token in self._answers[0].prefill or ()]
        details["tokens"] = [_token(token) for token in answer.tokens]
        if self._request.num_top_log_probs:
            details["top_tokens"] = [_top_tokens(token) for token in answer.tokens]

        return details

    @staticmethod
    def error(error: ErrorFields) -> bytes:
        return dumps({"error": error.message, "error_type": error.kind})


class TgiStream(StepFormatter[TgiFormat]):
    media_type = SSE
    opening = b"data:"
    closing = b"\n\n"
    begins_early = True

    def waiting(self, status: WaitStatus, waited_s: float) -> list[bytes]:
        """Return the comment by which TGI keeps a stream alive: its clients pass it over."""
        return [b":\n\n"]

    def _step(self, token: Token) -> bytes:
        answer = self._answer
        index = len(answer.tokens) + (token is NO_TOKEN)
        event: dict[str, Any] = {"index": index, "token": _token(token)}
        if self._request.num_top_log_probs:
            event["top_tokens"] = _top_tokens(token)

        event["generated_text"] = None
        event["details"] = None
        if answer.finish_reason is not None:
            event["generated_text"] = self._full_text(answer.text)
            if self._format.details:
                details = _end(self._request, answer, place=0)
                event["details"] = details | {"input_length": answer.num_prompt_tokens}

        return self.record(dumps(event))

    @classmethod
    def error(cls, error: ErrorFields) -> bytes:
        return cls.record(TgiWhole.error(error))


def _end(request: GenerationRequest, answer: Answer, place: int) -> dict[str, Any]:
    """Return how an answer ended. The one at this `place` among those of a request has the
    request's seed + `place`.
    """
    seed = request.sampling.seed
    return {
        "finish_reason": answer.finish_reason,
        "generated_tokens": len(answer.tokens),
        "seed": None if seed is None else seed + place,
    }


def _token(token: Token) -> dict[str, Any]:
    return _prompt_token(token) | {"special": token.is_special}


def _top_tokens(token: Token) -> list[dict[str, Any]]:
    return [_token(candidate) for candidate in token.top or ()]


def _prompt_token(token: Token) -> dict[str, Any]:
    return {"id": token.id, "text": token.text, "logprob": token.log_prob}


def _kind_of_status(status: int) -> str:
    """Return TGI's word for the errors of HTTP that have no row below."""
    if status < 500:
        return "validation"

    return "overloaded" if status == 503 else "generation"


FORMS = Forms(TgiWhole, TgiStream)
TGI: Api[TgiFormat] = Api(
    name="tgi",
    # The 404 and 405 of this path are the LMI API's.
    paths=("/",),
    prefixes=("/info", "/health"),
    default_format=lambda model: TgiFormat(),
    read=read,
    parse=parse,
    formatter=FORMS.formatter,
    errors=ErrorRules(
        FORMS.write_error,
        (
            Row(errors.PromptTooLong, 422, "validation", opening=TOO_LONG_AT_TGI),
            Row(errors.InvalidRequest, 422, "validation"),
            Row(errors.GenerationFailed, 424, "generation"),
            Row(errors.Overloaded, 429, "overloaded"),
            Row(errors.EngineLost, 503, "incomplete_generation"),
        ),
        PARAMETERS.wire_names(input_token_ids="inputs"),
        _kind_of_status,
    ),
)
TGI_GENERATE = replace(
    TGI, name="tgi_generate", paths=("/generate",), read=partial(read, stream=False)
)
TGI_STREAM = replace(
    TGI, name="tgi_generate_stream", paths=("/generate_stream",), read=partial(read, stream=True)
)

# The description, for /openapi.json.
EXAMPLE = {
    "inputs": "What is the capital of France?",
    "parameters": {"max_new_tokens": 8, "details": True},
}
FIELDS = {
    "inputs": {"type": "string", "minLength": 1},
    "parameters": or_null(request_object(table_schemas(PARAMETERS))),
}
ENDS = ("length", "eos_token", "stop_sequence")
PROMPT_TOKEN: dict[str, Form] = {"id": int, "text": str, "logprob": float | None}
SEQUENCE: dict[str, Form] = {
    "finish_reason": ENDS,
    "generated_tokens": int,
    "seed": int | None,
    "prefill": [answer_object(**PROMPT_TOKEN)],
    "tokens": ["TgiToken"],
    "top_tokens": [["TgiToken"]],
}
BEST_OF = [answer_object(optional=("top_tokens",), generated_text=str, **SEQUENCE)]
DETAILS = answer_object(
    optional=("top_tokens", "best_of_sequences"),
    **SEQUENCE,
    best_of_sequences=BEST_OF,
)
EVENT_TOKENS: dict[str, Form] = {"token": "TgiToken", "top_tokens": ["TgiToken"]}
EVENT_DETAILS = or_null(
    answer_object(finish_reason=ENDS, generated_tokens=int, seed=int | None, input_length=int)
)
SCHEMAS = {
    "TgiRequest": request_object(FIELDS, required=("inputs",), example=EXAMPLE),
    "TgiEitherRequest": request_object(
        FIELDS | {"stream": bool | None}, required=("inputs",), example=EXAMPLE
    ),
    "TgiToken": answer_object(**PROMPT_TOKEN, special=bool),
    "TgiAnswer": answer_object(optional=("details",), generated_text=str, details=DETAILS),
    "TgiEvent": answer_object(
        optional=("top_tokens",),
        index=int,
        **EVENT_TOKENS,
        generated_text=str | None,
        details=EVENT_DETAILS,
    ),
    "TgiError": answer_object(error=str, error_type=str),
    "TgiInfo": answer_object(
        model_id=str,
        model_pipeline_tag=str,
        router=str,
        version=str,
        kernels=str,
        model_sha=None,
        sha=None,
        docker_label=None,
        max_concurrent_requests=int,
        max_best_of=int,
        max_stop_sequences=int,
        max_input_tokens=int,
        max_total_tokens=int,
        validation_workers=int,
        max_client_batch_size=int,
    ),
}


def describe(config: Config) -> ApiDescription:
    about = "Text Generation Inference 3.3."
    rules = [TGI.errors]
    api = ApiDescription("TGI", about, config.model, SCHEMAS, content("TgiError"), rules)
    events = content(either("TgiEvent", "TgiError"), SSE)
    request = "TgiRequest"
    list_or_events = content(["TgiAnswer"]) | events
    summary = "Continue a prompt, in a list or a stream"
    api.infer("/", summary, list_or_events, "TgiEitherRequest")
    api.infer("/generate", "Continue a prompt", "TgiAnswer", request)
    api.infer("/generate_stream", "Continue a prompt, token by token", events, request)
    api.add("get", "/info", "What is served, and its limits", "TgiInfo")
    api.add("get", "/health", "Whether requests are served", NOTHING)
    return api
