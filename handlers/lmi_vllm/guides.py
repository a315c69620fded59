"""What vLLM says of a client's structure that it cannot follow: the client's own fault, in one line.

vLLM ends such a request with the word "error" and explains it only in its log, at ERROR. Here the loggers that explain
are listened to, by their names and never by their texts: the cause goes to the request, the lines to our DEBUG. Causes
are kept in a file in memory that every process of the engine inherits by its path, since the structures may be compiled
in another one. Known of vLLM: names of modules, which are those of its loggers, and that the first argument of their
lines is the request's id, as of vLLM 0.30 to 0.33.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress

from lmi.errors import shorten

ENVIRONMENT_NAME = "LMI_VLLM_GUIDES"
RULE = "guided_decoding_params must be a structure that vLLM can follow"
REPORTING = tuple(f"vllm.v1.structured_output{name}" for name in ("", ".backend_xgrammar", ".backend_guidance"))
NO_TEXT = "no text fits it"
PLACE = re.compile(r"\[[0-9:]+\] \S+:[0-9]+: ")  # where in the compiler's own code: [04:07:14] /x/regex.cc:83:
MAX_CAUSE = 300  # characters
MAX_FILE_BYTES = 1 << 20  # then it begins anew: a cause is asked for a moment after it was noted


def begin() -> None:
    """Keep causes from now on, of this process and of those that it starts."""
    fd = os.memfd_create("guides", os.MFD_CLOEXEC)
    os.environ[ENVIRONMENT_NAME] = f"/proc/{os.getpid()}/fd/{fd}"


def listen() -> None:
    """Call before vLLM's first request, in every process of its engine."""
    for name in REPORTING:
        logging.getLogger(name).addFilter(_note)


def refusal(cause: Exception | str) -> str:
    """One line for the client."""
    said = PLACE.sub("", " ".join(str(cause).split()))
    return f"{RULE}: {shorten(said, MAX_CAUSE)[1:-1]}"


def cause_of(name: str) -> str | None:
    """Why vLLM gave a request up, if its structure was at fault; `name` is the id that we gave it."""
    with suppress(OSError, KeyError), open(os.environ[ENVIRONMENT_NAME], encoding="utf-8") as file:
        causes = (line.rstrip("\n").partition(" ") for line in file)
        return next((cause for inner_id, _, cause in causes if inner_id.rpartition("-")[0] == name), None)
    return None


def _note(record: logging.LogRecord) -> bool:
    if record.levelno >= logging.ERROR and isinstance(record.args, tuple) and record.args:
        error = record.exc_info[1] if record.exc_info else None
        _keep(f"{record.args[0]} {NO_TEXT if error is None else ' '.join(str(error).split())}\n")
    return logging.getLogger().isEnabledFor(logging.DEBUG)


def _keep(line: str) -> None:
    with suppress(OSError, KeyError), open(os.environ[ENVIRONMENT_NAME], "ab", buffering=0) as file:
        if file.tell() > MAX_FILE_BYTES:
            file.truncate(0)
        file.write(line.encode("utf-8", "backslashreplace"))
