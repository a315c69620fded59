"""The embedded executor: schedule, run, sample, finish.

`SteppedExecutor` does everything around the step: queue, cancel, deadlines, responses, statistics. The scheduler
chooses which tokens are computed. Tensors begin in the model runner and end in the sampler.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from handlers.base.cache_budget import default_budget
from handlers.base.sequence import Sequence
from handlers.base.stepped import Step, SteppedExecutor
from handlers.lmi_dist.about import MAX_NUM_SEQUENCES, MAX_PREFILL_TOKENS
from handlers.lmi_dist.kv_cache import TOKENS_PER_BLOCK, KvCache
from handlers.lmi_dist.log_probs import MAX_TOP_LOG_PROBS, prompt_log_probs
from handlers.lmi_dist.plan import Chunk, Plan
from handlers.lmi_dist.sampler import Sampler
from handlers.lmi_dist.scheduler import Batch, Scheduler
from lmi.errors import cause_line
from lmi.executor import Capabilities, EngineInfo, ErrorKind, KvCacheStats, Progress, PromptLogProb
from lmi.settings.config import EngineConfig
from lmi.shared import linux

log = logging.getLogger(__name__)


class Runner(Protocol):
    """Runs the model. `model_runner.ModelRunner` is the real one; tests have one without weights."""

    vocab_size: int
    context_length: int
    dtype: str
    device: str
    is_batch_invariant: bool

    def forward(self, plan: Plan) -> Tensor:
        """Logits, float32 (num_logits, vocab), in the order of the chunks and of the wanted positions of each chunk."""

    def copy(self, slot: int, to_slots: list[int], num_tokens: int) -> None:
        """Give other slots the keys and values of the first `num_tokens` of a slot."""

    def release(self, slot: int) -> None:
        """Free a slot whose keys and values are not needed any more."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on running sequences, on the tokens of one sequence, and on the tokens in the cache."""

    num_slots: int
    max_length: int
    num_cache_tokens: int


