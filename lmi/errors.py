"""Every error that lmi raises on purpose.

    LmiError
     ├─ InvalidRequest            the client asked for something we cannot do
     │   ├─ MalformedRequest      the body itself cannot be read: not JSON, wrong types, no inputs
     │   ├─ InvalidParameter      a named field breaks a rule
     │   │   ├─ PromptTooLong     the prompt leaves no room in the model's context
     │   │   └─ UnknownAdapter    no adapter of this name is loaded
     │   └─ Unsupported           a named field needs what this engine lacks
     ├─ UnknownModel              the model or version it names is not served here
     ├─ Overloaded                the queue is full; come back later
     ├─ Unavailable               no engine can take the request: loading, draining, restarting
     │   └─ EngineLost            the engine that worked on the request died
     ├─ DeadlineExceeded          the request took longer than it was allowed to
     ├─ OutOfMemory               the accelerator had no memory left for this request
     ├─ GenerationFailed          the engine gave this request up for a reason of its own
     ├─ ClientGone                nobody waits for the answer any more
     └─ StartError                the process cannot start; carries the exit code
         ├─ BadConfiguration      2
         ├─ PortUnavailable       3
         ├─ ModelUnusable         4
         └─ SecurityRefused       5

Each class carries a stable `label` for logs and metrics and the HTTP `status` that its cause has at every door; a
door that answers differently (the LMI door turns 400 into 424) says so in its row of `dialects.py`.
"""

from __future__ import annotations


class LmiError(Exception):
    """Base of all: something that lmi can explain to whoever caused it."""

    status = 500
    label = "internal"


class InvalidRequest(LmiError):
    """The request is wrong and will be wrong again if it is sent again."""

    status = 400
    label = "invalid_request"


class MalformedRequest(InvalidRequest):
    """The body cannot be read as a request of this door."""

    label = "malformed_request"


class InvalidParameter(InvalidRequest):
    """A named field breaks a rule."""

    label = "invalid_parameter"

    def __init__(self, name: str, rule: str, given: object) -> None:
        super().__init__(f"{name} must be {rule}, given {shorten(given)}")
        self.name = name


class PromptTooLong(InvalidParameter):
    """The prompt leaves no room in the model's context."""

    def __init__(self, rule: str, given: str) -> None:
        super().__init__("inputs", rule, given)


class UnknownAdapter(InvalidParameter):
    """No adapter of this name is loaded."""

    label = "unknown_adapter"


class Unsupported(InvalidRequest):
    """A named field asks for something that this engine cannot do."""

    label = "unsupported"

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} is not supported here: {reason}")
        self.name = name


class UnknownModel(LmiError):
    """A request names a model or version that is not served here."""

    status = 404
    label = "unknown_model"


class Overloaded(LmiError):
    """More requests wait than `job_queue_size` allows."""

    status = 503
    label = "overloaded"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(LmiError):
    """No engine can take the request: loading, draining or restarting."""

    status = 503
    label = "unavailable"


class EngineLost(Unavailable):
    """The engine that had accepted the request died, was replaced or shut down before the end."""

    label = "engine_lost"


class DeadlineExceeded(LmiError):
    """The whole request took longer than `predict_timeout`."""

    status = 504
    label = "deadline_exceeded"


class OutOfMemory(LmiError):
    """The accelerator ran out of memory while it worked on this request."""

    status = 507
    label = "out_of_memory"


class GenerationFailed(LmiError):
    """The engine accepted the request and then failed on it alone."""

    status = 424
    label = "generation_failed"


class ClientGone(LmiError):
    """The client closed its connection or stopped reading; nobody sees this answer."""

    status = 499
    label = "client_gone"


class StartError(LmiError):
    """The server cannot start; the supervisor prints the message and exits with `exit_code`."""

    exit_code = 1
    label = "start_failed"


class BadConfiguration(StartError):
    """One or more options are wrong; the message has one line for each."""

    exit_code = 2
    label = "bad_configuration"


class PortUnavailable(StartError):
    """The listening socket cannot be bound."""

    exit_code = 3
    label = "port_unavailable"


class ModelUnusable(StartError):
    """The model folder is missing, empty, of a wrong format or broken; the message names the file."""

    exit_code = 4
    label = "model_unusable"


class SecurityRefused(StartError):
    """The model asks for something that is switched off for safety (pickled weights, remote code)."""

    exit_code = 5
    label = "security_refused"


def shorten(value: object, max_chars: int = 80) -> str:
    """A value as it may stand in an error message: one line, quoted, never longer than `max_chars`.

    null, true and false are said as in JSON; a text keeps single quotes, which JSON need not escape. Lists and objects
    are counted, not printed: a client may nest them deeper than Python can print.
    """
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple | dict):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = ascii(value[:max_chars] if isinstance(value, str) else value)
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"
