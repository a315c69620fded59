"""Engines that fail while they load, announced by a package."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from contextlib import suppress

from handlers import echo
from handlers.base.stepped import Step
from handlers.base.token_sequence import TokenSequence
from lmi.errors import ModelUnusable, SecurityRefused
from lmi.executor import Executor, Progress
from lmi.settings.config import EngineConfig


def slow(config: EngineConfig, model_path: str, progress: Progress) -> Executor:
    for tenth in range(11):
        progress("weights", tenth / 10)
        time.sleep(float(config.options.get("load_s", "1")) / 10)

    return echo.load(config, model_path, progress)


def freezing(config: EngineConfig, model_path: str, progress: Progress) -> Executor:
    progress("weights", 0.5)
    threading.Event().wait()
    raise AssertionError


def crashing(config: EngineConfig, model_path: str, progress: Progress) -> Executor:
    """Crash at once, or when the file of option.crash_after is there."""
    progress("weights", 0.5)
    while not os.path.exists(config.options.get("crash_after", "/")):
        time.sleep(0.02)

    raise RuntimeError("the weights are cursed")


def broken(config: EngineConfig, model_path: str, progress: Progress) -> Executor:
    progress("weights", 0.5)
    raise ModelUnusable(f"{model_path}/model.safetensors is cut short")


def insecure(config: EngineConfig, model_path: str, progress: Progress) -> Executor:
    raise SecurityRefused("pytorch_model.bin is a pickle, set option.allow_pickle=true to load it")


def lacking(config: EngineConfig, model_path: str, progress: Progress) -> Executor:
    import a_library_that_nobody_has  # type: ignore[import-not-found]

    raise AssertionError(a_library_that_nobody_has)


def talkative(config: EngineConfig, model_path: str, progress: Progress) -> Executor:
    """Print as C++ libraries do, to a descriptor and to C's stream. With the option `abort` the
    process then dies.
    """
    os.write(2, b"[12:00:00] /project/cpp/grammar.cc:83: Warning: \xff \x1b[2J\n")
    ctypes.CDLL(None).puts(b"a line from C")
    print("a line from Python")
    os.write(1, b"x" * 100_000 + b"\n")
    num_bytes_left = int(config.options.get("num_bytes", "0"))
    while num_bytes_left > 0:
        # The pipe is full; some hosts make it small
        with suppress(BlockingIOError):
            num_bytes_left -= os.write(2, b"y\n" * 1000)

    if "abort" in config.options:
        os.write(2, b"F1122 12:00:00.000000 7 check.cc:1] Check failed: last words")
        os.abort()

    return echo.load(config, model_path, progress)


class Toiling(echo.EchoExecutor):
    """Each step that begins with a new request takes option.toil_s, in which it gets a fifth of a
    core.
    """

    def __init__(self, config: EngineConfig, model_path: str) -> None:
        self._toil_s = float(config.options["toil_s"])
        super().__init__(config, model_path)

    def _step(self) -> Step[TokenSequence]:
        if self._waiting:
            toil(self._toil_s)

        return super()._step()


def toil(seconds: float) -> None:
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        rests_s = time.thread_time() + 0.01
        while time.thread_time() < rests_s:
            pass

        time.sleep(0.04)


def toiling(config: EngineConfig, model_path: str, progress: Progress) -> Executor:
    return Toiling(config, model_path)


def exhausted(config: EngineConfig, model_path: str, progress: Progress) -> Executor:
    progress("weights", 0.5)
    raise MemoryError("the device has no room for 16 GiB")
