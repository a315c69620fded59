"""The API of the dynamic batch: a body may have several inputs.

It takes the place of LMI's API with `option.rolling_batch=disable`. Each input of
`{"inputs": ["...", "..."], "parameters": {...}}` is a request of its own, and all have the same
parameters. A whole answer is a list with the best sequence of each input. A stream is lines such as
`{"outputs": ["This", ""]}`, with the new text of each input. Indents, separators and escapes are
those of the reference. Source: LMI handlers' inference API schema (v0.28.0), second half.
"""

import json

from msgspec.structs import replace
from orjson import dumps

from lmi.apis.base.api import Api
from lmi.apis.base.body import Message, Parsed, check_types, read_inputs
from lmi.apis.base.errors import ErrorFields, ErrorRow, ErrorRules
from lmi.apis.base.formatters import ApiFormatters, Formatter, WholeFormatter, text_of
from lmi.apis.base.media_types import JSONLINES
from lmi.apis.base.parameters import ONE_SEQUENCE_STREAMED
from lmi.apis.base.readers import adapter, boolean
from lmi.apis.lmi import schema as lmi
from lmi.apis.lmi.api import INVALID_STATUS
from lmi.errors import InvalidRequest, MalformedRequest, Unsupported, shorten
from lmi.settings.config import ModelConfig
from lmi.types import Answer, AnswerFormat, Delta, GenerationRequest, OutputFormat, ranked

MAX_INPUTS = 1000
# The parameters that are checked, and then dropped.
WITHOUT_EFFECT = ("details", "output_formatter")
# The message of every error of the reference.
FAILURE = "invoke handler failure"


def default_format(model: ModelConfig) -> AnswerFormat:
    """Return the format of all answers, which a setting chooses and not the request."""
    if model.enable_streaming:
        return AnswerFormat(output_format=OutputFormat.JSONLINES)

    return AnswerFormat(output_format=OutputFormat.JSON)


def read(body: bytes, content_type: str | None, model: ModelConfig) -> Message[AnswerFormat]:
    """Read a body with one text or a list of them. Raises MalformedRequest."""
    fields = read_inputs(body, content_type, MAX_INPUTS)
    if "inputs" not in fields:
        raise MalformedRequest("inputs is missing")

    inputs = fields["inputs"]
    texts = inputs if isinstance(inputs, list) else [inputs]
    if not 1 <= len(texts) <= MAX_INPUTS:
        raise MalformedRequest(
            f"inputs must be one string or a list of 1 to {MAX_INPUTS}, given {shorten(inputs)}"
        )

    for text in texts:
        if not isinstance(text, str) or not text:
            raise MalformedRequest(f"inputs must be non-empty strings, given {shorten(text)}")

    check_types(fields, has_stream=False)
    parameters = fields.get("parameters") or {}
    format = replace(default_format(model), details=parameters.get("details") is True)
    return Message(fields, format, model.sampling_defaults)


def parse(message: Message[AnswerFormat]) -> Parsed[AnswerFormat]:
    """Check all fields, and return a request for each input.

    Raises InvalidParameter, and Unsupported for a stream of several sequences of an input.
    """
    fields = message.fields
    format = message.format
    parameters = dict(fields.get("parameters") or {})
    ignored = _drop_without_effect(parameters, fields.get("stream"))

    inputs = fields["inputs"]
    texts = inputs if isinstance(inputs, list) else [inputs]

    # The requests differ only in prompt and adapter. So LMI's schema reads the body as if it had
    # the first input alone.
    single_fields = fields | {
        "inputs": texts[0],
        "parameters": parameters,
        "stream": None,
        "adapters": None,
    }
    single = lmi.parse(Message(single_fields, lmi.LmiFormat(), message.sampling_defaults))

    request = replace(single.request, is_streaming=format.is_streamed)
    if request.is_streaming and request.num_sequences > 1:
        raise Unsupported(lmi.name_of_several(parameters), ONE_SEQUENCE_STREAMED)

    adapter_names = _adapter_names(fields.get("adapters"), len(texts))
    requests = []
    for text, adapter_name in zip(texts, adapter_names, strict=True):
        requests.append(replace(request, prompt=text, adapter=adapter_name))

    format = replace(format, field_names=single.format.field_names)
    return Parsed(tuple(requests), format, (*ignored, *single.ignored))


