"""What a test may ask the double to do that a sound engine does not, or does at another time.

    with knobs(finish_after_abort="never"):
        ...

The environment variable LMI_TRTLLM_DOUBLE holds them as JSON, for a server's process too. In place
of JSON it may name a file of JSON, "@/path": a test then turns the knobs of a process that runs.
The engine reads them at each step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

VARIABLE = "LMI_TRTLLM_DOUBLE"


class Knobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The defaults are those of a sound engine."""

    # The least time of a step
    step_s: float = 0.0005
    # The requests of a step are told in reverse
    is_reversed: bool = False
    # More than one where drafts are accepted
    tokens_per_step: int = 1
    # A process for each rank, as MPI starts them; the engine falls silent when one ends
    has_workers: bool = False
    # The reason for which a start fails
    start_error: str = ""
    finish_after_abort: Literal["next step", "late", "never"] = "next step"
    late_steps: int = 50
    # The reason for which the engine ends now
    dies: str = ""
    dies_after_steps: int | None = None
    # It makes no step and reports nothing
    hangs: bool = False
    # Failed requests that the engine survives; None: any number
    error_budget: int | None = None
    # "dropped": its log-prob stays
    end_token: Literal["kept", "dropped", "dropped whole"] = "kept"
    # Of each position: its best tokens, or only the chosen one's
    log_prob_form: Literal["dicts", "floats"] = "dicts"
    # Missing if the token is not among the asked best
    chosen_log_prob: Literal["there", "missing"] = "there"
    # Parts of the statistics that are absent
    missing_stats: tuple[str, ...] = ()


def current() -> Knobs:
    """The knobs as the environment has them now."""
    return _parsed(os.environ.get(VARIABLE, ""))


@contextmanager
def knobs(**values: Any) -> Iterator[None]:
    """Turn knobs in this process."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = encoded(**values)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def encoded(**values: Any) -> str:
    """The text of the environment variable, e.g. for a process that is started later."""
    return msgspec.json.encode(Knobs(**values)).decode()


_last: tuple[str, Knobs] = ("", Knobs())


def _parsed(text: str) -> Knobs:
    global _last
    if text.startswith("@"):
        text = Path(text[1:]).read_text()

    if text != _last[0]:
        _last = text, msgspec.json.decode(text, type=Knobs) if text else Knobs()

    return _last[1]
