"""What the releases of TensorRT-LLM that this handler supports do differently.

It does not import tensorrt_llm. The version of the installed package decides, candidates of a release included, and
where a signature says it, the signature. The facts come from the published sources of main of October 2025, those of
main of August 2026, pages of 1.3.0rc24 and rc26, and pull requests between them; none is of a release.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

CPP_SAMPLER = "TRTLLMSampler"  # a value of the argument sampler_type
AUTO = "auto"  # the value by default
NUMBERS = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:rc(\d+))?")


@dataclass(frozen=True, slots=True)
class Profile:
    """What one version has."""

    name: str  # the version
    takes_priority: bool  # as an argument of generate_async
    has_cpp_sampler: bool  # beside the Torch sampler
    has_cpp_beams: bool  # whether the C++ sampler searches beams where nobody chose a sampler
    has_rules: bool  # whether the Torch sampler reads seeds, min_p, penalties and no_repeat_ngram_size
    min_log_probs: int  # the smallest number that asks for any log-probs: those of the chosen tokens
    names_prompt_tokens: bool  # whether log-probs of the prompt have the prompt's own tokens, not only the best


def installed(generate_async: Callable[..., object]) -> Profile:
    """The profile of the installed package, whose method this is. Raises PackageNotFoundError."""
    return of_version(
        version("tensorrt_llm"), takes_priority="priority" in inspect.signature(generate_async).parameters
    )


def of_version(text: str, *, takes_priority: bool) -> Profile:
    """1.3.0rc26 is the first version of which a page says that the Torch sampler is the only one.

    Before it, a 1.3 may ignore rules that it accepts, so none counts as read.
    """
    number = _number(text)
    is_new = number >= (1, 3, 0, 26)
    is_old = number < (1, 3, 0, 0)
    return Profile(
        text,
        takes_priority=takes_priority,
        has_cpp_sampler=not is_new,
        has_cpp_beams=is_old,
        has_rules=is_new,
        min_log_probs=int(is_old),
        names_prompt_tokens=is_new,
    )


def _number(text: str) -> tuple[float, ...]:
    """(major, minor, patch, candidate); a release follows all of its candidates. Raises ValueError."""
    found = NUMBERS.match(text)
    if found is None:
        raise ValueError(f"{text!r} is no version of TensorRT-LLM")
    major, minor, patch, candidate = found.groups()
    return int(major), int(minor), int(patch or 0), math.inf if candidate is None else int(candidate)
