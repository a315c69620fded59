"""lmi's embedded executor as a library."""

import os
import time
from collections.abc import Sequence
from typing import cast

from handlers.lmi_dist import Executor
from lmi.executor import Request, Response, SamplingConfig
from lmi.settings.config import EngineConfig
from scripts.benchmarks.peers.worker import Sampling


class Lmi:
    def __init__(self, model: str, dtype: str, quantize: str | None = None) -> None:
        cores = len(os.sched_getaffinity(0))  # all of them: there is no front end beside it, as there is none at others
        config = EngineConfig(
            dtype=dtype, quantize=quantize, num_threads=cores, max_num_sequences=64, max_sequence_length=1024
        )
        self._executor = Executor(model, config)

    def run(
        self, prompts: Sequence[list[int]], num_new: int, reuses: bool, sampling: Sampling
    ) -> tuple[int, float, list[float]]:
        config = SamplingConfig(temperature=sampling.get("temperature", 0.0), top_p=sampling.get("top_p"))
        requests = [
            Request(
                input_token_ids=tuple(prompt),
                max_tokens=num_new,
                streaming=True,
                ignore_eos=True,
                sampling_config=config,
            )
            for prompt in prompts
        ]
        start_s = time.perf_counter()
        self._executor.enqueue_requests(requests)
        first_s: dict[int, float] = {}
        num_open, num_tokens = len(prompts), 0
        while num_open:
            for response in cast(list[Response], self._executor.await_responses(timeout_s=60)):
                if response.result is None:
                    raise RuntimeError(response.error_msg)
                num_tokens += len(response.result.output_token_ids[0])
                first_s.setdefault(response.request_id, time.perf_counter() - start_s)
                num_open -= response.is_final
        return num_tokens, time.perf_counter() - start_s, list(first_s.values())

    def pids(self) -> list[int]:
        return [os.getpid()]