class EmbeddedExecutor(SteppedExecutor):
    """`model` is a folder with a Hugging Face checkpoint, or a runner that has its weights already."""

    def __init__(
        self,
        model: str | os.PathLike[str] | Runner,
        config: EngineConfig | None = None,
        progress: Progress = lambda stage, share: None,
    ) -> None:
        config = config or EngineConfig()
        super().__init__(
            max_queue_size=config.max_queue_size,
            max_request_stats=int(config.options.get("request_stats_max_iterations", "0")),
        )
        if isinstance(model, str | os.PathLike):
            self._runner, limits = _load(os.fspath(model), config, progress)
        else:
            self._runner, limits = model, choose_limits(config, model.context_length, token_bytes=1)
        self._cache = KvCache(limits.num_cache_tokens // TOKENS_PER_BLOCK, limits.num_slots, self._release)
        self._scheduler = Scheduler(
            self._cache,
            max_num_sequences=limits.num_slots,
            max_prefill_tokens=config.max_prefill_tokens or MAX_PREFILL_TOKENS,
        )
        self._sampler = Sampler(self._runner.vocab_size, self._runner.device)
        self._info = _describe(self._runner, limits)
        self._start()

    @property
    def info(self) -> EngineInfo:
        return self._info

    def _add(self, sequence: Sequence) -> None:
        self._scheduler.add(sequence)

    def _remove(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)

    @property
    def _active(self) -> SequenceOf[Sequence]:
        return self._scheduler.running

    @property
    def _queued(self) -> SequenceOf[Sequence]:
        return self._scheduler.waiting

    @torch.inference_mode()
    def _step(self) -> Step:
        batch = self._scheduler.schedule()
        try:
            logits = self._runner.forward(batch.plan)  # (num_logits, vocab)
            self._copy_prompts(batch)
            touched = self._advance(batch, logits)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            touched = [_fail_largest(batch, error)]
        return Step(
            touched,
            num_context_tokens=sum(len(chunk.token_ids) for chunk in batch.plan.prefills),
            num_generation_tokens=len(batch.plan.decodes),
            num_preemptions=batch.num_preemptions,
        )

    def _copy_prompts(self, batch: Batch) -> None:
        for leader, followers in batch.followers.items():
            slots = [one.slot for one in followers if one.slot is not None]
            if leader.slot is not None and slots:
                self._runner.copy(leader.slot, slots, leader.num_prefill)

    def _advance(self, batch: Batch, logits: Tensor) -> list[Sequence]:
        """Add the tokens and log-probs of a step to its sequences, from `logits` (num_logits, vocab).

        Returns the sequences with a new token or an error. Tokens are added only after all are computed, so that a step
        that ran out of memory can be repeated.
        """
        pairs = list(zip(batch.plan.chunks, batch.sequences, strict=True))
        failed, sampled, rows, end = [], [], [], 0
        for chunk, sequence in pairs:
            start, end = end, end + chunk.num_logits
            if sequence.lacks_prompt_log_probs and not self._note_prompt(sequence, chunk, logits[start:end]):
                failed.append(sequence)
            elif chunk.end == sequence.num_tokens:
                drawing = [sequence, *batch.followers.get(sequence, ())]
                sampled += drawing
                rows += [end - 1] * len(drawing)
        if rows != list(range(len(logits))):
            logits = logits[rows]  # (num_sampled, vocab)
        draws = self._sampler.sample(logits, sampled) if sampled else []
        for chunk, sequence in pairs:
            for one in (sequence, *batch.followers.get(sequence, ())):
                one.num_computed = chunk.end
        for sequence in failed:
            sequence.fail("the model's logits for the prompt are not numbers")
        for sequence, draw in zip(sampled, draws, strict=True):
            if draw is None:
                sequence.fail("no token can be chosen: the model's logits are not numbers, or every token is banned")
            else:
                sequence.append(*draw)
        return failed + sampled

    def _note_prompt(self, sequence: Sequence, chunk: Chunk, logits: Tensor) -> bool:
        """Keep the log-probs of the prompt tokens that follow each position of the chunk.

        `logits` is (chunk length, vocab). Returns False if they are not numbers.
        """
        next_ids = sequence.token_ids[chunk.start + 1 : min(chunk.end + 1, sequence.num_prompt_tokens)]
        num_top = sequence.request.output_config.num_prompt_log_probs or 0
        log_probs = prompt_log_probs(logits[: len(next_ids)], next_ids, num_top)
        if log_probs is None:
            return False
        known = sequence.prompt_log_probs or [PromptLogProb(None)]  # nothing comes before the first token
        sequence.prompt_log_probs = known[: chunk.start + 1] + log_probs
        return True

    def _kv_cache_stats(self) -> KvCacheStats:
        return KvCacheStats(
            max_num_blocks=self._cache.num_blocks,
            free_num_blocks=self._cache.num_free_blocks,
            used_num_blocks=self._cache.num_used_blocks,
            tokens_per_block=TOKENS_PER_BLOCK,
        )

    def _release(self, slot: int) -> None:
        self._runner.release(slot)

    def _close(self) -> None:
        del self._runner, self._sampler


def choose_limits(
    config: EngineConfig,
    context_length: int,
    *,
    token_bytes: int,
    memory_bytes: int | None = None,
    is_lazy: bool = True,
) -> Limits:
    """The limits of the configuration, lowered to what the model and the memory allow.

    `token_bytes` is the size of the keys and values of one token. `is_lazy` says that a slot costs memory only where it
    was written. A sequence is never longer than the whole cache: otherwise it could wait without end.
    """
    max_length = min(config.max_sequence_length or context_length, context_length)
    if max_length < (config.max_sequence_length or 0):
        log.warning(
            "option.max_model_len=%d is over the model's context: prompt and answer may have %d tokens together",
            config.max_sequence_length,
            context_length,
        )
    num_slots = config.max_num_sequences or MAX_NUM_SEQUENCES
    memory_bytes = memory_bytes or linux.memory_bytes()
    budget = config.max_kv_cache_tokens or default_budget(num_slots, max_length, token_bytes, memory_bytes)
    num_cache_tokens = max(budget // TOKENS_PER_BLOCK, 1) * TOKENS_PER_BLOCK
    if num_cache_tokens < max_length:
        log.warning(
            "prompt and answer may have %d tokens together, not the model's %d: the KV cache holds no more",
            num_cache_tokens,
            max_length,
        )
        max_length = num_cache_tokens
    if not is_lazy:
        num_slots = max(1, min(num_slots, max(num_cache_tokens, memory_bytes // 4 // token_bytes) // max_length))
    return Limits(num_slots, max_length, num_cache_tokens)


def _load(path: str, config: EngineConfig, progress: Progress) -> tuple[Runner, Limits]:
    from handlers.lmi_dist.model_runner import ModelRunner
    from handlers.lmi_dist.placement import choose_placement
    from handlers.lmi_dist.weights import read_facts

    facts = read_facts(path)
    placement = choose_placement(config, facts.dtype)
    is_cuda = placement.device.type == "cuda"
    limits = choose_limits(
        config,
        facts.context_length,
        token_bytes=facts.kv_bytes_per_token(placement.dtype),
        memory_bytes=torch.cuda.mem_get_info()[1] if is_cuda else None,
        is_lazy=not is_cuda,
    )
    runner = ModelRunner(
        facts, placement, config, num_slots=limits.num_slots, max_length=limits.max_length, progress=progress
    )
    return runner, limits


def _describe(runner: Runner, limits: Limits) -> EngineInfo:
    return EngineInfo(
        name="lmi-dist",
        vocab_size=runner.vocab_size,
        max_sequence_length=limits.max_length,
        max_num_sequences=limits.num_slots,
        dtype=runner.dtype,
        device=runner.device,
        max_kv_cache_tokens=limits.num_cache_tokens,
        capabilities=Capabilities(
            num_return_sequences=True,
            typical_p=True,
            embedding_bias=True,
            perf_metrics=True,
            max_top_log_probs=min(MAX_TOP_LOG_PROBS, runner.vocab_size),
            priority=True,
            batch_invariant=runner.is_batch_invariant,
            log_probs_invariant=runner.is_batch_invariant,
        ),
    )


def _is_out_of_memory(error: Exception) -> bool:
    """Whether the host or the device ran out of memory. On the host, torch's allocator raises a RuntimeError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def _fail_largest(batch: Batch, error: Exception) -> Sequence:
    """Fail the sequence that needs the most memory: a prompt before a decode, a longer one before a shorter one.

    The other sequences repeat the step.
    """
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    start = len(batch.plan.decodes) if batch.plan.prefills else 0
    chunks = list(zip(batch.plan.chunks, batch.sequences, strict=True))[start:]
    _, sequence = max(chunks, key=lambda pair: (pair[0].num_logits, pair[0].end))
    sequence.fail(f"out of memory: {cause_line(error)}", ErrorKind.OUT_OF_MEMORY)
    return sequence
