"""OpenVINO GenAI's pipeline with continuous batching, as a library. Runs in its own venv."""

import os
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]

from scripts.benchmarks.peers.worker import Sampling


class OpenVino:
    """`properties` are those of its CPU plugin. Its prefix cache is off by default and costs memory, so it is a second
    pipeline that is made when a burst asks for it.
    """

    def __init__(self, model: str, properties: dict[str, str]) -> None:
        self._model, self._properties = model, properties
        self._next_id = 0
        self._pipeline(False)

    @cache  # noqa: B019 (there is one object, until the process ends)
    def _pipeline(self, reuses: bool) -> Any:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = 2048  # its documentation's choice for throughput; the default is 256
        scheduler.cache_size = 2  # GB
        scheduler.enable_prefix_caching = reuses
        return openvino_genai.ContinuousBatchingPipeline(self._model, scheduler, "CPU", self._properties)

    def run(
        self, prompts: Sequence[list[int]], num_new: int, reuses: bool, sampling: Sampling
    ) -> tuple[int, float, list[float]]:
        pipeline = self._pipeline(reuses)
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_new, True, bool(sampling)
        for name, value in sampling.items():
            setattr(config, name, value)
        first_s: dict[int, float] = {}
        num_tokens, start_s, handles = 0, time.perf_counter(), []
        for prompt in prompts:
            self._next_id += 1
            handles.append(pipeline.add_request(self._next_id, openvino.Tensor(numpy.array([prompt])), config))
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for number, handle in enumerate(handles):
                if handle.can_read():
                    num_tokens += sum(len(output.generated_ids) for output in handle.read().values())
                    first_s.setdefault(number, time.perf_counter() - start_s)
        return num_tokens, time.perf_counter() - start_s, list(first_s.values())

    def pids(self) -> list[int]:
        return [os.getpid()]
