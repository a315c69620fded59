"""OpenAI's embeddings as an API, and LMI's vectors, which `/invocations` answers."""

from functools import partial
from typing import Any

from msgspec.structs import replace

from lmi.apis.base.api import Api
from lmi.apis.base.body import Parsed, check_values
from lmi.apis.base.errors import ErrorFields, ErrorRow, ErrorRules
from lmi.apis.base.formatters import Formatter
from lmi.apis.base.media_types import JSON
from lmi.apis.embeddings import inputs_schema
from lmi.apis.embeddings.formatter import EmbeddingsWhole, VectorsWhole
from lmi.apis.embeddings.inputs_schema import LMI_PARAMETERS, VectorsFormat
from lmi.apis.embeddings.schema import MAX_INPUTS, PARAMETERS, parse
from lmi.apis.lmi.api import INVALID_STATUS
from lmi.apis.lmi.formatter import error_fields
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.apis.openai.api import OPENAI_CHAT, OPENAI_CHAT_ERRORS
from lmi.apis.openai.schema import read
from lmi.errors import InvalidRequest

EMBEDDINGS: Api[OpenAIFormat] = replace(
    OPENAI_CHAT,
    name="embeddings",
    paths=("/v1/embeddings",),
    prefixes=(),
    read=partial(read, check=partial(check_values, max_texts=MAX_INPUTS)),
    parse=parse,
    formatter=EmbeddingsWhole,
    errors=replace(OPENAI_CHAT_ERRORS, names=PARAMETERS.wire_names(pooling_params="model")),
)


def _formatter(parsed: Parsed[VectorsFormat]) -> Formatter[Any]:
    return VectorsWhole(parsed)


def _write_error(
    error: ErrorFields, format: VectorsFormat, *, in_answer: bool
) -> tuple[str, bytes]:
    return JSON, b"{%b}" % error_fields(error._replace(kind=None))


EMBEDDING_INPUTS: Api[VectorsFormat] = Api(
    name="embedding_inputs",
    default_format=inputs_schema.default_format,
    read=inputs_schema.read,
    parse=inputs_schema.parse,
    formatter=_formatter,
    errors=ErrorRules(
        _write_error,
        (ErrorRow(InvalidRequest, INVALID_STATUS),),
        LMI_PARAMETERS.wire_names(lora_config="adapters", input_token_ids="inputs"),
    ),
    json_end=b"\n",
)
