"""The versions of TensorRT-LLM, and what each has."""

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

# A value of the argument sampler_type, and its default.
CPP_SAMPLER = "TRTLLMSampler"
AUTO = "auto"
NUMBERS = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:rc(\d+))?")


@dataclass(frozen=True, slots=True)
class Profile:
    """What one version has."""

    # The version.
    name: str
    # Whether generate_async has an argument for it.
    takes_priority: bool
    # Whether it has a C++ sampler beside the Torch sampler. The latter ignores seeds, min_p,
    # penalties and no_repeat_ngram_size then, and of a prompt it reports the log-probs of the best
    # tokens, not those of the prompt's own.
    has_cpp_sampler: bool
    # Whether the C++ sampler searches beams where nobody chose a sampler. Then 0 asks for no
    # log-probs.
    has_cpp_beams: bool


def installed(generate_async: Callable[..., object]) -> Profile:
    """Return the profile of the installed package, whose method this is.

    Raises PackageNotFoundError.
    """
    takes_priority = "priority" in inspect.signature(generate_async).parameters
    return of_version(version("tensorrt_llm"), takes_priority=takes_priority)


def of_version(text: str, *, takes_priority: bool) -> Profile:
    """Return the profile of a version. Raises ValueError for a text that names none.

    1.3.0rc26 is the first of which a page says that the Torch sampler is the only one.
    """
    match = NUMBERS.match(text)
    if match is None:
        raise ValueError(f"{text!r} is no version of TensorRT-LLM")

    major, minor, patch, candidate = match.groups()
    # A release follows all of its candidates.
    candidate_number = math.inf if candidate is None else int(candidate)
    number = (int(major), int(minor), int(patch or 0), candidate_number)

    return Profile(
        text,
        takes_priority,
        has_cpp_sampler=number < (1, 3, 0, 26),
        has_cpp_beams=number < (1, 3, 0, 0),
    )
