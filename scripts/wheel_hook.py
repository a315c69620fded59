"""Puts the native kernels into the wheel, and the platform that they need into its name.

Where there is no compiler for them, the wheel has none and fits every platform; the embedded engine
then computes with torch. hatchling loads this file, which pyproject.toml names.
"""

import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# 2.28: what torch's own wheels need
MIN_GLIBC = 28
# GLIBCXX_3.4.n comes with systems of glibc 2.n
GLIBC_OF_LIBSTDCXX = {
    24: 28,
    28: 31,
    29: 34,
    30: 35,
    33: 39,
}


class NativeKernels(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            # Runs from the source tree, where scripts/install builds them
            return

        root = Path(self.root)
        command = [sys.executable, str(root / "scripts" / "build-native")]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode > 1:
            raise RuntimeError("the native kernels do not compile, see above")

        if done.returncode == 1:
            return

        libraries = [Path(line) for line in done.stdout.splitlines()]
        build_data["artifacts"] += [f"/{path.relative_to(root).as_posix()}" for path in libraries]
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag([path.read_bytes() for path in libraries])}"


def platform_tag(libraries: list[bytes]) -> str:
    """The oldest platform that has every version of a symbol that the libraries name."""
    minors = [MIN_GLIBC]
    for content in libraries:
        minors += [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", content)]
        minors += [glibc_with(int(minor)) for minor in re.findall(rb"GLIBCXX_3\.4\.(\d+)", content)]

    return f"manylinux_2_{max(minors)}_{platform.machine()}"


def glibc_with(libstdcxx: int) -> int:
    candidates = [glibc for newest, glibc in GLIBC_OF_LIBSTDCXX.items() if libstdcxx <= newest]
    if not candidates:
        raise RuntimeError(
            f"no platform is known to have GLIBCXX_3.4.{libstdcxx}, which the native kernels need"
        )

    return min(candidates)
