"""Every error that lmi raises on purpose.

Each class has a stable `label`, which logs and metrics show, and the HTTP `status` that it has in most APIs, which
`/openapi.json` describes with the first line of the class's docstring. An API that answers otherwise says so in its
`ErrorRules`. An error passes between processes as an `ErrorInfo`.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import NamedTuple


class ErrorInfo(NamedTuple):
    """An error as it passes between processes. If `field` is given, `message` says what is wrong with it."""

    label: str
    message: str
    field: str | None = None
    retry_after_s: int | None = None  # if it is not that of the class


class LmiError(Exception):
    """The base of all errors that lmi can explain to the person who caused them.

    `field` names the part of the request that is at fault, as the code that found the fault names it. The text of the
    error begins with `field`, and `message` is the rest.
    """

    status = 500
    label = "internal"
    retry_after_s: int | None = None  # when a client may try again, if that can help

    def __init__(self, message: str = "", field: str | None = None) -> None:
        self.message = writable(message)
        self.field = None if field is None else writable(field)
        super().__init__(self.spelled({}))

    def spelled(self, names: Mapping[str, str]) -> str:
        """Return the text of the error, with the field under the name that `names` has for it."""
        return self.message if self.field is None else f"{names.get(self.field, self.field)} {self.message}"

    @property
    def info(self) -> ErrorInfo:
        """The ErrorInfo of this error. A class from outside of this file counts as its nearest base in it."""
        kinds = (kind for kind in type(self).__mro__ if issubclass(kind, LmiError))
        label = next(kind.label for kind in kinds if CLASSES.get(kind.label) is kind)
        return ErrorInfo(label, self.message, self.field, self.retry_after_s)


class InvalidRequest(LmiError):
    """The request is wrong, and a second attempt will fail too."""

    status = 400
    label = "invalid_request"


class MalformedRequest(InvalidRequest):
    """The body cannot be read as a request of this API."""

    label = "malformed_request"


class InvalidParameter(InvalidRequest):
    """A named field breaks a rule."""

    label = "invalid_parameter"

    def __init__(self, name: str, rule: str, given: object) -> None:
        super().__init__(f"must be {rule}, given {shorten(given)}", name)


class PromptTooLong(InvalidParameter):
    """The prompt leaves no room in the model's context."""

    label = "prompt_too_long"

    def __init__(self, rule: str, given: str) -> None:
        super().__init__("inputs", rule, given)


class UnknownAdapter(InvalidRequest):
    """No adapter of this name is registered."""

    label = "unknown_adapter"


class Unsupported(InvalidRequest):
    """A named field asks for something that this engine cannot do."""

    label = "unsupported"

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"is not supported here: {reason}", name)


class Unauthorized(LmiError):
    """The request has no key, or one that this server does not know (WWW-Authenticate)."""

    status = 401
    label = "unauthorized"


class ForeignPage(LmiError):
    """A browser sends the request for a page of another origin, or by a name that is not this server's."""

    status = 403
    label = "foreign_page"


class UnknownModel(LmiError):
    """A request names a model or version that is not served here."""

    status = 404
    label = "unknown_model"


class Conflict(LmiError):
    """The name of what a client wants to load is taken, or it was removed while it loaded."""

    status = 409
    label = "conflict"


class Overloaded(LmiError):
    """A queue, or the memory for the bodies of requests, has no room (Retry-After)."""

    status = 503
    label = "overloaded"
    retry_after_s = 1


class Unavailable(LmiError):
    """No engine can take the request (Retry-After): loading, draining or restarting."""

    status = 503
    label = "unavailable"
    retry_after_s = 1


class EngineLost(Unavailable):
    """The engine that had accepted the request died, was replaced or shut down before the end."""

    label = "engine_lost"


class DeadlineExceeded(LmiError):
    """It took longer than `predict_timeout`, than the client waits, or than a load may take."""

    status = 504
    label = "deadline_exceeded"


class OutOfMemory(LmiError):
    """The accelerator has no memory left for this request, or the server no room for what it should load."""

    status = 507
    label = "out_of_memory"


class GenerationFailed(LmiError):
    """The engine accepted the request and then gave up only this one."""

    status = 424
    label = "generation_failed"


class UserCodeFailed(GenerationFailed):
    """User code raised an exception with this message."""

    label = "custom_code_failed"


class ClientGone(LmiError):
    """The client closed its connection or stopped reading, so it does not get the answer."""

    status = 499
    label = "client_gone"


class StartError(LmiError):
    """The server cannot start. The supervisor prints the message and exits with `exit_code`."""

    exit_code = 1
    label = "start_failed"


class BadConfiguration(StartError):
    """One or more options are wrong. The message has one line for each."""

    exit_code = 2
    label = "bad_configuration"


class PortUnavailable(StartError):
    """The listening socket cannot be bound."""

    exit_code = 3
    label = "port_unavailable"


class ModelUnusable(StartError):
    """A model's folder is missing, empty, of a wrong format or broken. The message names the file.

    For an adapter's folder the same error only refuses the adapter while the server runs.
    """

    exit_code = 4
    label = "model_unusable"


class NoMemory(ModelUnusable):
    """The machine or the accelerator has too little memory for the model."""

    label = "no_memory"


class SecurityRefused(StartError):
    """The model asks for something that is switched off for safety (pickled weights, remote code)."""

    exit_code = 5
    label = "security_refused"


class SourceUnreachable(StartError):
    """The model's source could not be reached in several tries. A later start may succeed."""

    exit_code = 6
    label = "source_unreachable"


CLASSES = {
    kind.label: kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, LmiError)
}
STATUSES = frozenset(kind.status for kind in CLASSES.values())


def from_info(info: ErrorInfo) -> LmiError:
    """Return the error that `info` describes. An unknown label gives the base class."""
    kind = CLASSES.get(info.label, LmiError)
    error = kind.__new__(kind)
    LmiError.__init__(error, info.message, info.field)
    if info.retry_after_s is not None:
        error.retry_after_s = info.retry_after_s
    return error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error, or what it was raised from, says that the machine or a device ran out of memory."""
    return any(map(_lacks_memory, (error, error.__cause__)))


def _lacks_memory(error: BaseException | None) -> bool:
    """Libraries name their class OutOfMemoryError. torch says it of the machine's memory in a text."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    of_torch = isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    return of_torch or isinstance(error, MemoryError | NoMemory) or type(error).__name__ == "OutOfMemoryError"


def cause_line(error: BaseException, max_chars: int = 300) -> str:
    """Return the text of a library's error on one line.

    A long text keeps its beginning and its end, because either may name the cause.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    half = max_chars // 2 - 2
    return text if len(text) <= max_chars else f"{text[:half]} … {text[-half:]}"


def writable(text: str) -> str:
    """Return text that JSON and sockets can carry, because a file name may hold bytes that are not UTF-8."""
    return text.encode(errors="replace").decode()


def without_paths(text: str, said: Mapping[str, str]) -> str:
    """Return a text for a client, with each path of this server under the name that the client knows."""
    for path in sorted(filter(None, said), key=len, reverse=True):
        text = text.replace(path, said[path])
    return text


def shorten(value: object, max_chars: int = 80) -> str:
    """Return a value for an error message: one line, quoted, at most `max_chars` long.

    null, true and false are written as in JSON. A text keeps single quotes, which JSON need not escape. Lists and
    objects are counted, not printed, because a client may nest them deeper than Python can print.
    """
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple | dict):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = ascii(value[:max_chars] if isinstance(value, str) else value)
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"
