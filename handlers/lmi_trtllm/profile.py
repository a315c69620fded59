"""What the lines of TensorRT-LLM that this handler supports do differently.

It does not import tensorrt_llm: the line is read from the version of the installed package. The facts come from the
published sources and pages of both lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

CPP_SAMPLER = "TRTLLMSampler"  # a value of the argument sampler_type


@dataclass(frozen=True, slots=True)
class Profile:
    """One line of releases."""

    name: str
    takes_priority: bool  # as an argument of generate_async
    has_cpp_sampler: bool  # beside the Torch sampler, which is the default of both lines
    has_rules: bool  # whether the Torch sampler reads seeds, min_p, penalties and no_repeat_ngram_size
    min_log_probs: int  # the smallest number that asks for any log-probs: those of the chosen tokens
    names_prompt_tokens: bool  # whether log-probs of the prompt have the prompt's own tokens, not only the best


V1_2 = Profile(
    "1.2",
    takes_priority=False,
    has_cpp_sampler=True,
    has_rules=False,
    min_log_probs=1,
    names_prompt_tokens=False,
)
MAIN = Profile(
    "main",
    takes_priority=True,
    has_cpp_sampler=False,
    has_rules=True,
    min_log_probs=0,
    names_prompt_tokens=True,
)


def installed() -> Profile:
    """The line of the installed package. Raises PackageNotFoundError."""
    return of_version(version("tensorrt_llm"))


def of_version(text: str) -> Profile:
    major, minor = (int(part) for part in text.split(".")[:2])
    return V1_2 if (major, minor) < (1, 3) else MAIN
