"""The threads of a step: their number, other callers, forks, signals, and the end of
the process.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from handlers.lmi_dist.native.model import NativeModel
from handlers.lmi_dist.native.records import BF16, F32, INT8
from tests.handlers.lmi_dist.native.builds import library, variants
from tests.handlers.lmi_dist.native.models import llama, num_blocks_of, packed, run_whole

ROOT = Path(__file__).parents[4]
DEADLINE_S = 120
IDS = [index * 7 % 96 for index in range(200)]
TABLE = list(range(num_blocks_of(len(IDS))))


def model_with(num_threads: int, *, seed: int = 0, format: int = F32) -> NativeModel:
    kernels = library(variants()[0])
    return NativeModel(kernels, packed(kernels, llama(seed=seed), format), len(TABLE), num_threads)


def logits_of(model: NativeModel) -> Tensor:
    return run_whole(model, IDS, TABLE)


def helpers() -> list[Path]:
    """The threads of this process that belong to the kernels, by their folders in /proc."""
    return [task for task in Path("/proc/self/task").iterdir() if name_of(task) == "lmi-kernels\n"]


def name_of(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except OSError:
        # Another thread of this process, which has ended meanwhile
        return ""


def until(condition: Callable[[], bool]) -> None:
    """Wait for it: a thread that has just been made has neither run nor its name yet."""
    deadline = time.monotonic() + DEADLINE_S / 2
    while not condition():
        assert time.monotonic() < deadline


def state_of(task: Path) -> list[str]:
    """What a thread does, `S` if it sleeps, and the CPU time that it has used."""
    fields = (task / "stat").read_text().rpartition(")")[2].split()
    return [fields[0], *fields[11:13]]


def run_in_a_process(work: Callable[[], None]) -> None:
    """Run a function of this file in a process of its own, which must end by itself and without a
    word.
    """
    command = [sys.executable, "-c", f"from {__name__} import {work.__name__}; {work.__name__}()"]
    done = subprocess.run(command, cwd=ROOT, timeout=DEADLINE_S, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize("format", [F32, BF16, INT8], ids=["f32", "bf16", "int8"])
def test_any_number_of_threads_gives_the_same_bits(format: int) -> None:
    expected = logits_of(model_with(1, format=format))
    for num_threads in (2, 3, 8, 40):
        model = model_with(num_threads, format=format)
        assert all(torch.equal(logits_of(model), expected) for _ in range(5))


def test_steps_of_several_models_at_once_each_have_the_right_bits() -> None:
    expected = [logits_of(model_with(1, seed=seed)) for seed in range(3)]
    models = [model_with(3, seed=seed) for seed in range(3)]
    start = threading.Barrier(3)

    def is_right(index: int) -> bool:
        start.wait(DEADLINE_S)
        return all(torch.equal(logits_of(models[index]), expected[index]) for _ in range(100))

    with ThreadPoolExecutor(3) as callers:
        assert list(callers.map(is_right, range(3))) == [True] * 3


def test_threads_that_have_nothing_to_do_sleep_and_use_no_cpu() -> None:
    logits_of(model_with(4))
    until(lambda: len(helpers()) >= 3)
    tasks = helpers()
    until(lambda: all(state_of(task)[0] == "S" for task in tasks))
    before = [state_of(task) for task in tasks]
    assert not threading.Event().wait(0.3)
    assert [state_of(task) for task in tasks] == before


def test_signals_of_the_process_are_not_handled_on_threads_of_the_kernels() -> None:
    logits_of(model_with(2))
    until(lambda: len(helpers()) >= 1)
    for task in helpers():
        lines = (task / "status").read_text().splitlines()
        blocked = int(next(line for line in lines if line.startswith("SigBlk:")).split()[1], 16)
        assert all(
            blocked >> (number - 1) & 1
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        )
        assert not blocked >> (signal.SIGSEGV - 1) & 1, "a fault must reach its handler"


def fork_and_run() -> None:
    model = model_with(3)
    expected = logits_of(model)
    until(lambda: len(helpers()) == 2)
    child = os.fork()
    if child == 0:
        # Ends a child that waits for threads that it does not have
        signal.alarm(DEADLINE_S // 2)
        is_right = helpers() == [] and torch.equal(logits_of(model), expected)
        until(lambda: len(helpers()) == 2)
        os._exit(0 if is_right else 1)

    assert torch.equal(logits_of(model), expected)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_runs_steps_on_threads_of_its_own_and_its_parent_goes_on() -> None:
    run_in_a_process(fork_and_run)


def run_where_no_thread_can_begin() -> None:
    expected = logits_of(model_with(1))
    model = model_with(8)
    num_before = len(os.listdir("/proc/self/task"))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # A thread's stack is larger
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), resource.RLIM_INFINITY))
    assert torch.equal(logits_of(model), expected)
    assert len(os.listdir("/proc/self/task")) == num_before
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert torch.equal(logits_of(model), expected)
    until(lambda: len(helpers()) == 7)


def test_a_step_runs_on_the_threads_that_there_are_where_the_system_gives_no_more() -> None:
    run_in_a_process(run_where_no_thread_can_begin)
