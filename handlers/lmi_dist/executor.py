"""The embedded executor: schedule, run, sample, finish.

`SteppedExecutor` does everything around the step: queue, cancel, deadlines, responses, statistics. The scheduler
chooses which tokens are computed. Logits come from the model runner and end in the sampler.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from functools import partial
from typing import cast

import msgspec

from handlers.base.configuration import AnyConfig, both
from handlers.base.guide_compiler import compile_limit_s
from handlers.base.stepped import Step, SteppedExecutor
from handlers.lmi_dist.about import MAX_PREFILL_TOKENS
from handlers.lmi_dist.beam_sampler import BeamSampler, Outlook, advance_beams
from handlers.lmi_dist.buffers import Buffers
from handlers.lmi_dist.captured import Capture
from handlers.lmi_dist.drafts import Drafts
from handlers.lmi_dist.guides import Guides, are_compact, open_guides
from handlers.lmi_dist.kv_cache import KvCache
from handlers.lmi_dist.loading import Limits, describe, load
from handlers.lmi_dist.log_probs import note_prompt
from handlers.lmi_dist.lora_adapters import LoraAdapters, Prepared
from handlers.lmi_dist.native.library import num_threads
from handlers.lmi_dist.out_of_memory import is_out_of_memory
from handlers.lmi_dist.pace import Pace
from handlers.lmi_dist.plan import num_tokens_of
from handlers.lmi_dist.post_processors import new_post_processors
from handlers.lmi_dist.runner import Runner
from handlers.lmi_dist.sampler import Draw, Sampler, append_draws
from handlers.lmi_dist.scheduler import Batch, Scheduler
from handlers.lmi_dist.sequence import EmbeddedSequence
from handlers.lmi_dist.stats import kv_cache_stats, step_of
from handlers.lmi_dist.wishes import Floats
from lmi.errors import cause_line
from lmi.executor import (
    EngineInfo,
    ErrorKind,
    ExecutorConfig,
    KvCacheStats,
    Progress,
)
from lmi.settings.config import EngineConfig

log = logging.getLogger(__name__)


class EmbeddedExecutor(SteppedExecutor[EmbeddedSequence]):
    """`Executor(path, config)`, or `Executor(engine_buffer, json_config_str, config)`.

    `path` is a folder with a Hugging Face checkpoint; in its place a runner may stand, which has its weights already.
    `engine_buffer` is the bytes of one safetensors file, and `json_config_str` the text of its config.json. The
    configuration is the contract's or the server's. It is read here, so a later change has no effect.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Runner | bytes,
        json_config_str: str | AnyConfig | None = None,
        config: AnyConfig | None = None,
        *,
        progress: Progress = lambda stage, share: None,
    ) -> None:
        if isinstance(json_config_str, ExecutorConfig | EngineConfig):  # the second argument of the first form
            json_config_str, config = None, json_config_str
        settings, options = both(config)
        super().__init__(
            EmbeddedSequence,
            max_queue_size=settings.max_queue_size,
            max_stats=settings.iter_stats_max_iterations,
            max_request_stats=settings.request_stats_max_iterations,
        )
        processors = new_post_processors(settings, options, model)
        self._runner, limits = load(_source(model, json_config_str), options, progress)
        self._lora = None if self._runner.adapters is None else LoraAdapters(self._runner.adapters)
        self._cache = _new_cache(self._runner, limits, settings)
        self._pace = _new_pace(options)
        self._scheduler = _new_scheduler(self._cache, self._pace, self._lora, drafts=_can_draft(self._runner, options))
        self._sampler = Sampler(self._runner.vocab_size, processors, num_threads())
        self._beam_sampler = BeamSampler(self._sampler)
        self._capture = Capture(self._runner)
        folder = _server_folder(model, config)
        self._guides, why_no_guides = open_guides(
            settings.guided_decoding_config,
            folder,
            self._runner.vocab_size,
            compile_limit_s(options.step_timeout_s),
            is_compact=are_compact(options.options),
        )
        self._info = describe(self._runner, limits, settings, why_no_guides=why_no_guides, post_processors=processors)
        self._start()

    # One step.

    def _step(self) -> Step[EmbeddedSequence] | None:
        refused = [] if self._guides is None else self._take_guided(self._guides)
        if refused:
            return Step(refused)
        if self._guides is not None and not (self._scheduler.running or self._scheduler.waiting):
            self._guides.wait()
            return None
        return self._compute()

    def _compute(self) -> Step[EmbeddedSequence]:
        """Make one step of all running sequences. If memory runs out, the largest of them fails."""
        started_s = time.monotonic()
        batch = self._scheduler.schedule()
        refused = batch.failed + ([] if self._lora is None else self._lora.take_refused())
        if refused and not batch.sequences:
            return Step(refused)
        try:
            for fork in batch.forks:
                self._runner.copy(fork.from_slot, [fork.to_slot], fork.num_tokens)
            with nullcontext() if self._guides is None else self._guides.following(batch.sequences):
                logits = self._runner.forward(batch.plan)  # (num_logits, vocab)
            self._copy_prompts(batch)
            touched = self._advance(batch, logits)
            self._scheduler.commit(batch)
            self._pace.note(num_tokens_of(batch.plan.chunks), time.monotonic() - started_s)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            touched = [_fail_largest(batch, error)]
        return step_of(batch, refused + touched)

    def _copy_prompts(self, batch: Batch) -> None:
        if not batch.followers or self._runner.shares_blocks:
            return  # with shared blocks the next step copies what cannot be shared
        for leader, followers in batch.followers.items():
            slots = [one.slot for one in followers if one.slot is not None]
            if leader.slot is not None and slots:
                self._runner.copy(leader.slot, slots, leader.num_prefill)

    def _advance(self, batch: Batch, logits: Floats) -> list[EmbeddedSequence]:
        """Add the tokens and log-probs of a step to its sequences, from `logits` (num_logits, vocab).

        Returns the sequences with a new token or an error. Tokens are added only after all are computed, so that a step
        that ran out of memory can be repeated.
        """
        failed = self._note_prompts(batch, logits)
        sequences, rows = _drawing(batch, failed)
        has_beams = bool(sequences) and sequences[0].rows is not None
        outlooks = self._look_ahead(logits, rows, sequences) if has_beams else {}
        draws = [] if has_beams else self._sample(logits, rows, sequences)
        _note_computed(batch)
        for sequence in failed:
            sequence.fail("the model's logits for the prompt are not numbers")
        if has_beams:
            return failed + advance_beams(outlooks)
        append_draws(sequences, draws)
        if self._scheduler.drafts:
            Drafts(batch, self._sample).check(logits)
        return failed + sequences

    def _note_prompts(self, batch: Batch, logits: Floats) -> list[EmbeddedSequence]:
        """Keep what requests want to know of their prompts. Returns the sequences whose log-probs are not numbers."""
        failed = []
        for chunk, sequence, row in batch.prefilling():
            if sequence.lacks_context:
                self._capture.take_prompt(sequence, chunk, logits, row)
            own = slice(row, row + chunk.num_logits)
            if sequence.lacks_prompt_log_probs:
                if not note_prompt(self._sampler.choose, sequence, chunk, logits[own]):
                    failed.append(sequence)
        return failed

    def _look_ahead(
        self, logits: Floats, rows: list[int], sequences: list[EmbeddedSequence]
    ) -> dict[EmbeddedSequence, list[Outlook]]:
        """What each search can continue with, from the rows of its beams in `logits` (num_logits, vocab)."""
        self._capture.take_draws(logits, rows, sequences)
        return self._beam_sampler.sample(logits, rows, sequences)

    def _sample(self, logits: Floats, rows: list[int], sequences: list[EmbeddedSequence]) -> list[Draw | None]:
        """Draw one token for each sequence from its row of `logits` (num_logits, vocab)."""
        self._capture.take_draws(logits, rows, sequences)
        return self._sampler.sample(logits, rows, sequences) if sequences else []

    # Sequences come and go. One may wait for its guide before it is scheduled.

    def _add(self, sequence: EmbeddedSequence) -> None:
        if self._lora is not None and not self._lora.claim(sequence):
            return
        if self._guides is None or self._guides.admit(sequence):
            self._scheduler.add(sequence)
            sequence.check_room(self._cache)

    def _remove(self, sequence: EmbeddedSequence) -> None:
        if self._guides is None or not self._guides.forget(sequence):
            self._scheduler.remove(sequence)
        if self._lora is not None:
            self._lora.release(sequence)

    def _wake(self) -> None:
        if self._guides is not None:
            self._guides.wake()

    @property
    def _active(self) -> SequenceOf[EmbeddedSequence]:
        return self._scheduler.running

    @property
    def _queued(self) -> SequenceOf[EmbeddedSequence]:
        return self._scheduler.waiting if self._guides is None else self._scheduler.waiting + self._guides.waiting

    def _take_guided(self, guides: Guides) -> list[EmbeddedSequence]:
        """Schedule the sequences whose guides are ready. Returns those that were refused."""
        ready = guides.take_ready()
        for sequence in ready:
            if sequence.error is None:
                self._scheduler.add(sequence)
        return [sequence for sequence in ready if sequence.error is not None]

    @property
    def is_waiting_for_guides(self) -> bool:
        return (guides := self._guides) is not None and guides.is_waiting

    # Adapters, between two steps.

    @property
    def is_loading_adapter(self) -> bool:
        return (lora := self._lora) is not None and lora.is_reading

    def load_adapter(self, name: str, path: str, *, pinned: bool = False, preload: bool = True) -> None:
        if (lora := self._lora) is None:
            return super().load_adapter(name, path, pinned=pinned, preload=preload)
        prepared = lora.prepare(path, with_weights=preload or pinned)
        self._at_boundary(partial(self._load_adapter, lora, name, path, prepared, pinned, preload))

    def unload_adapter(self, name: str) -> None:
        if (lora := self._lora) is None:
            return super().unload_adapter(name)
        self._at_boundary(partial(self._unload_adapter, lora, name))

    def _load_adapter(
        self, lora: LoraAdapters, name: str, path: str, prepared: Prepared, pinned: bool, preload: bool
    ) -> None:
        lora.load(name, path, prepared, pinned=pinned, preload=preload)
        self._info = msgspec.structs.replace(self._info, adapters=lora.names)

    def _unload_adapter(self, lora: LoraAdapters, name: str) -> None:
        lora.unload(name)
        self._info = msgspec.structs.replace(self._info, adapters=lora.names)

    # What it reports, and its end.

    @property
    def info(self) -> EngineInfo:
        return self._info

    def _kv_cache_stats(self) -> KvCacheStats:
        return kv_cache_stats(self._cache)

    def _close(self) -> None:
        if self._guides is not None:
            self._guides.close()
        del self._runner, self._sampler, self._scheduler, self._cache, self._capture
        self._lora = None  # other threads may still ask for it


