"""Whether vLLM compiles a model, and where what it has compiled lies."""

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from handlers.lmi_vllm.about import cache_folder, can_write
from lmi.settings.kinds import is_true

# Variables of a process that compiles. vLLM's ahead-of-time artifact of a model can be written but
# not read back on a CPU. Writing it, and failing to read it, costs seconds at each start. torch's
# cache of kernels is enough.
COMPILED = {"VLLM_USE_AOT_COMPILE": "0"}
# Variables of one that does not. Else vLLM compiles a function of its sampler all the same, which
# delays the first log-prob by ten seconds.
EAGER = {"TORCHDYNAMO_DISABLE": "1"}


def is_eager(options: Mapping[str, str]) -> bool:
    """Whether vLLM runs a model without compiling it: as option.enforce_eager says, else where
    torch's switch is set or this machine cannot compile.
    """
    text = options.get("enforce_eager")
    if text is not None:
        return is_true(text, otherwise=True)

    is_disabled = os.environ.get("TORCHDYNAMO_DISABLE", "0") not in ("", "0")
    return is_disabled or why_no_compiler() is not None


def why_no_compiler(headers: str = sysconfig.get_path("include")) -> str | None:
    """Return why this machine cannot compile as vLLM does by default, or None if it can.

    `headers` is the folder of Python's.
    """
    # torch takes the same one.
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler}"

    header = Path(headers, "Python.h")
    if header.is_file():
        return None

    return f"{header} is not there, which belongs to Python's headers"


def compiler_variables(options: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch and vLLM read at their import."""
    if is_eager(options):
        return EAGER

    # The next start finds kernels beside vLLM's other caches; torch's default is a temporary
    # folder.
    folder = os.path.join(cache_folder(os.environ), "torchinductor")
    if can_write(folder):
        return {**COMPILED, "TORCHINDUCTOR_CACHE_DIR": folder}

    return COMPILED
