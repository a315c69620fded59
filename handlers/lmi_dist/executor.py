"""The embedded executor: schedule, run, sample, finish.

`SteppedExecutor` does everything around the step: queue, cancel, deadlines, responses, statistics. The scheduler
chooses which tokens are computed. Tensors begin in the model runner and end in the sampler.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from handlers.base.cache_budget import default_budget
from handlers.base.sequence import Sequence
from handlers.base.stepped import Step, SteppedExecutor
from handlers.lmi_dist.about import MAX_NUM_SEQUENCES, MAX_PREFILL_TOKENS
from handlers.lmi_dist.kv_cache import KvCache
from handlers.lmi_dist.log_probs import MAX_TOP_LOG_PROBS, prompt_log_probs
from handlers.lmi_dist.pace import Pace
from handlers.lmi_dist.plan import Chunk
from handlers.lmi_dist.runner import Runner
from handlers.lmi_dist.sampler import Draw, Sampler
from handlers.lmi_dist.scheduler import Batch, Scheduler, drafter_of
from lmi.errors import cause_line
from lmi.executor import Capabilities, EngineInfo, ErrorKind, KvCacheStats, Progress, PromptLogProb
from lmi.settings.config import EngineConfig
from lmi.shared import linux

if TYPE_CHECKING:
    from handlers.lmi_dist.native.library import Library
    from handlers.lmi_dist.placement import Placement
    from handlers.lmi_dist.weights import ModelFacts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on running sequences, on the tokens of one sequence, and on the tokens in the cache."""

    num_slots: int
    max_length: int
    num_cache_tokens: int


@dataclass(slots=True)
class Drafted:
    """A sequence whose chunk has a draft. Row `row` of the logits is that of the token before the draft."""

    sequence: Sequence
    draft: list[int]
    row: int
    num_right: int = 0

    def is_right(self) -> bool:
        """Whether the token drawn last is the next one of the draft."""
        draft, num_right = self.draft, self.num_right
        is_over = self.sequence.is_finished or num_right == len(draft)
        return not is_over and self.sequence.token_ids[-1] == draft[num_right]


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
            self._runner, limits = load_runner(os.fspath(model), config, progress)
        else:
            self._runner, limits = (
                model,
                choose_limits(config, model.context_length, model.tokens_per_block, token_bytes=1),
            )
        self._cache = _new_cache(self._runner, limits, config)
        self._pace = _new_pace(config)
        self._scheduler = Scheduler(self._cache, self._pace, drafts=_can_draft(self._runner, config))
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
        started_s = time.monotonic()
        batch = self._scheduler.schedule()
        try:
            logits = self._runner.forward(batch.plan)  # (num_logits, vocab)
            self._copy_prompts(batch)
            touched = self._advance(batch, logits)
            self._scheduler.commit(batch)
            self._pace.note(sum(len(chunk.token_ids) for chunk in batch.plan.chunks), time.monotonic() - started_s)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            touched = [_fail_largest(batch, error)]
        return Step(
            touched,
            num_context_tokens=sum(len(chunk.token_ids) for chunk in batch.plan.prefills),
            num_generation_tokens=len(batch.plan.decodes),
            num_reused_tokens=batch.num_reused_tokens,
            num_preemptions=batch.num_preemptions,
        )

    def _copy_prompts(self, batch: Batch) -> None:
        if self._runner.shares_blocks:
            return  # the next step copies what cannot be shared
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
            elif chunk.end >= sequence.num_tokens:
                drawing = [sequence, *batch.followers.get(sequence, ())]
                sampled += drawing
                rows += [end - 1 - (chunk.end - sequence.num_tokens)] * len(drawing)
        draws = self._sample(logits, rows, sampled)
        for chunk, sequence in pairs:
            for one in (sequence, *batch.followers.get(sequence, ())):
                one.num_computed = min(chunk.end, sequence.num_tokens)
        for sequence in failed:
            sequence.fail("the model's logits for the prompt are not numbers")
        _append(sampled, draws)
        self._check_drafts(batch, logits)
        return failed + sampled

    def _sample(self, logits: Tensor, rows: list[int], sequences: list[Sequence]) -> list[Draw | None]:
        """Draw one token for each sequence from its row of `logits` (num_logits, vocab)."""
        if rows != list(range(len(logits))):
            logits = logits[rows]  # (num_sequences, vocab)
        return self._sampler.sample(logits, sequences) if sequences else []

    def _check_drafts(self, batch: Batch, logits: Tensor) -> None:
        """Keep what is right of each draft. If memory runs out, the rest is dropped: the step must not be repeated."""
        drafted = list(_drafted(batch)) if self._scheduler.drafts else []
        try:
            self._accept(drafted, logits)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
        for one in drafted:
            drafter_of(one.sequence).note(one.num_right, len(one.draft))

    def _accept(self, drafted: list[Drafted], logits: Tensor) -> None:
        """Draw the next token of each sequence whose draft has been right so far, until none is, from `logits`.

        Every token is drawn with the sampler's state that it has without a draft, so it is the same one.
        """
        place = 0
        while right := [one for one in drafted if one.num_right == place and one.is_right()]:
            place += 1
            draws = self._sample(logits, [one.row + place for one in right], [one.sequence for one in right])
            for one in right:
                one.num_right = place
                one.sequence.num_computed += 1
            _append([one.sequence for one in right], draws)

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
            tokens_per_block=self._cache.tokens_per_block,
            alloc_total_blocks=self._cache.num_new_blocks + self._cache.num_reused_blocks,
            alloc_new_blocks=self._cache.num_new_blocks,
            reused_blocks=self._cache.num_reused_blocks,
        )

    def _close(self) -> None:
        del self._runner, self._sampler, self._scheduler, self._cache


