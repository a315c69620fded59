"""Translates the outputs of vLLM after a step to the `SequenceOutput` of `handlers/base`.

The core and AsyncLLM report them in different types. Written against vLLM 0.30 to 0.33.
"""

from __future__ import annotations

from typing import cast

from vllm.config import VllmConfig
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from handlers.base.outputs import LogProbs, SequenceOutput
from handlers.lmi_vllm import guides
from lmi.errors import InvalidRequest
from lmi.executor import FinishReason, KvCacheStats

# The ends that vLLM reports, for a sequence that Sequence's rules have not ended by then.
REASONS = {"stop": FinishReason.END_ID, "length": FinishReason.LENGTH, "repetition": FinishReason.STOP_WORDS}


def of_core(name: str, output: EngineCoreOutput) -> SequenceOutput:
    """Translate an output of the core. Its log-probs are arrays (positions, largest number asked for + 1)."""
    return SequenceOutput(
        name,
        output.new_token_ids,
        _of_arrays(output.new_logprobs),
        _of_arrays(output.new_prompt_logprobs_tensors),
        None if output.finish_reason is None else _end(name, str(output.finish_reason)),
        0 if output.prefill_stats is None else output.prefill_stats.num_cached_tokens,
    )


def of_request(output: RequestOutput) -> SequenceOutput:
    """Translate an output of AsyncLLM with DELTA and flat log-probs. The prompt's first position is empty."""
    completion, prompt = output.outputs[0], output.prompt_logprobs
    return SequenceOutput(
        output.request_id,
        list(completion.token_ids),
        None if completion.logprobs is None else of_flat(cast(FlatLogprobs, completion.logprobs), 0),
        of_flat(cast(FlatLogprobs, prompt), 1) if prompt else None,
        None if completion.finish_reason is None else _end(output.request_id, completion.finish_reason),
        output.num_cached_tokens or 0,
    )


def of_flat(flat: FlatLogprobs, first: int) -> LogProbs:
    """The log-probs at the positions from `first` on."""
    spans = list(zip(flat.start_indices, flat.end_indices, strict=True))[first:]
    token_ids = [flat.token_ids[start:end] for start, end in spans]
    return LogProbs(token_ids, [flat.logprobs[start:end] for start, end in spans])


def _of_arrays(arrays: LogprobsLists | LogprobsTensors | None) -> LogProbs | None:
    if arrays is None:
        return None
    return LogProbs(arrays.logprob_token_ids.tolist(), arrays.logprobs.tolist())


def _end(name: str, reason: str) -> FinishReason | Exception:
    """The end of a sequence. If vLLM gave it up, its reason is not in REASONS and the end is an error."""
    if reason in REASONS:
        return REASONS[reason]
    cause = guides.cause_of(name)
    return RuntimeError(reason) if cause is None else InvalidRequest(guides.refusal(cause), guides.FIELD)


def num_blocks(config: VllmConfig) -> int:
    """The number of blocks of the KV cache for requests. vLLM reserves one block."""
    return max(0, (config.cache_config.num_gpu_blocks or 0) - 1)


def kv_cache_stats(config: VllmConfig, used_share: float) -> KvCacheStats:
    max_num_blocks = num_blocks(config)
    num_used_blocks = round(used_share * max_num_blocks)
    return KvCacheStats(
        max_num_blocks=max_num_blocks,
        free_num_blocks=max_num_blocks - num_used_blocks,
        used_num_blocks=num_used_blocks,
        tokens_per_block=config.cache_config.block_size,
    )
