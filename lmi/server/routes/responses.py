"""What clients of Responses ask beside a generation: the tokens of a conversation."""

from functools import partial

from lmi.apis.responses.api import RESPONSES
from lmi.server.routes.tokens import count_tokens

ROUTES = [
    (
        "/v1/responses/input_tokens",
        ["POST"],
        partial(count_tokens, api=RESPONSES, kind="response.input_tokens"),
    ),
]
