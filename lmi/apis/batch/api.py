"""The row of the dynamic batch, which replaces the LMI API's with `option.rolling_batch=disable`."""

from __future__ import annotations

from lmi.apis.base.api import Api, ErrorRules, Row, written_by
from lmi.apis.batch import schema
from lmi.apis.batch.formatter import BatchStream, BatchWhole
from lmi.apis.lmi.api import INVALID_STATUS
from lmi.apis.lmi.schema import WIRE_NAMES
from lmi.errors import InvalidRequest
from lmi.types import AnswerFormat

DYNAMIC_BATCH: Api[AnswerFormat] = Api(
    name="dynamic_batch",
    default_format=schema.default_format,
    read=schema.read,
    parse=schema.parse,
    formatter=lambda parsed: BatchStream(parsed) if parsed.format.is_streamed else BatchWhole(parsed),
    errors=ErrorRules(written_by(BatchWhole, BatchStream), (Row(InvalidRequest, INVALID_STATUS),), WIRE_NAMES),
    takes_user_code=True,
    json_end=b"\n",
)