def _source(
    model: str | os.PathLike[str] | Runner | bytes, text: str | None
) -> str | os.PathLike[str] | Buffers | Runner:
    return Buffers(model, text) if isinstance(model, bytes) else model


def _server_folder(model: object, config: AnyConfig | None) -> str | None:
    """The folder of a server's model, whose tokenizer guides may read; an ExecutorConfig says itself what they need."""
    is_folder = isinstance(model, str | os.PathLike) and isinstance(config, EngineConfig)
    return os.fspath(cast(str | os.PathLike[str], model)) if is_folder else None


def _new_cache(runner: Runner, limits: Limits, settings: ExecutorConfig) -> KvCache:
    return KvCache(
        limits.num_cache_tokens // runner.tokens_per_block,
        limits.num_slots,
        runner.tokens_per_block,
        shares_blocks=runner.shares_blocks,
        reuses_prefixes=runner.shares_blocks and settings.kv_cache_config.enable_block_reuse,
        on_free=runner.release,
    )


def _new_scheduler(cache: KvCache, pace: Pace, lora: LoraAdapters | None, *, drafts: bool) -> Scheduler:
    return Scheduler(cache, pace, drafts=drafts, may_run=None if lora is None else lora.may_run)


def _new_pace(config: EngineConfig) -> Pace:
    max_step_s = None if config.max_step_ms is None else config.max_step_ms / 1000
    return Pace(config.max_prefill_tokens or MAX_PREFILL_TOKENS, max_step_s)


