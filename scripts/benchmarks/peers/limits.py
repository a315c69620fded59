"""What the cores and the memory of this machine allow, as limits.cpp measures it."""

import json
import os
import subprocess
from pathlib import Path

from scripts.benchmarks.peers.contest import say

SOURCE = Path(__file__).with_name("limits.cpp")
COMPILE = ("g++", "-O3", "-march=native", "-std=c++17", "-pthread", "-Wall", "-Wextra")


def measure(folder: Path) -> dict[str, float]:
    """Return GB/s of reads by `read`, and by kind of number GFLOP/s; nothing without a compiler."""
    program = folder / "limits"
    try:
        subprocess.run([*COMPILE, "-o", program, SOURCE], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"left out: what the machine allows: {error}")
        return {}

    num_cores = len(os.sched_getaffinity(0))
    done = subprocess.run([program, str(num_cores)], check=True, capture_output=True, text=True)
    limits: dict[str, float] = json.loads(done.stdout)
    return limits


def highest(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    """Return the higher figures of two runs, for others may use the machine."""
    return {name: max(first.get(name, 0.0), value) for name, value in second.items()}
