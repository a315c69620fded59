"""The embedded executor: schedule, run, sample, finish.

`SteppedExecutor` does everything around the step: queue, cancel, deadlines, responses, statistics.
The scheduler chooses which tokens are computed. Logits come from the model runner and end in the
sampler.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from handlers.base.configuration import AnyConfig, both
from handlers.base.stepped import Step, SteppedExecutor
from handlers.guides.compiler import compile_limit_s
from handlers.guides.process import Start
from handlers.lmi_dist.captured import take_draws, take_prompt
from handlers.lmi_dist.defaults import MAX_PREFILL_TOKENS
from handlers.lmi_dist.draft_check import check_drafts
from handlers.lmi_dist.engine_info import describe
from handlers.lmi_dist.guides import Guides
from handlers.lmi_dist.kv_cache import KvCache
from handlers.lmi_dist.limits import Limits
from handlers.lmi_dist.loading import Model, in_folder, load_runner
from handlers.lmi_dist.lora_adapters import LoraAdapters
from handlers.lmi_dist.lora_limits import own_options
from handlers.lmi_dist.memory import HeldMemory, MemoryWatch
from handlers.lmi_dist.native.library import num_threads
from handlers.lmi_dist.native.sampling_records import Floats
from handlers.lmi_dist.outlook import advance_beams
from handlers.lmi_dist.pace import Pace
from handlers.lmi_dist.plan import num_tokens_of
from handlers.lmi_dist.post_processors import new_post_processors
from handlers.lmi_dist.prompt_log_probs import note_prompt
from handlers.lmi_dist.runner import Runner
from handlers.lmi_dist.sampler import Draw, Sampler, append_draws
from handlers.lmi_dist.scheduled_batch import Batch
from handlers.lmi_dist.scheduler import Scheduler
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.errors import cause_line, is_out_of_memory
from lmi.executor.config import ExecutorConfig
from lmi.executor.executor import (
    EngineInfo,
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    MemoryUse,
    Progress,
)
from lmi.executor.response import ErrorKind
from lmi.settings.config import EngineConfig

if TYPE_CHECKING:
    from handlers.lmi_dist.cache_events import CacheEvents
    from handlers.lmi_dist.stored_prefixes import StoredPrefixes

log = logging.getLogger(__name__)


class EmbeddedExecutor(SteppedExecutor[EmbeddedSequence]):
    """`Executor(path, config)`, or `Executor(engine_buffer, json_config_str, config)`.

    `path` is a folder with a Hugging Face checkpoint; in its place a runner may stand, which has
    its weights already. `engine_buffer` is the bytes of one safetensors file, and `json_config_str`
    the text of its config.json. The configuration is the contract's or the server's. It is read
    here, so a later change has no effect.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Runner | bytes,
        json_config_str: str | AnyConfig | None = None,
        config: AnyConfig | None = None,
        *,
        progress: Progress = lambda stage, share: None,
    ) -> None:
        if isinstance(json_config_str, ExecutorConfig | EngineConfig):
            # It is the second argument of the first form.
            config = json_config_str
            json_config_str = None

        settings, options = both(config)
        super().__init__(
            EmbeddedSequence,
            settings.max_queue_size,
            settings.iter_stats_max_iterations,
            settings.request_stats_max_iterations,
        )

        processors = new_post_processors(settings, options, model)
        with in_folder(model, json_config_str) as source:
            self._runner, limits = load_runner(source, options, progress)
            reuses_prefixes = settings.kv_cache_config.enable_block_reuse
            self._stored = self._open_stored(source, options, limits, reuses_prefixes)

        self._lora: LoraAdapters | None = None
        if self._runner.adapters is not None:
            self._lora = LoraAdapters(self._runner.adapters)

        self._events = self._new_events(options)
        self._cache = KvCache(
            limits.num_cache_tokens // self._runner.tokens_per_block,
            limits.num_all_slots,
            self._runner.tokens_per_block,
            slots=self._runner.slots,
            reuses_prefixes=reuses_prefixes,
            events=self._events,
            stored=self._stored,
        )
        max_prefill_tokens = options.max_prefill_tokens or MAX_PREFILL_TOKENS
        max_step_s = None if options.max_step_ms is None else options.max_step_ms / 1000
        self._pace = Pace(max_prefill_tokens, max_step_s)
        self._scheduler = self._new_scheduler(options, limits)
        self._watch = self._new_watch(options, limits, max_prefill_tokens)
        self._held = self._new_held()
        self._sampler = Sampler(self._runner.vocab_size, processors, num_threads())

        # Guides may read the tokenizer of a server's model.
        folder = None
        if isinstance(model, str | os.PathLike) and isinstance(config, EngineConfig):
            folder = os.fspath(model)

        self._guides = self._new_guides(settings, options, folder)

        self._info = describe(self._runner, limits, settings, self._guides.why_none, processors)
        self._start()

    def _new_scheduler(self, options: EngineConfig, limits: Limits) -> Scheduler:
        has_drafts = options.speculative is not None and self._runner.is_batch_invariant
        if options.speculative is not None and not has_drafts:
            log.warning(
                "option.speculative has no effect: with kernels of %s a draft could change answers",
                self._runner.kernels,
            )

        return Scheduler(
            self._cache,
            self._pace,
            drafts=has_drafts,
            may_run=None if self._lora is None else self._lora.may_run,
            num_express=limits.num_express,
        )

    def _new_watch(
        self, options: EngineConfig, limits: Limits, max_prefill_tokens: int
    ) -> MemoryWatch | None:
        """Return what watches the memory of the cache, where the runner takes it block by block."""
        memory = self._runner.memory
        if memory is None:
            return None

        num_rows = limits.num_all_slots + max_prefill_tokens
        step_bytes = memory.step_bytes(num_rows, limits.num_all_slots)
        return MemoryWatch(
            self._cache, memory, step_bytes, idle_timeout_s=options.idle_cache_timeout_s
        )

    def _new_held(self) -> HeldMemory | None:
        """Return what the model holds of the memory, where the runner knows, and log it."""
        memory = self._runner.memory
        weight_bytes = self._runner.weight_bytes
        if memory is None or weight_bytes is None:
            return None

        held = HeldMemory(weight_bytes, memory.block_bytes, self._cache)
        held.say()
        return held

    def _new_guides(
        self, settings: ExecutorConfig, options: EngineConfig, folder: str | None
    ) -> Guides:
        limit_s = compile_limit_s(options.step_timeout_s)
        is_compact = own_options(options.options).get("disable_any_whitespace", True)
        start = Start(self._runner.vocab_size, limit_s, is_compact)
        return Guides(settings.guided_decoding_config, folder, start)

    def _new_events(self, options: EngineConfig) -> CacheEvents | None:
        """Return what tells routers of the cache, where an option wants it.

        Raises BadConfiguration.
        """
        if options.kv_events_config is None or not options.kv_events_config.is_enabled:
            return None

        if self._runner.slots is not None:
            log.warning(
                "option.kv_events_config has no effect: with kernels of %s prompts share no blocks",
                self._runner.kernels,
            )
            return None

        from handlers.lmi_dist.cache_events import new_events

        name_of = _no_name if self._lora is None else self._lora.name_of
        return new_events(options.kv_events_config, options.num_engines, name_of)

    def _open_stored(
        self, model: Model, options: EngineConfig, limits: Limits, reuses_prefixes: bool
    ) -> StoredPrefixes | None:
        """Return what keeps prompts on disk, where an option wants it and they are cached at all.

        Raises BadConfiguration.
        """
        if options.prefix_cache_dir is None:
            return None

        if not reuses_prefixes:
            log.warning(
                "option.prefix_cache_dir has no effect: option.enable_prefix_caching is off"
            )
            return None

        from handlers.lmi_dist.native_runner import NativeRunner
        from handlers.lmi_dist.stored_prefixes import open_prefixes

        if not isinstance(self._runner, NativeRunner) or not isinstance(model, str | os.PathLike):
            log.warning(
                "option.prefix_cache_dir has no effect: with kernels of %s prompts share no blocks",
                self._runner.kernels,
            )
            return None

        runner = self._runner
        return open_prefixes(
            options, os.fspath(model), limits.max_length, runner.library.path, runner.memory
        )

    # One step.

    def _step(self) -> Step[EmbeddedSequence] | None:
        ready = self._guides.take_ready()
        for sequence in ready:
            if sequence.error is None:
                self._scheduler.add(sequence)

        refused = [sequence for sequence in ready if sequence.error is not None]
        if refused:
            return Step(refused)

        if not (self._scheduler.running or self._scheduler.waiting):
            self._guides.wait()
            return None

        return self._compute()

    def _compute(self) -> Step[EmbeddedSequence]:
        """Make one step of all running sequences. If memory runs out, the largest of them fails."""
        started_s = time.monotonic()
        if self._watch is not None:
            self._watch.look()

        batch = self._scheduler.schedule()
        if batch.failed and not batch.sequences:
            return Step(batch.failed)

        try:
            if self._watch is not None:
                self._watch.check(batch.plan)

            with self._guides.following(batch.decoding):
                logits = self._runner.forward(batch.plan)  # (num_logits, vocab)

            touched = self._advance(batch, logits)
            self._scheduler.commit(batch)
            if self._events is not None:
                self._events.publish()

            self._pace.note(num_tokens_of(batch.plan.chunks), time.monotonic() - started_s)
        except Exception as error:
            if not is_out_of_memory(error):
                raise

            touched = [_fail_largest(batch, error)]

        return _step_of(batch, batch.failed + touched)

    def _advance(self, batch: Batch, logits: Floats) -> list[EmbeddedSequence]:
        """Add the tokens and log-probs of a step to its sequences, from `logits` (num_logits,
        vocab).

        Returns the sequences with a new token or an error. Tokens are added only after all are
        computed, so that a step that ran out of memory can be repeated.
        """
        if self._runner.pooling is not None:
            return self._runner.pooling.take(batch.prefilling(), logits)

        failed = self._note_prompts(batch, logits)
        sequences, rows = _drawing(batch, failed)
        has_beams = bool(sequences) and sequences[0].beam_state is not None
        if has_beams:
            take_draws(self._runner, logits, rows, sequences)
            outlooks = self._sampler.look_ahead(logits, rows, sequences)
        else:
            draws = self._sample(logits, rows, sequences)

        _count_computed(batch)
        for sequence in failed:
            sequence.fail("the model's logits for the prompt are not numbers")

        if has_beams:
            return failed + advance_beams(outlooks)

        append_draws(sequences, draws)
        if self._scheduler.drafts:
            batch.drafts = check_drafts(batch, partial(self._sample, logits))

        return failed + sequences

    def _note_prompts(self, batch: Batch, logits: Floats) -> list[EmbeddedSequence]:
        """Keep what requests want to know of their prompts.

        Returns the sequences whose log-probs are not numbers.
        """
        failed = []
        for chunk, sequence, row in batch.prefilling():
            if sequence.lacks_context:
                take_prompt(self._runner, sequence, chunk, logits, row)

            if sequence.lacks_prompt_log_probs:
                logits_of_chunk = logits[row : row + chunk.num_logits]
                sample = self._sampler.sample_rows
                if not note_prompt(sample, sequence, chunk, logits_of_chunk):
                    failed.append(sequence)

        return failed

    def _sample(
        self, logits: Floats, rows: list[int], sequences: list[EmbeddedSequence]
    ) -> list[Draw | None]:
        """Draw one token for each sequence from its row of `logits` (num_logits, vocab)."""
        take_draws(self._runner, logits, rows, sequences)
        if not sequences:
            return []

        return self._sampler.sample(logits, rows, sequences)

    # Sequences come and go. One may wait for its guide before it is scheduled.

    def _add(self, sequence: EmbeddedSequence) -> None:
        pooling = self._runner.pooling
        sequence.is_pooled_whole = pooling is not None and pooling.is_mean
        sequence.check_room(self._cache)
        if sequence.error is not None:
            return

        if self._lora is not None and not self._lora.admit(sequence):
            return

        if self._guides.admit(sequence):
            self._scheduler.add(sequence)

    def _remove(self, sequence: EmbeddedSequence) -> None:
        if not self._guides.forget(sequence):
            self._scheduler.remove(sequence)

        if self._events is not None:
            self._events.publish()

        if self._lora is not None:
            self._lora.release(sequence)

    def _wake(self) -> None:
        self._guides.wake()

    @property
    def _idle_look_s(self) -> float | None:
        return None if self._watch is None else self._watch.idle_look_s

    def _look_while_idle(self) -> None:
        if self._watch is not None:
            self._watch.look_while_idle()

        if self._events is not None:
            self._events.publish()

    @property
    def _active(self) -> SequenceOf[EmbeddedSequence]:
        return self._scheduler.running

    @property
    def _queued(self) -> SequenceOf[EmbeddedSequence]:
        return self._scheduler.waiting + self._guides.waiting

    @property
    def is_waiting_for_guides(self) -> bool:
        """Whether it makes no step because it waits for a guide."""
        return self._guides.is_waiting

    # Adapters, between two steps.

    @property
    def is_loading_adapter(self) -> bool:
        """Whether it makes no step because it reads the weights of an adapter."""
        # Another thread may set it to None between two looks.
        lora = self._lora
        return lora is not None and lora.is_reading

    def load_adapter(
        self, name: str, path: str, *, pinned: bool = False, preload: bool = True
    ) -> None:
        """Load an adapter between two steps: see `Adapters.load`."""
        lora = self._lora
        if lora is None:
            return super().load_adapter(name, path, pinned=pinned, preload=preload)

        # Weights are read here, before the boundary between two steps.
        prepared = lora.prepare(path, with_weights=preload or pinned)

        def load_prepared() -> None:
            lora.load_prepared(name, path, prepared, pinned=pinned, preload=preload)
            self._info = msgspec.structs.replace(self._info, adapters=lora.names)

        self._at_boundary(load_prepared)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter between two steps: see `Adapters.unload`."""
        lora = self._lora
        if lora is None:
            return super().unload_adapter(name)

        def unload() -> None:
            lora.unload(name)
            self._info = msgspec.structs.replace(self._info, adapters=lora.names)

        self._at_boundary(unload)

    # What it reports, and its end.

    @property
    def info(self) -> EngineInfo:
        """What the engine says of itself, with the adapters that are loaded."""
        return self._info

    @property
    def memory_use(self) -> MemoryUse | None:
        """What it holds of the memory now."""
        return None if self._held is None else self._held.use()

    def _kv_cache_stats(self) -> KvCacheStats:
        cache = self._cache
        num_found_or_missed = cache.num_reused_blocks + cache.num_missed_blocks

        return KvCacheStats(
            max_num_blocks=cache.num_blocks,
            free_num_blocks=cache.num_free_blocks,
            used_num_blocks=cache.num_used_blocks,
            tokens_per_block=cache.tokens_per_block,
            alloc_total_blocks=cache.num_new_blocks + cache.num_reused_blocks,
            alloc_new_blocks=cache.num_new_blocks,
            reused_blocks=cache.num_reused_blocks,
            missed_blocks=cache.num_missed_blocks,
            cache_hit_rate=cache.num_reused_blocks / (num_found_or_missed or 1),
        )

    def _close(self) -> None:
        self._guides.close()
        if self._events is not None:
            self._events.close()

        if self._stored is not None:
            self._stored.close()

        del self._runner, self._sampler, self._scheduler, self._cache, self._stored
        # Other threads may still ask for it.
        self._lora = None


def load(config: EngineConfig, model_path: str, progress: Progress) -> EmbeddedExecutor:
    """Entry point of the handler `lmi-dist`."""
    return EmbeddedExecutor(model_path, config, progress=progress)


def _no_name(number: int) -> None:
    """Adapters have no names where none can be loaded."""


def _count_computed(batch: Batch) -> None:
    """Note of each sequence what the step has computed of its tokens."""
    for sequence in batch.decoding:
        # The tokens of a draft are not among its own yet.
        sequence.num_computed += 1

    for chunk, leader, _ in batch.prefilling():
        for sequence in (leader, *batch.followers.get(leader, ())):
            sequence.num_computed = chunk.end


def _drawing(
    batch: Batch, failed: list[EmbeddedSequence]
) -> tuple[list[EmbeddedSequence], list[int]]:
    """The sequences that draw a token in this step, and the row of the logits that each
    draws from.
    """
    sequences = batch.decoding
    rows = batch.rows[: len(sequences)]
    for chunk, sequence, row in batch.prefilling():
        if chunk.end >= sequence.num_tokens and sequence not in failed:
            drawers = [sequence, *batch.followers.get(sequence, ())]
            sequences += drawers
            rows += [row + chunk.num_logits - 1] * len(drawers)

    return sequences, rows


def _fail_largest(batch: Batch, error: Exception) -> EmbeddedSequence:
    """Fail the sequence that needs the most memory: a prompt before a decode, a longer one before a
    shorter one.

    The other sequences repeat the step.
    """
    first = len(batch.plan.decodes) if batch.plan.prefills else 0
    chunks = batch.plan.chunks[first:]
    sizes = [(chunk.num_logits, chunk.end) for chunk in chunks]
    place_of_largest = sizes.index(max(sizes))
    sequence = batch.sequences[first + place_of_largest].owner
    sequence.fail(f"out of memory: {cause_line(error)}", ErrorKind.OUT_OF_MEMORY)
    return sequence


def _step_of(batch: Batch, touched: list[EmbeddedSequence]) -> Step[EmbeddedSequence]:
    """The step that has computed a batch, and given these sequences a token or an error."""
    generating = {sequence.id for sequence in batch.decoding}
    prefilling = {sequence.id for _, sequence, _ in batch.prefilling()}
    num_context_tokens = num_tokens_of(batch.plan.prefills)
    num_accepted = 0 if batch.drafts is None else batch.drafts.num_accepted_tokens
    num_embedded = sum(sequence.embedding is not None for sequence in touched)

    stats = IterationStats(
        inflight_batching_stats=InflightBatchingStats(
            num_scheduled_requests=len(generating | prefilling),
            num_context_requests=len(prefilling),
            num_gen_requests=len(generating),
            num_ctx_tokens=num_context_tokens,
        ),
        num_context_tokens=num_context_tokens,
        num_generation_tokens=len(batch.plan.decodes) + num_accepted + num_embedded,
        num_reused_tokens=batch.num_reused_tokens,
        num_preemptions=batch.num_preemptions,
        spec_decoding_stats=batch.drafts,
    )
    return Step(touched, stats)
