"""A small foreign engine on `handlers/driven/executor.py`. It queues and batches by itself and
answers like echo.

A sequence with an adapter adds the adapter's shift, which is its weights, to the first token of the
answer. An adapter's configuration can make its load slow (`load_s`), or fail for want of memory
(`is_huge`) or in one process (`fails_in`). A sequence that holds `FAULT` fails, and a step raises
while one of its sequences holds `BREAK`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handlers.base.adapters import LoadedAdapter
from handlers.base.configuration import executor_config
from handlers.base.sequence import Sequence
from handlers.driven.engine import EngineLoad, name_of
from handlers.driven.executor import DrivenExecutor
from handlers.driven.outputs import LogProbs, SequenceOutput
from lmi.executor import Capabilities, EngineInfo, FinishReason, KvCacheStats, Progress
from lmi.settings.config import EngineConfig

FAULT = 250
BREAK = 251
MAX_NUM_SEQUENCES = 4
MAX_ADAPTERS = 2
MAX_RANK = 8
STEP_S = 0.002
LOG_PROB = -1.0


@dataclass
class Work:
    id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_left: int
    adapter: LoadedAdapter | None
    has_begun: bool = False


class Engine:
    """The engine of a library."""

    def __init__(self) -> None:
        # Of the adapters that it has, by number
        self.shifts: dict[int, int] = {}
        self._works: dict[str, Work] = {}

    def add(self, work: Work) -> None:
        self._works[work.id] = work

    def abort(self, ids: Iterable[str]) -> None:
        for request_id in list(ids):
            self._works.pop(request_id, None)

    def step(self) -> list[SequenceOutput]:
        time.sleep(STEP_S)
        running = [self._works[request_id] for request_id in self._running]
        if any(BREAK in work.token_ids for work in running):
            raise RuntimeError("the step broke")

        outputs = [self._advance(work) for work in running]
        self.abort(output.id for output in outputs if output.end is not None)
        return outputs

    def _advance(self, work: Work) -> SequenceOutput:
        if FAULT in work.token_ids:
            return SequenceOutput(work.id, [], end=RuntimeError("a fault"))

        shift = 0 if work.adapter is None else self.shifts[work.adapter.number]
        token_id = work.token_ids[-work.num_prompt_tokens] + (0 if work.has_begun else shift)
        num_prompt = 0 if work.has_begun else work.num_prompt_tokens - 1
        log_probs = (
            LogProbs([[0]] * num_prompt, [[LOG_PROB]] * num_prompt) if not work.has_begun else None
        )
        work.token_ids.append(token_id)
        work.num_left, work.has_begun = work.num_left - 1, True
        end = None if work.num_left else FinishReason.LENGTH
        return SequenceOutput(
            work.id, [token_id], LogProbs([[token_id] * 2], [[LOG_PROB] * 2]), log_probs, end
        )

    @property
    def _running(self) -> list[str]:
        return list(self._works)[:MAX_NUM_SEQUENCES]

    def load(self) -> EngineLoad:
        used = len(self._running)
        stats = KvCacheStats(
            max_num_blocks=MAX_NUM_SEQUENCES, used_num_blocks=used, tokens_per_block=512
        )
        return EngineLoad(self._running, kv_cache=stats)

    def wake(self) -> None:
        return None

    def check_adapter(self, adapter: LoadedAdapter) -> None:
        if (rank := _config(adapter)["r"]) > MAX_RANK:
            raise ValueError(f"rank {rank} is over {MAX_RANK}")

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        if adapter.number in self.shifts:
            return

        config = _config(adapter)
        time.sleep(config["load_s"])
        if config["is_huge"]:
            raise MemoryError("no room for these weights")

        if Path("/proc/self/comm").read_text().strip() == config["fails_in"]:
            raise ValueError("this replica cannot read it")

        self.shifts[adapter.number] = json.loads(
            Path(adapter.path, "adapter_model.safetensors").read_text()
        )["shift"]

    def remove_adapter(self, adapter: LoadedAdapter) -> None:
        self.shifts.pop(adapter.number, None)

    @property
    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        return None


class Executor(DrivenExecutor[Work]):
    """The executor that the engine's handler adds."""

    title = "Foreign"

    def __init__(self, config: EngineConfig) -> None:
        capabilities = Capabilities(
            num_return_sequences=True,
            bad_words=False,
            lora=config.options.get("enable_lora") == "true",
            adapter_pins=True,
        )

        info = EngineInfo(
            name="foreign",
            vocab_size=1 << 20,
            max_sequence_length=512,
            max_num_sequences=MAX_NUM_SEQUENCES,
            capabilities=capabilities,
        )
        max_adapters = int(config.options.get("max_loras", MAX_ADAPTERS))
        self.engine = Engine()
        super().__init__(
            self.engine, info, executor_config(config), max_resident_adapters=max_adapters
        )
        self._start()

    def _work(self, sequence: Sequence) -> Work:
        prompt = sequence.request.input_token_ids
        adapter = self._adapters.used_by(sequence)
        if prompt[0] == FAULT:
            raise ValueError("the engine takes no such prompt")

        return Work(name_of(sequence), list(prompt), len(prompt), sequence.max_tokens, adapter)


def load(config: EngineConfig, model_path: str, progress: Progress) -> Executor:
    return Executor(config)


def _config(adapter: LoadedAdapter) -> dict[str, Any]:
    config = {"r": 4, "load_s": 0, "is_huge": False, "fails_in": ""}
    return config | json.loads(Path(adapter.path, "adapter_config.json").read_text())


def write_adapter(folder: Path, shift: int, **config: object) -> Path:
    """Write an adapter of this engine."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_text(json.dumps({"shift": shift}))
    return folder
