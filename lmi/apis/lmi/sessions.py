"""What a body and its headers say of sessions: the body that opens or closes one, and the header that names one.

    {"requestType": "NEW_SESSION"}   200, X-Amzn-SageMaker-Session-Id: ID; Expires=2026-01-02T03:04:05Z
    {"requestType": "CLOSE"}         200, X-Amzn-SageMaker-Closed-Session-Id: ID

The header of a new session has two names: that of AWS's guide and the reference, and that of AWS's library and vLLM.
"""

from __future__ import annotations

import re

import msgspec

from lmi.apis.base.outline import LEFT_OUT, PROMPTS, BodyOutline
from lmi.errors import shorten
from lmi.shared.sessions import InvalidSession

HEADER = "X-Amzn-SageMaker-Session-Id"
NEW_HEADER, CLOSED_HEADER = "X-Amzn-SageMaker-New-Session-Id", "X-Amzn-SageMaker-Closed-Session-Id"
NEW_SESSION, CLOSE = "NEW_SESSION", "CLOSE"
MAX_ID_CHARS = 256
ID = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")  # of the API model of sagemaker-runtime
ID_RULE = f"{NEW_SESSION} or an id of at most {MAX_ID_CHARS} letters and digits, with - only between them"


def request_type(body: bytes, *, is_ours: bool = True) -> str | None:
    """Return NEW_SESSION or CLOSE if the body asks for that, None if it asks for an answer. Raises InvalidSession.

    Beside it a body has no other field. If user code reads the bodies, `is_ours` is False, and every other value of the
    field and every other field but a prompt belongs to that code.
    """
    if b'"requestType"' not in body:
        return None
    fields = BodyOutline.of(body)
    if fields is None or not fields.has("request_type"):
        return None
    given = fields.value("request_type")
    if given not in (NEW_SESSION, CLOSE):
        if not is_ours:
            return None
        raise InvalidSession("requestType", f"{NEW_SESSION} or {CLOSE}", given)
    for name, value in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
        if name != "requestType" and value not in LEFT_OUT and (is_ours or name in PROMPTS):
            raise InvalidSession("requestType", f"left out beside {shorten(name)}", given)
    return str(given)