def _drop_without_effect(parameters: dict[str, object], stream: object) -> list[str]:
    """Remove the parameters of WITHOUT_EFFECT. Returns a warning for each, and for `stream` if it
    is given.

    Raises InvalidParameter for a value that LMI's API refuses.
    """
    ignored = []
    for name in WITHOUT_EFFECT:
        if parameters.get(name) is not None:
            lmi.PARAMETERS[name].read(f"parameters.{name}", parameters.pop(name))
            ignored.append(f"parameters.{name}: no effect with option.rolling_batch=disable")

    if stream is not None:
        boolean("stream", stream)
        ignored.append("stream: no effect, option.enable_streaming says it for all requests")

    return ignored


def _adapter_names(value: object, num_inputs: int) -> list[str | None]:
    """Return the adapter of each input. `value` names one for all, or lists one for each.

    Raises InvalidParameter.
    """
    if isinstance(value, list) and len(value) == num_inputs:
        return [adapter("adapters", name) for name in value]

    return [adapter("adapters", value)] * num_inputs


class BatchWhole(WholeFormatter[AnswerFormat]):
    """The whole answer: an object for each input, in the inputs' order."""

    def _whole(self, answers: list[Answer]) -> bytes:
        objects = []
        # All requests have equally many sequences, and the answers of each stand together.
        num_sequences = self._request.num_sequences
        for index, request in enumerate(self._requests):
            start = index * num_sequences
            best = ranked(request, answers[start : start + num_sequences])[0]
            text = _prefix(request) + best.text
            objects.append(b'  {\n    "generated_text":%b\n  }' % dumps(text))

        return b"[\n%b\n]" % b",\n".join(objects)

    @staticmethod
    def error(error: ErrorFields) -> bytes:
        return b'{\n  "code":%d,\n  "message":%b,\n  "error":%b\n}' % (
            error.code,
            dumps(FAILURE),
            dumps(error.message),
        )


class BatchStream(Formatter[AnswerFormat]):
    """The answer as a stream of lines. A line has, for each input, the text that came since the
    line before, or "".
    """

    media_type = JSONLINES
    is_streaming = True

    def __init__(self, parsed: Parsed[AnswerFormat]) -> None:
        super().__init__(parsed)
        # What stands before the text of each input, until it is sent.
        self._prefixes = [_prefix(request) for request in parsed.requests]
        # The outputs of the next line, and whether it says anything new: a text, or an end.
        self._outputs = [""] * len(parsed.requests)
        self._has_news = False

    def feed(self, delta: Delta) -> list[bytes]:
        text = text_of(delta.tokens)
        if text or delta.finish_reason is not None:
            self._has_news = True
            self._outputs[delta.index] += self._prefixes[delta.index] + text
            self._prefixes[delta.index] = ""

        if delta.is_followed or not self._has_news:
            return []

        outputs = self._outputs
        self._outputs = [""] * len(outputs)
        self._has_news = False
        return [_line({"outputs": outputs})]

    @staticmethod
    def error(error: ErrorFields) -> bytes:
        return _line({"code": error.code, "message": FAILURE, "error": error.message})


def _prefix(request: GenerationRequest) -> str:
    """Return the prompt if the answer begins with it, else ""."""
    return request.prompt if request.return_full_text else ""


def _line(fields: dict[str, object]) -> bytes:
    return json.dumps(fields).encode() + b"\n"


FORMATTERS = ApiFormatters(BatchWhole, BatchStream)
DYNAMIC_BATCH: Api[AnswerFormat] = Api(
    name="dynamic_batch",
    default_format=default_format,
    read=read,
    parse=parse,
    formatter=FORMATTERS.formatter,
    errors=ErrorRules(
        FORMATTERS.write_error, (ErrorRow(InvalidRequest, INVALID_STATUS),), lmi.WIRE_NAMES
    ),
    takes_user_code=True,
    json_end=b"\n",
)
