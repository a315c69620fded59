"""Whether vLLM compiles the model on a CPU, and where the compiled kernels are kept.

vLLM compiles by default. That needs a C++ compiler and Python's headers. If one of them is missing, or torch's switch
turns compilation off, the model runs eagerly. This module does not import torch. Written against vLLM 0.30 to 0.33.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

# vLLM's ahead-of-time artifact of a model can be written but not read back on a CPU. Writing it, and failing to read
# it, costs seconds at each start. torch's cache of kernels is enough.
COMPILED = {"VLLM_USE_AOT_COMPILE": "0"}
# vLLM compiles a function of its sampler in eager mode too, which delays the first log-prob by ten seconds.
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
OFF = ("false", "0", "no", "off")


def is_eager(options: Mapping[str, str]) -> bool:
    """The value of option.enforce_eager. Without it, whether torch's switch is set or this machine cannot compile."""
    if (given := options.get("enforce_eager")) is not None:
        return given.lower() not in OFF
    return os.environ.get("TORCHDYNAMO_DISABLE", "0") not in ("", "0") or missing() is not None


def missing(headers: str = sysconfig.get_path("include")) -> str | None:
    """The reason why this machine cannot compile, or None. torch uses the compiler in CXX, else g++.

    `headers` is the folder of Python's headers.
    """
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler}"
    header = Path(headers, "Python.h")
    return None if header.is_file() else f"{header} is not there, which belongs to Python's headers"


def environment(options: Mapping[str, str]) -> dict[str, str]:
    """The variables that torch and vLLM read when they are imported."""
    if is_eager(options):
        return EAGER
    folder = cache_folder()
    return COMPILED | ({"TORCHINDUCTOR_CACHE_DIR": str(folder)} if folder else {})


def cache_folder() -> Path | None:
    """A folder beside vLLM's other caches, where the next start finds it. torch's default is a temporary folder.

    Returns None if this user cannot write there.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(os.environ.get("VLLM_CACHE_ROOT") or Path(home, "vllm"), "torchinductor")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None
