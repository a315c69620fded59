"""A process that holds one engine and runs bursts of requests on it, when it is told to.

    python -m scripts.benchmarks.peers.worker ENGINE SETTINGS

SETTINGS is the JSON object of the engine's arguments. Each line of the input is a `Burst` as JSON, each line of the
output its `Outcome`. The first line of the output says that the engine is ready. It runs in the venv of its engine, so
it imports only the standard library.
"""

import dataclasses
import importlib
import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

Sampling: TypeAlias = Mapping[str, float]
ENGINES = {  # by name: the module and the class
    "lmi": "scripts.benchmarks.peers.lmi_engine:Lmi",
    "openvino": "scripts.benchmarks.peers.openvino_engine:OpenVino",
    "vllm": "scripts.benchmarks.peers.vllm_engine:Vllm",
    "server": "scripts.benchmarks.peers.server_engine:ServedEngine",
}


SAMPLED = {"temperature": 0.8, "top_p": 0.95}


@dataclass(frozen=True)
class Burst:
    """Requests that are sent at once."""

    num_streams: int
    num_prompt: int  # tokens of each prompt
    num_new: int  # tokens that each makes
    vocab_size: int
    seed: int
    num_shared: int = 0  # tokens that all prompts begin with
    is_warm: bool = False  # a request with the shared tokens has been answered before
    is_sampled: bool = False  # as SAMPLED says; else greedy

    def prompts(self) -> list[list[int]]:
        draw = random.Random(self.seed)
        shared = self._tokens(draw, self.num_shared)
        return [shared + self._tokens(draw, self.num_prompt - self.num_shared) for _ in range(self.num_streams)]

    def _tokens(self, draw: random.Random, number: int) -> list[int]:
        return [draw.randrange(300, self.vocab_size) for _ in range(number)]  # above those with a meaning


@dataclass(frozen=True)
class Outcome:
    num_tokens: int
    seconds: float
    first_s: list[float]  # from the start of the burst to the first token, of each request
    waited: float  # share of its time that the engine was ready to run and had no core


class Engine(Protocol):
    def run(
        self, prompts: Sequence[list[int]], num_new: int, reuses: bool, sampling: Sampling
    ) -> tuple[int, float, list[float]]:
        """Answer all at once; the number of tokens, the seconds, and those to each first token.

        With `reuses` the engine must look for shared starts of prompts, if it can. Without `sampling` it is greedy.
        """

    def pids(self) -> list[int]:
        """The processes that compute."""


class Meter:
    """How long the threads of some processes ran, and how long they waited for a core, from when it is made."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._before = self._now()

    def _now(self) -> tuple[int, int]:
        fields = []
        for file in [task / "schedstat" for pid in self._pids for task in Path(f"/proc/{pid}/task").iterdir()]:
            with suppress(OSError):  # a thread that has just ended
                fields.append(file.read_text().split())
        return sum(int(each[0]) for each in fields), sum(int(each[1]) for each in fields)

    def waited(self) -> float:
        (ran_from, waited_from), (ran_to, waited_to) = self._before, self._now()
        waited_ns = max(0, waited_to - waited_from)
        return waited_ns / max(1, ran_to - ran_from + waited_ns)


def run(engine: Engine, burst: Burst) -> Outcome:
    prompts = burst.prompts()
    if burst.is_warm:
        engine.run([prompts[0][: burst.num_shared]], 1, reuses=True, sampling={})
    meter = Meter(engine.pids())
    sampling = SAMPLED if burst.is_sampled else {}
    num_tokens, seconds, first_s = engine.run(prompts, burst.num_new, burst.num_shared > 0, sampling)
    return Outcome(num_tokens, seconds, first_s, meter.waited())


def main() -> None:
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what engines print is not an answer
    module, _, name = ENGINES[sys.argv[1]].partition(":")
    began_s = time.monotonic()
    engine: Engine = getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))
    print(json.dumps({"ready_s": time.monotonic() - began_s}), file=output)
    try:
        for line in sys.stdin:
            print(json.dumps(dataclasses.asdict(run(engine, Burst(**json.loads(line))))), file=output)
    finally:
        if hasattr(engine, "close"):
            engine.close()


if __name__ == "__main__":
    main()
