"""vLLM behind the contract. `DrivenExecutor` does all around the engine, an `InProcess` or a `MultiProcess`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from handlers.base.configuration import AnyConfig, settled
from handlers.base.driven import DrivenExecutor, name_of
from handlers.base.driven_outputs import BeamRow
from handlers.base.sequence import Sequence
from handlers.lmi_vllm import vllm_log
from handlers.lmi_vllm.about import ON_RAY
from handlers.lmi_vllm.in_process import InProcess
from handlers.lmi_vllm.multi_process import MultiProcess
from handlers.lmi_vllm.start import explained, starting
from handlers.lmi_vllm.translation import VllmWork, describe, lora_request, priority, row_params, sampling_params
from lmi.errors import LmiError, Unsupported
from lmi.executor import ErrorKind, Progress

NUM_WARM_UP_TOKENS = 4


class VllmExecutor(DrivenExecutor[VllmWork]):
    """`Executor(path, config)`: `path` is the folder of a Hugging Face checkpoint.

    The configuration is the contract's or the server's. It is read here, so a later change has no effect. Buffers in
    place of a path are refused. With several ranks `is_multi_process` is true by default.
    """

    title = "vLLM"

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes,
        json_config_str: str | AnyConfig | None = None,
        config: AnyConfig | None = None,
        *,
        progress: Progress = lambda stage, share: None,
        is_multi_process: bool | None = None,
    ) -> None:
        folder, settings, options = settled(self.title, model, json_config_str, config)
        if settings.logits_post_processor_config or options.logits_post_processors:
            raise Unsupported("logits_post_processor_config", "vLLM calls no function of a request on its logits")
        if settings.additional_model_outputs:
            raise Unsupported("additional_model_outputs", "a step of vLLM returns only tokens")
        with starting(folder, options, progress) as arguments:
            num_ranks = arguments.tensor_parallel_size * arguments.pipeline_parallel_size * arguments.nnodes
            if is_multi_process is None:
                is_multi_process = num_ranks > 1 or arguments.distributed_executor_backend == ON_RAY
            engine = MultiProcess(arguments) if is_multi_process else InProcess(arguments)
        info, lora = describe(engine.config, settings.max_beam_width), engine.config.lora_config
        super().__init__(
            engine,
            info,
            max_resident_adapters=0 if lora is None else lora.max_loras,
            mixes_adapters=info.device != "cpu",  # on a CPU vLLM computes wrong rows for the base model beside adapters
            max_queue_size=settings.max_queue_size,
            max_stats=settings.iter_stats_max_iterations,
            max_request_stats=settings.request_stats_max_iterations,
        )
        progress("warm-up", 0.0)
        try:
            _warm_up(engine)
        except Exception as error:  # only a step shows that a kernel cannot do what the model needs
            raise explained(error, folder, options) from error
        self._start()

    def _work(self, sequence: Sequence) -> VllmWork:
        token_ids = list(sequence.request.input_token_ids)
        return self._work_of(sequence, name_of(sequence), token_ids, sampling_params(sequence))

    def _row_work(self, sequence: Sequence, row: BeamRow) -> VllmWork:
        work = self._work_of(sequence, row.name, row.token_ids, row_params(sequence, row.num_top))
        return replace(work, arrival_time=row.arrival_time)

    def _work_of(self, sequence: Sequence, name: str, token_ids: list[int], params: SamplingParams) -> VllmWork:
        adapter = self._adapters.used_by(sequence)
        return VllmWork(
            id=name,
            token_ids=token_ids,
            params=params,
            adapter=None if adapter is None else lora_request(adapter),
            priority=priority(sequence.request),
            cache_salt=sequence.request.cache_salt,
        )

    def _refuse(self, sequence: Sequence, error: Exception) -> None:
        """End a refused sequence. vLLM refuses only structures: the rest of a request was checked before."""
        if sequence.request.guided_decoding_params is None or isinstance(error, LmiError):
            super()._refuse(sequence, error)
        else:
            sequence.fail(vllm_log.refusal(error), self._kind_of(error), vllm_log.GUIDE_FIELD)

    def _kind_of(self, error: Exception) -> ErrorKind:
        if isinstance(error, torch.OutOfMemoryError):
            return ErrorKind.OUT_OF_MEMORY
        return ErrorKind.INVALID if isinstance(error, VLLMValidationError) else super()._kind_of(error)


def _warm_up(engine: InProcess | MultiProcess) -> None:
    """Run the first steps, which set up kernels and so take as long as many steps."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9, "seed": 0, "logprobs": 0, "flat_logprobs": True},
    ]
    for number, kind in enumerate(kinds):
        kind |= {"max_tokens": NUM_WARM_UP_TOKENS, "ignore_eos": True, "detokenize": False}
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, **kind)
        engine.add(VllmWork(f"warm-up.{number}", [0] * 8, params))
    num_open = len(kinds)
    while num_open:
        for output in engine.step() or ():
            if isinstance(output.end, Exception):
                raise output.end
            num_open -= output.end is not None
