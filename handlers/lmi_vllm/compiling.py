"""Whether vLLM compiles the model on a CPU, and where the compiled kernels are kept.

vLLM's own default is to compile. That needs a C++ compiler and Python's headers; where one of them is missing, or where
torch's own switch says so, the model runs eagerly. Nothing here imports torch. Written against vLLM 0.30 to 0.33.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

# vLLM's ahead-of-time artifact of a model can be written but not read back on a CPU: writing it, and failing to read
# it, costs seconds of each start. torch's cache of kernels does the work without it.
COMPILED = {"VLLM_USE_AOT_COMPILE": "0"}
# vLLM compiles a function of its sampler in eager mode too: ten seconds at the first log-prob.
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
OFF = ("false", "0", "no", "off")


def is_eager(options: Mapping[str, str]) -> bool:
    """What option.enforce_eager says; without it, whether torch's switch is set or something is missing here."""
    if (given := options.get("enforce_eager")) is not None:
        return given.lower() not in OFF
    return os.environ.get("TORCHDYNAMO_DISABLE", "0") not in ("", "0") or missing() is not None


def missing() -> str | None:
    """What would be needed to compile and is not here. torch takes the compiler that CXX names, else g++."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler}"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return None if header.is_file() else f"{header} is not there, which belongs to Python's headers"


def environment(options: Mapping[str, str]) -> dict[str, str]:
    """The variables that torch and vLLM read when they are imported."""
    if is_eager(options):
        return EAGER
    folder = cache_folder()
    return COMPILED | ({"TORCHINDUCTOR_CACHE_DIR": str(folder)} if folder else {})


def cache_folder() -> Path | None:
    """Beside vLLM's other caches, where the next start finds it; torch's own choice is a folder for temporary files.

    None where this user cannot write there.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(os.environ.get("VLLM_CACHE_ROOT") or Path(home, "vllm"), "torchinductor")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None
