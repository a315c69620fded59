"""Tells errors of exhausted memory from others."""

from __future__ import annotations


def is_out_of_memory(error: Exception) -> bool:
    """Whether the host or the device ran out of memory. torch's own errors are known by their names and texts."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
