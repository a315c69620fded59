"""Tells errors of exhausted memory from others."""

from __future__ import annotations

import torch


def is_out_of_memory(error: Exception) -> bool:
    """Whether the host or the device ran out of memory. On the host, torch's allocator raises a RuntimeError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
