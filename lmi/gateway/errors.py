"""The errors of AWS's API, each with its class, status and message.

botocore chooses the class of its exception by the header x-amzn-ErrorType. Every fault of a
container is a ModelError, whose status 424 is never retried.
"""

from lmi.errors import ForeignPage, LmiError, Overloaded

# The account in the names of logs: nobody's.
ACCOUNT = "000000000000"
# The most characters of a text in an error.
MAX_TEXT_CHARS = 2048


class AwsError(LmiError):
    """An error with AWS's class, its status and message, and what else its body holds."""

    def __init__(self, kind: str, status: int, message: str, **members: str | int) -> None:
        super().__init__(message)
        self.kind = kind
        self.label = kind
        self.status = status
        self._further_members = members

    @property
    def members(self) -> dict[str, str | int]:
        """The body of the error, with long texts cut."""
        members: dict[str, str | int] = {"Message": self.message, **self._further_members}
        for name, value in members.items():
            if isinstance(value, str):
                members[name] = cut(value)

        return members


def cut(text: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    """Return a text of at most so many characters, whose last one shows that it was cut."""
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def invalid(message: str) -> AwsError:
    """The request is wrong: the client's fault, of the name or header that the message names."""
    return AwsError("ValidationError", 400, message)


def unknown_operation() -> AwsError:
    """The gateway has nothing that answers the path."""
    message = "The requested operation is not supported by the gateway."
    return AwsError("UnknownOperationException", 404, message)


def too_large(max_bytes: int) -> AwsError:
    """The body is larger than this gateway reads."""
    return AwsError(
        "ValidationError", 413, f"The request body must have at most {max_bytes} bytes."
    )


def unavailable(reason: str) -> AwsError:
    """No container takes the request. Clients may retry."""
    return AwsError("ServiceUnavailable", 503, reason)


def model_error(status: int, body: str, endpoint: str, region: str) -> AwsError:
    """The container answered with `status`, 0 if with none, and `body`."""
    side = "client" if 400 <= status < 500 else "server"
    beginning = f'Received {side} error ({status}) from primary with message "'
    ending = "\". See the container's log."
    message = cut(body, MAX_TEXT_CHARS - len(beginning) - len(ending))
    log_group = "/aws/sagemaker/Endpoints"

    return AwsError(
        "ModelError",
        424,
        beginning + message + ending,
        OriginalStatusCode=status,
        OriginalMessage=body,
        LogStreamArn=f"arn:aws:logs:{region}:{ACCOUNT}:log-group:{log_group}/{endpoint}",
    )


def aws_error(error: LmiError) -> AwsError:
    """Return an error of the product as AWS's API tells of it."""
    if isinstance(error, AwsError):
        return error

    if isinstance(error, Overloaded):
        return unavailable(str(error))

    if isinstance(error, ForeignPage):
        return AwsError("AccessDeniedException", error.status, str(error))

    return invalid(str(error))