def _can_draft(runner: Runner, config: EngineConfig) -> bool:
    if config.speculative is not None and not runner.is_batch_invariant:
        log.warning("option.speculative has no effect: with kernels of %s a draft could change answers", runner.kernels)
    return config.speculative is not None and runner.is_batch_invariant


def _drawing(batch: Batch, failed: list[EmbeddedSequence]) -> tuple[list[EmbeddedSequence], list[int]]:
    """The sequences that draw a token in this step, and the row of the logits that each draws from."""
    sequences = batch.decoding
    rows = batch.rows[: len(sequences)]
    for chunk, sequence, row in batch.prefilling():
        if chunk.end >= sequence.num_tokens and sequence not in failed:
            own = [sequence, *batch.followers.get(sequence, ())]
            sequences += own
            rows += [row + chunk.num_logits - 1] * len(own)
    return sequences, rows


def _note_computed(batch: Batch) -> None:
    for sequence in batch.decoding:
        sequence.num_computed += 1  # the tokens of a draft are not among its own yet
    for chunk, sequence, _ in batch.prefilling():
        for one in (sequence, *batch.followers.get(sequence, ())):
            one.num_computed = chunk.end


def _fail_largest(batch: Batch, error: Exception) -> EmbeddedSequence:
    """Fail the sequence that needs the most memory: a prompt before a decode, a longer one before a shorter one.

    The other sequences repeat the step.
    """
    start = len(batch.plan.decodes) if batch.plan.prefills else 0
    chunks = list(zip(batch.plan.chunks, batch.sequences, strict=True))[start:]
    _, sequence = max(chunks, key=lambda pair: (pair[0].num_logits, pair[0].end))
    sequence = sequence.owner
    sequence.fail(f"out of memory: {cause_line(error)}", ErrorKind.OUT_OF_MEMORY)
    return sequence
