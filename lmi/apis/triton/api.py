"""Answers of Triton's generate extension, and its two APIs.

A stream has an event for each Delta, and only the end of the body ends it, because clients read
every line that is not empty as such an object. The bytes are Triton's: keys sorted, no spaces,
UTF-8 not escaped. Like a tensor, an output of one element is a scalar. Sources:
extension_generate.md; the outputs of vllm_backend and of TensorRT-LLM's models.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace
from orjson import OPT_NON_STR_KEYS, OPT_SORT_KEYS, dumps

from lmi.apis.base.api import Api
from lmi.apis.base.body import Parsed
from lmi.apis.base.errors import ErrorFields, ErrorRow, ErrorRules
from lmi.apis.base.formatters import ApiFormatters, Formatter, WholeFormatter, text_of
from lmi.apis.base.media_types import SSE
from lmi.apis.triton import schema
from lmi.apis.triton.inputs import INPUTS
from lmi.apis.triton.schema import TritonFormat
from lmi.errors import GenerationFailed
from lmi.types import Answer, AnswerEnd, Delta, OutputFormat, Token, ranked

FINISH_REASONS = {
    AnswerEnd.EOS_TOKEN: "stop",
    AnswerEnd.STOP_SEQUENCE: "stop",
    AnswerEnd.LENGTH: "length",
}
# The outputs besides text_output, under the names of a model's metadata.
OUTPUTS = {
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
    "cumulative_logprob": "FP32",
    "logprobs": "BYTES",
    "cum_log_probs": "FP32",
    "output_log_probs": "FP32",
}


def _finish_reasons(answer: Answer) -> list[str]:
    if answer.finish_reason is None:
        return ["None"]

    return [FINISH_REASONS[answer.finish_reason]]


def _log_probs(answer: Answer) -> list[str]:
    positions = [_alternatives(token) for token in answer.tokens]
    return [dumps(positions, option=OPT_NON_STR_KEYS).decode()]


# The values that one sequence, or a part of it, adds to an output.
VALUES_OF: dict[str, Callable[[Answer], Sequence[Any]]] = {
    "finish_reason": _finish_reasons,
    "num_output_tokens": lambda answer: [len(answer.tokens)],
    "output_log_probs": lambda answer: [token.log_prob for token in answer.tokens],
    "logprobs": _log_probs,
}


class TritonWhole(WholeFormatter[TritonFormat]):
    """Writes the answer as one object."""

    def _whole(self, answers: list[Answer]) -> bytes:
        num_input_tokens = answers[0].num_prompt_tokens
        num_answers = self._format.num_answers
        if num_answers < len(answers):
            answers = ranked(self._request, answers)[:num_answers]

        cum_log_probs = [answer.cum_log_prob for answer in answers]
        return self._object(answers, num_input_tokens, cum_log_probs)

    def _object(
        self, answers: Sequence[Answer], num_input_tokens: int, cum_log_probs: Sequence[float]
    ) -> bytes:
        """Write an object. `cum_log_probs` holds the sum of each sequence so far, which covers
        earlier events too.
        """
        values: dict[str, list[Any]] = {
            "num_input_tokens": [num_input_tokens],
            "cum_log_probs": list(cum_log_probs),
            "cumulative_logprob": list(cum_log_probs),
        }
        for name in VALUES_OF.keys() & self._format.outputs:
            values[name] = []
            for answer in answers:
                values[name] += VALUES_OF[name](answer)

        texts = [self._full_text(answer.text) for answer in answers]
        fields = {name: _tensor(values[name]) for name in self._format.outputs}
        fields["text_output"] = _tensor(texts)
        return self.record(dumps({**self._format.head, **fields}, option=OPT_SORT_KEYS))

    @classmethod
    def error(cls, error: ErrorFields) -> bytes:
        return cls.record(dumps({"error": error.message}))


class TritonOneEvent(TritonWhole):
    """Writes a whole answer as the only event of a stream."""

    media_type = f"{SSE}; charset=utf-8"
    opening = b"data: "
    closing = b"\n\n"


class TritonStream(TritonOneEvent):
    """Writes an event for each Delta of the only sequence."""

    is_streaming = True

    def __init__(self, parsed: Parsed[TritonFormat]) -> None:
        super().__init__(parsed)
        self._num_input_tokens = 0
        self._cum_log_prob = 0.0

    def feed(self, delta: Delta) -> list[bytes]:
        piece = Answer(text_of(delta.tokens), delta.tokens, delta.finish_reason)
        self._num_input_tokens += delta.num_prompt_tokens
        self._cum_log_prob += piece.cum_log_prob
        return [self._object([piece], self._num_input_tokens, [self._cum_log_prob])]


def _tensor(values: Sequence[Any]) -> Any:
    """Return the values of an output as JSON has them: the value itself if it is the only one."""
    return values[0] if len(values) == 1 else values


def _alternatives(token: Token) -> dict[int, dict[str, object]]:
    """Return a position of `logprobs` as vLLM's backend writes it: the token and the most probable
    ones, by id.
    """
    alternatives: dict[int, dict[str, object]] = {}
    for rank, candidate in [(None, token), *enumerate(token.top or (), 1)]:
        alternatives[candidate.id] = {
            "logprob": candidate.log_prob,
            "rank": rank,
            "decoded_token": candidate.text,
        }

    return alternatives


def _formatter(parsed: Parsed[TritonFormat]) -> Formatter[Any]:
    forms = EVENTS if parsed.request.is_streaming else WHOLE
    return forms.formatter(parsed)


MODELS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
WHOLE = ApiFormatters(TritonWhole, TritonOneEvent)
EVENTS = ApiFormatters(TritonWhole, TritonStream)
TRITON: Api[TritonFormat] = Api(
    name="triton",
    paths=tuple(f"{model}/generate" for model in MODELS),
    prefixes=("/v2",),
    default_format=lambda model: TritonFormat(),
    read=partial(schema.read, output_format=OutputFormat.JSON),
    parse=schema.parse,
    formatter=_formatter,
    errors=ErrorRules(EVENTS.write_error, (ErrorRow(GenerationFailed, 500),), INPUTS.wire_names()),
)
TRITON_STREAM = replace(
    TRITON,
    name="triton_stream",
    paths=tuple(f"{model}/generate_stream" for model in MODELS),
    read=partial(schema.read, output_format=OutputFormat.SSE),
)
