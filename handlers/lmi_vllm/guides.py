"""What vLLM says of a client's structure that it cannot follow: the client's own fault, in one line.

vLLM ends such a request with the word "error" and explains it only in its log, at ERROR. Here the loggers that explain
are listened to, by their names and never by their texts: the cause goes to the request, the lines to our DEBUG. Known
of vLLM: names of modules, which are those of its loggers, as of vLLM 0.30 to 0.33.
"""

from __future__ import annotations

import logging
import re
from collections import deque

from lmi.errors import shorten

RULE = "guided_decoding_params must be a structure that vLLM can follow"
COMPILER = "vllm.v1.structured_output"  # its lines have the request's id as their first argument
TELLING = (COMPILER, "vllm.v1.structured_output.backend_xgrammar", "vllm.v1.structured_output.backend_guidance")
PLACE = re.compile(r"\[[0-9:]+\] \S+:[0-9]+: ")  # where in the compiler's own code: [04:07:14] /x/regex.cc:83:
MAX_CAUSE = 300  # characters

_causes: deque[tuple[str, str]] = deque(maxlen=256)  # of this process: vLLM's id of the request, what was wrong


def listen() -> None:
    """Call before vLLM's first request, in every process of its engine."""
    for name in TELLING:
        logging.getLogger(name).addFilter(_note)


def refusal(error: Exception | str) -> str:
    """One line for the client."""
    said = PLACE.sub("", " ".join(str(error).split()))
    return f"{RULE}: {shorten(said, MAX_CAUSE)[1:-1]}"


def refusal_of(name: str) -> str:
    """The same for a request that vLLM gave up; `name` is the id that we gave it."""
    causes = (cause for inner_id, cause in _causes if inner_id.rpartition("-")[0] == name)
    return refusal(next(causes, "no text fits it"))


def _note(record: logging.LogRecord) -> bool:
    if record.name == COMPILER and record.exc_info and record.exc_info[1] and isinstance(record.args, tuple):
        _causes.append((str(record.args[0]), str(record.exc_info[1])))
    return logging.getLogger().isEnabledFor(logging.DEBUG)
