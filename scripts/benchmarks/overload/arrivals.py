"""When open-loop clients come: drawn from a seed before a phase begins, whatever the server does meanwhile."""

from __future__ import annotations

import random


def poisson(rate: float, seconds: float, seed: str) -> list[float]:
    """Times in seconds, ascending, of arrivals that come independently at `rate` a second."""
    draw, times, now_s = random.Random(seed), [], 0.0
    while rate > 0 and (now_s := now_s + draw.expovariate(rate)) < seconds:
        times.append(now_s)
    return times


def burst(rate: float, seconds: float, num_at_once: int, at_s: float, seed: str) -> list[float]:
    """Poisson arrivals, and `num_at_once` more at the time `at_s`."""
    return sorted(poisson(rate, seconds, seed) + [at_s] * num_at_once)
