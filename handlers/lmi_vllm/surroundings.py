"""What must be so in this process and in those that vLLM starts from it before vllm is imported.

vLLM reads its environment as it is imported. Its processes are spawned, never forked, and run this module as their
main one: there they hide what breaks an import, and die with their parent, which vLLM leaves to chance.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
from importlib.metadata import version

from handlers.lmi_vllm.masking import hide_foreign_builds
from lmi.config import EngineConfig

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CONFIGURE_LOGGING": "0",  # its lines go through our root logger
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}

# vLLM compiles one function of its sampler even then: ten seconds at the first log-prob, and a compiler must be there.
EAGER_ON_CPU = {"TORCHDYNAMO_DISABLE": "1"}


def prepare(config: EngineConfig | None = None) -> None:
    """Call before the first import of vllm. What the user has set stays."""
    is_eager = config is None or config.options.get("enforce_eager", "true").lower() != "false"
    for name, value in {**ENVIRONMENT, **(EAGER_ON_CPU if is_eager and version("torch").endswith("+cpu") else {})}.items():
        os.environ.setdefault(name, value)
    hide_foreign_builds()
    sys.modules["__main__"].__spec__ = importlib.util.find_spec(__name__)
    logging.getLogger("vllm").setLevel(logging.NOTSET)


def _in_child() -> None:
    import lmi.log
    from lmi import processes

    processes.die_with_parent(os.getppid(), signal.SIGKILL)
    hide_foreign_builds()
    lmi.log.setup(os.environ.get("LMI_ROLE", "engine"), os.environ.get("VLLM_LOGGING_LEVEL", "INFO"))


if __name__ == "__mp_main__":
    _in_child()