def _new_cache(runner: Runner, limits: Limits, config: EngineConfig) -> KvCache:
    return KvCache(
        limits.num_cache_tokens // runner.tokens_per_block,
        limits.num_slots,
        runner.tokens_per_block,
        shares_blocks=runner.shares_blocks,
        reuses_prefixes=runner.shares_blocks and config.enable_prefix_caching is not False,
        on_free=runner.release,
    )


def _new_pace(config: EngineConfig) -> Pace:
    max_step_s = None if config.max_step_ms is None else config.max_step_ms / 1000
    return Pace(config.max_prefill_tokens or MAX_PREFILL_TOKENS, max_step_s)


def _can_draft(runner: Runner, config: EngineConfig) -> bool:
    if config.speculative is not None and not runner.is_batch_invariant:
        log.warning("option.speculative has no effect: with kernels of %s a draft could change answers", runner.kernels)
    return config.speculative is not None and runner.is_batch_invariant


def _drafted(batch: Batch) -> Iterator[Drafted]:
    row = 0
    for chunk, sequence in zip(batch.plan.decodes, batch.sequences, strict=False):
        if len(chunk.token_ids) > 1:
            yield Drafted(sequence, chunk.token_ids[1:], row)
        row += chunk.num_logits


def _append(sequences: list[Sequence], draws: list[Draw | None]) -> None:
    for sequence, draw in zip(sequences, draws, strict=True):
        if draw is None:
            sequence.fail("no token can be chosen: the model's logits are not numbers, or every token is banned")
        else:
            sequence.append(*draw)


def choose_limits(
    config: EngineConfig,
    context_length: int,
    tokens_per_block: int,
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
    num_cache_tokens = max(budget // tokens_per_block, 1) * tokens_per_block
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


def load_runner(path: str, config: EngineConfig, progress: Progress) -> tuple[Runner, Limits]:
    """Load the checkpoint in folder `path` for the native kernels, or for torch where they cannot run it."""
    from handlers.lmi_dist.native_runner import choose_library
    from handlers.lmi_dist.placement import choose_placement
    from handlers.lmi_dist.weights import read_facts

    facts = read_facts(path)
    placement = choose_placement(config, facts.dtype)
    library = choose_library(facts, placement.device, config)
    if library is None:
        return _load_torch(facts, placement, config, progress)
    return _load_native(facts, library, config, progress)


def _load_native(
    facts: ModelFacts, library: Library, config: EngineConfig, progress: Progress
) -> tuple[Runner, Limits]:
    from handlers.lmi_dist.native_runner import NativeRunner

    block_bytes = library.block_bytes(facts.num_layers, facts.num_kv_heads, facts.head_dim)
    per_block = NativeRunner.tokens_per_block
    limits = choose_limits(config, facts.context_length, per_block, token_bytes=block_bytes // per_block)
    num_blocks = limits.num_cache_tokens // per_block
    runner = NativeRunner(
        facts, library, config, num_blocks=num_blocks, max_length=limits.max_length, progress=progress
    )
    return runner, limits


def _load_torch(
    facts: ModelFacts, placement: Placement, config: EngineConfig, progress: Progress
) -> tuple[Runner, Limits]:
    from handlers.lmi_dist.model_runner import ModelRunner

    is_cuda = placement.device.type == "cuda"
    limits = choose_limits(
        config,
        facts.context_length,
        ModelRunner.tokens_per_block,
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
        kernels=runner.kernels,
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
