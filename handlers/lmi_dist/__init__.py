"""The embedded executor: continuous batching of decoder-only checkpoints, in C++ on CPUs and in
torch elsewhere.

torch is imported where a model needs it: on a GPU, and for families that our programs do not know.
"""

from typing import Any

__all__ = ["Executor"]


def __getattr__(name: str) -> Any:
    if name != "Executor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    from handlers.lmi_dist.executor import EmbeddedExecutor

    return EmbeddedExecutor
