"""Hides builds of other libraries that break vLLM on a CPU.

The CPU build of vLLM needs torch's CPU build, but accepts any version of torchvision, torchaudio and torchcodec. An
installer picks their CUDA builds, whose import fails beside that torch. vllm and transformers do not need the three for
text, but import those that are installed. A module that is None in `sys.modules` counts as missing, for imports and for
`find_spec`. This module reads only the metadata of distributions and imports none of them.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
CPU_TAG = "cpu"  # of 2.13.0+cpu

log = logging.getLogger("lmi.vllm")


def hide_foreign_builds() -> tuple[str, ...]:
    """Hide packages that would break the import of vllm, and return their names.

    Call this before the first import of vllm or transformers. It does nothing if all builds fit together.
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
        return version(distribution)
    return None


def _tag(text: str) -> str:
    """The build tag of a version, which follows the +."""
    return text.partition("+")[2]
