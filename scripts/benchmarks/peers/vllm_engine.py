"""vLLM's engine as a library, in this process and compiled, as its server has it by default."""

import os
import time
from collections.abc import Sequence

from handlers.lmi_vllm.process_setup import hide_foreign_builds
from scripts.benchmarks.peers.worker import Sampling


class Vllm:
    def __init__(self, model: str, dtype: str) -> None:
        hide_foreign_builds()
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = EngineArgs(model=model, dtype=dtype, max_model_len=1024, max_num_seqs=64)
        self._engine = LLMEngine.from_engine_args(arguments)
        self._next_id = 0

    def run(
        self, prompts: Sequence[list[int]], num_new: int, reuses: bool, sampling: Sampling
    ) -> tuple[int, float, list[float]]:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            **({"temperature": 0.0} | dict(sampling)),
            ignore_eos=True,
            max_tokens=num_new,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        start_s = time.perf_counter()
        for prompt in prompts:
            self._next_id += 1
            self._engine.add_request(str(self._next_id), tokens_input(prompt), params)
        first_s: dict[str, float] = {}
        num_tokens = 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                first_s.setdefault(output.request_id, time.perf_counter() - start_s)
        return num_tokens, time.perf_counter() - start_s, list(first_s.values())

    def pids(self) -> list[int]:
        return [os.getpid()]
