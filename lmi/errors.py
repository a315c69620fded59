"""Every error that lmi raises on purpose.

Each class has a stable `label`, which logs and metrics show, and the HTTP `status` that it has in
most APIs, which `/openapi.json` describes with the first line of the class's docstring. An API that
answers otherwise says so in its `ErrorRules`. An error passes between processes as an `ErrorInfo`.
"""

import errno
from collections.abc import Mapping
from typing import NamedTuple, Self


class ErrorInfo(NamedTuple):
    """An error as it passes between processes. If `field` is given, `message` says what is wrong
    with it.
    """

    label: str
    message: str
    field: str | None = None
    # Given where it is not that of the class.
    retry_after_s: int | None = None
    # That of a PromptTooLong.
    max_context: int | None = None


class LmiError(Exception):
    """The base of all errors that lmi can explain to the person who caused them.

    `field` names the part of the request that is at fault, as the code that found the fault names
    it. The text of the error begins with `field`, and `message` is the rest.
    """

    status = 500
    label = "internal"
    # A client may try again after so long, if that can help.
    retry_after_s: int | None = None

    def __init_subclass__(cls, **facts: object) -> None:
        """Take what differs from the base: `label`, `status`, `retry_after_s`, and `exit_code` of a
        StartError.
        """
        for name, value in facts.items():
            setattr(cls, name, value)

    def __init__(self, message: str = "", field: str | None = None) -> None:
        self.message = writable(message)
        self.field = None if field is None else writable(field)
        super().__init__(self.spelled({}))

    def spelled(self, names: Mapping[str, str]) -> str:
        """Return the text of the error, with the field under the name that `names` has for it."""
        if self.field is None:
            return self.message

        return f"{names.get(self.field, self.field)} {self.message}"

    @property
    def info(self) -> ErrorInfo:
        """The ErrorInfo of this error. A class from outside of this file counts as its nearest base
        in it.
        """
        kinds = (kind for kind in type(self).__mro__ if issubclass(kind, LmiError))
        label = next(kind.label for kind in kinds if CLASSES.get(kind.label) is kind)
        return ErrorInfo(label, self.message, self.field, self.retry_after_s)


class InvalidRequest(LmiError, label="invalid_request", status=400):
    """The request is wrong, and a second attempt will fail too."""


class MalformedRequest(InvalidRequest, label="malformed_request"):
    """The body cannot be read as a request of this API."""


class InvalidParameter(InvalidRequest, label="invalid_parameter"):
    """A named field breaks a rule."""

    def __init__(self, name: str, rule: str, value: object) -> None:
        super().__init__(f"must be {rule}, given {shorten(value)}", name)


class PromptTooLong(InvalidParameter, label="prompt_too_long"):
    """The prompt leaves no room in the model's context."""

    # The tokens that the model has room for. None: the prompt breaks another limit.
    max_context: int | None = None

    def __init__(self, rule: str, value: str) -> None:
        super().__init__("inputs", rule, value)

    @classmethod
    def of_context(cls, max_context: int, value: str, *, has_answer: bool = True) -> Self:
        """Return the error of a prompt that is too long for the model's context, in which an answer
        needs room too.
        """
        if has_answer:
            rule = f"shorter than the model's context of {max_context} tokens"
        else:
            rule = f"no longer than the model's context of {max_context} tokens"

        error = cls(rule, value)
        error.max_context = max_context
        return error

    @property
    def info(self) -> ErrorInfo:
        return super().info._replace(max_context=self.max_context)


class UnknownAdapter(InvalidRequest, label="unknown_adapter"):
    """No adapter of this name is registered."""


class Unsupported(InvalidRequest, label="unsupported"):
    """A named field asks for something that this engine cannot do."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"is not supported here: {reason}", name)


class Unauthorized(LmiError, label="unauthorized", status=401):
    """The request has no key, or one that this server does not know (WWW-Authenticate)."""


class ForeignPage(LmiError, label="foreign_page", status=403):
    """A browser sends the request for a page of another origin, or by a name that is not this
    server's.
    """


class UnknownModel(LmiError, label="unknown_model", status=404):
    """A request names a model or version that is not served here."""


class Conflict(LmiError, label="conflict", status=409):
    """The name of what a client wants to load is taken, or it was removed while it loaded."""


class RequestTooLarge(LmiError, label="request_too_large", status=413):
    """The request has no room in a message to the engine, or to the model's code."""


class Overloaded(LmiError, label="overloaded", status=503, retry_after_s=1):
    """A queue, or the memory for the bodies of requests, has no room (Retry-After)."""


class Unavailable(LmiError, label="unavailable", status=503, retry_after_s=1):
    """No engine can take the request (Retry-After): loading, draining or restarting."""


class Draining(Unavailable, label="draining"):
    """This server ends and takes no new requests; another one may take it at once (Retry-After,
    X-Lmi-Refusal).
    """


