"""The variants of the native library: those that are built, and the one that this CPU takes.

This module imports no torch, so that `lmi version` is quick.
"""

import platform
from pathlib import Path

FOLDER = Path(__file__).parent
PREFIX, SUFFIX = "lmi_kernels-", ".so"
X86_64_V3 = frozenset("avx2 bmi1 bmi2 fma f16c abm movbe".split())  # as /proc/cpuinfo names them
X86_64_V4 = X86_64_V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())


def file_of(variant: str, folder: Path = FOLDER) -> Path:
    return folder / f"{PREFIX}{variant}{SUFFIX}"


def built(folder: Path = FOLDER) -> list[str]:
    """The variants whose library is there."""
    names = (file.name for file in folder.glob(f"{PREFIX}*{SUFFIX}"))
    return sorted(name.removeprefix(PREFIX).removesuffix(SUFFIX) for name in names)


def of_this_cpu() -> str | None:
    """The variant that this CPU takes, or None where there is none for it."""
    if platform.system() != "Linux":
        return None
    return of_cpu(platform.machine(), _flags())


def of_cpu(machine: str, flags: frozenset[str]) -> str | None:
    """The variant for a machine, as `uname -m` names it, with these features."""
    if machine == "aarch64":
        return "aarch64"
    if machine != "x86_64":
        return None
    return "x86-64-v4" if flags >= X86_64_V4 else "x86-64-v3" if flags >= X86_64_V3 else None


def _flags() -> frozenset[str]:
    """The features that the first core of this machine reports."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def describe(folder: Path = FOLDER, wanted: str | None = None) -> str:
    """What computes on this CPU, or on one that takes `wanted`, and which variants are built."""
    wanted, names = wanted or of_this_cpu(), built(folder)
    there = f"built: {', '.join(names) or 'none'}"
    if wanted is None:
        return f"kernels torch ({there}; none is for this CPU)"
    return f"kernels native {wanted} ({there})" if wanted in names else f"kernels torch ({there}; this CPU: {wanted})"
