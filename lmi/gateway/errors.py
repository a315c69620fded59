"""The errors of AWS's API: what a client of the SageMaker runtime gets in place of an answer.

botocore chooses the class of its exception by the header x-amzn-ErrorType. Every fault of a container is a ModelError,
whose status 424 is never retried.
"""

from __future__ import annotations

import orjson

from lmi.errors import LmiError

ACCOUNT = "000000000000"
MAX_TEXT_CHARS = 2048


class AwsError(LmiError):
    """An error with AWS's class, its status and message, and what else its body holds."""

    def __init__(self, kind: str, status: int, message: str, **others: str | int) -> None:
        super().__init__(message)
        self.kind = self.label = kind
        self.status = status
        self.others = others

    @property
    def members(self) -> dict[str, str | int]:
        """What the body holds."""
        members = {"Message": self.message, **self.others}
        return {name: cut(value) if isinstance(value, str) else value for name, value in members.items()}

    @property
    def body(self) -> bytes:
        return orjson.dumps(self.members)


def cut(text: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def invalid(message: str) -> AwsError:
    """The request is wrong: the client's fault, of the name or header that the message names."""
    return AwsError("ValidationError", 400, message)


def too_large(max_bytes: int) -> AwsError:
    return AwsError("ValidationError", 413, f"The request body must have at most {max_bytes} bytes.")


def unavailable(reason: str) -> AwsError:
    """No container takes the request. Clients may retry."""
    return AwsError("ServiceUnavailable", 503, reason)


def model_error(status: int, body: str, endpoint: str, region: str) -> AwsError:
    """The container answered with `status`, 0 if with none, and `body`."""
    side = "client" if 400 <= status < 500 else "server"
    before, after = f'Received {side} error ({status}) from primary with message "', "\". See the container's log."
    return AwsError(
        "ModelError",
        424,
        before + cut(body, MAX_TEXT_CHARS - len(before) - len(after)) + after,
        OriginalStatusCode=status,
        OriginalMessage=body,
        LogStreamArn=f"arn:aws:logs:{region}:{ACCOUNT}:log-group:/aws/sagemaker/Endpoints/{endpoint}",
    )
