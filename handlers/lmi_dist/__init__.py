"""The embedded executor: continuous batching of decoder-only checkpoints, in C++ on CPUs and in torch elsewhere.

torch is imported where a model needs it: on a GPU, and for families that our programs do not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handlers.lmi_dist.executor import EmbeddedExecutor
    from lmi.executor import Progress
    from lmi.settings.config import EngineConfig

__all__ = ["Executor", "load"]


def load(config: EngineConfig, model_path: str, progress: Progress) -> EmbeddedExecutor:
    """Entry point of the handler `lmi-dist`."""
    from handlers.lmi_dist.executor import EmbeddedExecutor

    return EmbeddedExecutor(model_path, config, progress=progress)


def __getattr__(name: str) -> Any:
    if name != "Executor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from handlers.lmi_dist.executor import EmbeddedExecutor

    return EmbeddedExecutor
