"""TensorRT-LLM's PyTorch engine behind the Executor contract, never run on the package. Only
`Executor` imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handlers.lmi_trtllm.executor import TrtllmExecutor
    from lmi.executor import Progress
    from lmi.settings.config import EngineConfig

__all__ = ["Executor", "load"]


def load(config: EngineConfig, model_path: str, progress: Progress) -> TrtllmExecutor:
    """Entry point of the handler `trtllm`. Raises StartError."""
    try:
        from handlers.lmi_trtllm.executor import TrtllmExecutor
    # TensorRT-LLM loads its native libraries as it is imported, and they may raise each of these.
    except (ImportError, OSError, RuntimeError) as error:
        from handlers.lmi_trtllm.start_errors import explained

        raise explained(error, model_path, config) from error

    return TrtllmExecutor(model_path, config, progress=progress)


def __getattr__(name: str) -> Any:
    if name != "Executor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    from handlers.lmi_trtllm.executor import TrtllmExecutor

    return TrtllmExecutor
