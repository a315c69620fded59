"""The vLLM engine behind the Executor contract. To import this package imports no vllm; to name
`Executor` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handlers.lmi_vllm.executor import Follower, VllmExecutor
    from lmi.executor import Progress
    from lmi.settings.config import EngineConfig

__all__ = ["Executor", "load"]


def load(config: EngineConfig, model_path: str, progress: Progress) -> VllmExecutor | Follower:
    """Entry point of the handler `vllm`."""
    from handlers.lmi_vllm import process_setup

    process_setup.prepare(config)
    with process_setup.collecting_no_garbage():
        process_setup.calm_torch()
        from handlers.lmi_vllm.executor import Follower, VllmExecutor

    if int(config.options.get("node_rank") or 0) > 0:
        return Follower(model_path, config, progress)

    return VllmExecutor(model_path, config, progress=progress)


def __getattr__(name: str) -> Any:
    if name != "Executor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    from handlers.lmi_vllm import process_setup

    process_setup.prepare()
    with process_setup.collecting_no_garbage():
        from handlers.lmi_vllm.executor import VllmExecutor

    return VllmExecutor
