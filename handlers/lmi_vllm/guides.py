"""Finds the reason why vLLM could not follow a client's structure, so that the client reads it in one line.

vLLM ends such a request with the word "error" and gives the cause only in its log, at ERROR. This module listens to
those loggers. It gives the cause to the request and shows the line only at DEBUG. Another process of the engine may
compile the structure, so causes are kept in a file in memory, whose path every process inherits. The module relies on
the names of vLLM's loggers, never on their texts, and on the request's id as the first argument of a line. Written
against vLLM 0.30 to 0.33.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress

from lmi.errors import shorten

ENVIRONMENT_NAME = "LMI_VLLM_GUIDES"
FIELD = "guided_decoding_params"
RULE = "must be a structure that vLLM can follow"
REPORTING = tuple(f"vllm.v1.structured_output{name}" for name in ("", ".backend_xgrammar", ".backend_guidance"))
NO_TEXT = "no text fits it"
PLACE = re.compile(r"\[[0-9:]+\] \S+:[0-9]+: ")  # a line of the compiler's code: [04:07:14] /x/regex.cc:83:
MAX_CAUSE = 300  # characters
MAX_FILE_BYTES = 1 << 20  # then the file is emptied: a cause is read a moment after it was noted


def begin() -> None:
    """Keep causes from now on, for this process and those that it starts."""
    fd = os.memfd_create("guides", os.MFD_CLOEXEC)
    os.environ[ENVIRONMENT_NAME] = f"/proc/{os.getpid()}/fd/{fd}"


def listen() -> None:
    """Start listening. Every process of the engine calls this before its first request."""
    for name in REPORTING:
        logging.getLogger(name).addFilter(_note)


def refusal(cause: Exception | str) -> str:
    """One line for the client that says why the structure was refused."""
    said = PLACE.sub("", " ".join(str(cause).split()))
    return f"{RULE}: {shorten(said, MAX_CAUSE)[1:-1]}"


def cause_of(name: str) -> str | None:
    """The reason why vLLM gave up the sequence `name`, or None if its structure was not the cause."""
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