class EngineLost(Unavailable, label="engine_lost"):
    """The engine that had accepted the request died, was replaced or shut down before the end."""


class DeadlineExceeded(LmiError, label="deadline_exceeded", status=504):
    """It took longer than `predict_timeout`, than the client waits, or than a load may take."""


class OutOfMemory(LmiError, label="out_of_memory", status=507):
    """The accelerator has no memory left for this request, or the server no room for what it should
    load.
    """


class GenerationFailed(LmiError, label="generation_failed", status=424):
    """The engine accepted the request and then gave up only this one."""


class UserCodeFailed(GenerationFailed, label="custom_code_failed"):
    """User code raised an exception with this message."""


class ClientGone(LmiError, label="client_gone", status=499):
    """The client closed its connection or stopped reading, so it does not get the answer."""


class StartError(LmiError, label="start_failed"):
    """The server cannot start. The supervisor prints the message and exits with `exit_code`."""

    exit_code = 1


class BadConfiguration(StartError, label="bad_configuration", exit_code=2):
    """One or more options are wrong. The message has one line for each."""


class PortUnavailable(StartError, label="port_unavailable", exit_code=3):
    """The listening socket cannot be bound."""


class ModelUnusable(StartError, label="model_unusable", exit_code=4):
    """A model's folder is missing, empty, of a wrong format or broken. The message names the file.

    For an adapter's folder the same error only refuses the adapter while the server runs.
    """


class NoMemory(ModelUnusable, label="no_memory"):
    """The machine or the accelerator has too little memory for the model."""


class SecurityRefused(StartError, label="security_refused", exit_code=5):
    """The model asks for something that is switched off for safety (pickled weights,
    remote code).
    """


class SourceUnreachable(StartError, label="source_unreachable", exit_code=6):
    """The model's source could not be reached in several tries. A later start may succeed."""


def _classes() -> dict[str, type[LmiError]]:
    """Return the classes of this file by their labels."""
    classes = {}
    for kind in globals().values():
        if isinstance(kind, type) and issubclass(kind, LmiError):
            classes[kind.label] = kind

    return classes


CLASSES = _classes()
STATUSES = frozenset(kind.status for kind in CLASSES.values())


def from_info(info: ErrorInfo) -> LmiError:
    """Return the error that `info` describes. An unknown label gives the base class."""
    kind = CLASSES.get(info.label, LmiError)
    error = kind.__new__(kind)
    LmiError.__init__(error, info.message, info.field)
    if info.retry_after_s is not None:
        error.retry_after_s = info.retry_after_s

    if isinstance(error, PromptTooLong):
        error.max_context = info.max_context

    return error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error, or what it was raised from, says that the machine or a device ran out of
    memory.
    """
    return any(map(_lacks_memory, (error, error.__cause__)))


def _lacks_memory(error: BaseException | None) -> bool:
    """Libraries name their class OutOfMemoryError. torch says it of the machine's
    memory in a text.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM

    if isinstance(error, MemoryError | NoMemory) or type(error).__name__ == "OutOfMemoryError":
        return True

    text_of_torch = "DefaultCPUAllocator: can't allocate memory"
    return isinstance(error, RuntimeError) and text_of_torch in str(error)


def cause_line(error: BaseException, max_chars: int = 300) -> str:
    """Return the text of a library's error on one line."""
    return one_line(str(error), max_chars) or type(error).__name__


def error_line(error: BaseException) -> str:
    """Return one line with the kind of an error and its text."""
    return f"{type(error).__name__}: {cause_line(error)}"


def one_line(text: str, max_chars: int = 300) -> str:
    """Return a text of others on one line. A long one keeps its beginning and its end: either may
    name the cause.
    """
    line = " ".join(text.split())
    if len(line) <= max_chars:
        return line

    half = max_chars // 2 - 2
    return f"{line[:half]} … {line[-half:]}"


def writable(text: str) -> str:
    """Return text that JSON and sockets can carry, because a file name may hold bytes that are not
    UTF-8.
    """
    return text.encode(errors="replace").decode()


def without_paths(text: str, names: Mapping[str, str]) -> str:
    """Return a text for a client, with each path of this server under the name that the client
    knows.
    """
    for path in sorted(filter(None, names), key=len, reverse=True):
        text = text.replace(path, names[path])

    return text


def shorten(value: object, max_chars: int = 80) -> str:
    """Return a value for an error message: one line, quoted, at most `max_chars` long.

    null, true and false are written as in JSON. A text keeps single quotes, which JSON need not
    escape. Lists and objects are counted, not printed, because a client may nest them deeper than
    Python can print.
    """
    if value is None:
        return "null"

    if isinstance(value, bool):
        return str(value).lower()

    if isinstance(value, dict):
        return f"an object of {len(value)}"

    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"

    if isinstance(value, str):
        value = value[:max_chars]

    text = ascii(value)
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"
