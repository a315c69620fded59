"""One uniform number for each (seed, position): randomness without a state.

A token's number depends only on the seed of its sequence and its index in the output, so neighbours in the batch,
preemption and recomputation cannot change it. The mixing function is splitmix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import secrets

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def fresh_seed() -> int:
    """64 random bits for a request without a seed."""
    return secrets.randbits(64)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 24 bits, exact in float32. Scaled by any total it stays below that total."""
    return (_mix(_mix(seed) + position * _GOLDEN) >> 40) * 2.0**-24


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
