"""The embedded executor: schedule, run, sample, finish.

`SteppedExecutor` does everything around the step: queue, cancel, deadlines, responses, statistics.
The scheduler chooses which tokens are computed. Logits come from the model runner and end in the
sampler.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence as SequenceOf
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from handlers.base.configuration import AnyConfig, both
from handlers.base.stepped import Step, SteppedExecutor
from handlers.guides.compiler import compile_limit_s
from handlers.guides.process import Start
from handlers.lmi_dist.about import MAX_PREFILL_TOKENS, own_options
from handlers.lmi_dist.captured import take_draws, take_prompt
from handlers.lmi_dist.guides import Guides
from handlers.lmi_dist.kv_cache import KvCache
from handlers.lmi_dist.loading import describe, in_files, load_runner
from handlers.lmi_dist.logits_rules import new_post_processors
from handlers.lmi_dist.lora import LoraAdapters
from handlers.lmi_dist.memory import MemoryWatch
from handlers.lmi_dist.native.library import num_threads
from handlers.lmi_dist.native.sampling import Floats
from handlers.lmi_dist.pace import Pace
from handlers.lmi_dist.runner import Runner, num_tokens_of
from handlers.lmi_dist.sampler import Draw, Sampler, advance_beams, append_draws, note_prompt
from handlers.lmi_dist.scheduler import Batch, Scheduler
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.errors import cause_line, is_out_of_memory
from lmi.executor.config import ExecutorConfig
from lmi.executor.executor import (
    EngineInfo,
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    Progress,
    SpecDecodingStats,
)
from lmi.executor.response import ErrorKind
from lmi.settings.config import EngineConfig

if TYPE_CHECKING:
    from handlers.lmi_dist.cache_events import CacheEvents

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
        if isinstance(
            json_config_str, ExecutorConfig | EngineConfig
        ):  # the second argument of the first form
            json_config_str, config = None, json_config_str

        settings, options = both(config)
        stats = settings.iter_stats_max_iterations, settings.request_stats_max_iterations
        super().__init__(EmbeddedSequence, settings.max_queue_size, *stats)
        processors = new_post_processors(settings, options, model)
        with in_files(model, json_config_str) as source:
            self._runner, limits = load_runner(source, options, progress)

        self._lora = None if self._runner.adapters is None else LoraAdapters(self._runner.adapters)
        self._events = self._new_events(options)
        self._cache = KvCache(
            limits.num_cache_tokens // self._runner.tokens_per_block,
            limits.num_all_slots,
            self._runner.tokens_per_block,
            slots=self._runner.slots,
            reuses_prefixes=settings.kv_cache_config.enable_block_reuse,
            events=self._events,
        )
        max_step_s = None if options.max_step_ms is None else options.max_step_ms / 1000
        self._pace = Pace(options.max_prefill_tokens or MAX_PREFILL_TOKENS, max_step_s)
        if options.speculative is not None and not self._runner.is_batch_invariant:
            why = (
                "option.speculative has no effect: with kernels of %s a draft could change answers"
            )
            log.warning(why, self._runner.kernels)

        self._scheduler = Scheduler(
            self._cache,
            self._pace,
            drafts=options.speculative is not None and self._runner.is_batch_invariant,
            may_run=None if self._lora is None else self._lora.may_run,
            num_express=limits.num_express,
        )
        self._watch: MemoryWatch | None = None
        if (memory := self._runner.memory) is not None:
            num_rows = limits.num_all_slots + (options.max_prefill_tokens or MAX_PREFILL_TOKENS)
            self._watch = MemoryWatch(
                self._cache, memory, memory.step_bytes(num_rows, limits.num_all_slots)
            )

        self._sampler = Sampler(self._runner.vocab_size, processors, num_threads())
        folder = None  # of a server's model: guides may read its tokenizer
        if isinstance(model, str | os.PathLike) and isinstance(config, EngineConfig):
            folder = os.fspath(model)

        is_compact = own_options(options.options).get("disable_any_whitespace", True)
        start = Start(self._runner.vocab_size, compile_limit_s(options.step_timeout_s), is_compact)
        self._guides = Guides(settings.guided_decoding_config, folder, start)
        self._info = describe(self._runner, limits, settings, self._guides.why_none, processors)
        self._start()

    def _new_events(self, options: EngineConfig) -> CacheEvents | None:
        """Return what tells routers of the cache, where an option wants it. Raises
        BadConfiguration.
        """
        if options.kv_events_config is None or not options.kv_events_config.is_enabled:
            return None

        if self._runner.slots is not None:
            why = (
                "option.kv_events_config has no effect: with kernels of %s prompts share no blocks"
            )
            log.warning(why, self._runner.kernels)
            return None

        from handlers.lmi_dist.cache_events import new_events

        lora = self._lora
        name_of = (lambda number: None) if lora is None else lora.name_of
        return new_events(options.kv_events_config, options.num_engines, name_of)

    # One step.

    def _step(self) -> Step[EmbeddedSequence] | None:
        ready = self._guides.take_ready()
        for sequence in ready:
            if sequence.error is None:
                self._scheduler.add(sequence)

        if refused := [sequence for sequence in ready if sequence.error is not None]:
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
        has_beams = bool(sequences) and sequences[0].rows is not None
        if has_beams:
            take_draws(self._runner, logits, rows, sequences)
            outlooks = self._sampler.look_ahead(logits, rows, sequences)
        else:
            draws = self._sample(logits, rows, sequences)

        for sequence in batch.decoding:
            sequence.num_computed += 1  # the tokens of a draft are not among its own yet

        for chunk, sequence, _ in batch.prefilling():
            for one in (sequence, *batch.followers.get(sequence, ())):
                one.num_computed = chunk.end

        for sequence in failed:
            sequence.fail("the model's logits for the prompt are not numbers")

        if has_beams:
            return failed + advance_beams(outlooks)

        append_draws(sequences, draws)
        if self._scheduler.drafts:
            batch.drafts = self._check_drafts(batch, logits)

        return failed + sequences

    def _note_prompts(self, batch: Batch, logits: Floats) -> list[EmbeddedSequence]:
        """Keep what requests want to know of their prompts. Returns the sequences whose log-probs
        are not numbers.
        """
        failed = []
        for chunk, sequence, row in batch.prefilling():
            if sequence.lacks_context:
                take_prompt(self._runner, sequence, chunk, logits, row)

            own = logits[row : row + chunk.num_logits]
            if sequence.lacks_prompt_log_probs and not note_prompt(
                self._sampler.choose, sequence, chunk, own
            ):
                failed.append(sequence)

        return failed

    def _sample(
        self, logits: Floats, rows: list[int], sequences: list[EmbeddedSequence]
    ) -> list[Draw | None]:
        """Draw one token for each sequence from its row of `logits` (num_logits, vocab)."""
        take_draws(self._runner, logits, rows, sequences)
        return self._sampler.sample(logits, rows, sequences) if sequences else []

    def _check_drafts(self, batch: Batch, logits: Floats) -> SpecDecodingStats | None:
        """Keep what is right of each draft, by `logits` (num_logits, vocab). Returns how much that
        is.

        Every token is drawn with the sampler's state that it has without a draft, so it is the same
        one. If memory runs out, the rest is dropped: the step must not be repeated.
        """
        drafts = [
            (sequence, chunk.token_ids[1:], row)  # the row is that of the token before the draft
            for chunk, sequence, row in zip(
                batch.plan.decodes, batch.decoding, batch.rows, strict=False
            )
            if len(chunk.token_ids) > 1
        ]
        if not drafts:
            return None

        num_right = Counter[EmbeddedSequence]()
        right = drafts
        place = 0
        try:
            while right := [one for one in right if _is_right(one[0], one[1][place : place + 1])]:
                place += 1
                sequences = [sequence for sequence, _, _ in right]
                draws = self._sample(logits, [row + place for _, _, row in right], sequences)
                num_right.update(sequences)
                for sequence in sequences:
                    sequence.num_computed += 1

                append_draws(sequences, draws)
        except Exception as error:
            if not is_out_of_memory(error):
                raise

        for sequence, draft, _ in drafts:
            assert sequence.drafter is not None
            sequence.drafter.note(num_right[sequence], len(draft))

        return SpecDecodingStats(
            num_requests_with_draft_tokens=len(drafts),
            num_draft_tokens=sum(len(draft) for _, draft, _ in drafts),
            num_accepted_tokens=num_right.total(),
        )

    # Sequences come and go. One may wait for its guide before it is scheduled.

    def _add(self, sequence: EmbeddedSequence) -> None:
        sequence.is_pooled_whole = (pooling := self._runner.pooling) is not None and pooling.is_mean
        sequence.check_room(self._cache)
        if sequence.error is not None or (
            self._lora is not None and not self._lora.admit(sequence)
        ):
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
    def _active(self) -> SequenceOf[EmbeddedSequence]:
        return self._scheduler.running

    @property
    def _queued(self) -> SequenceOf[EmbeddedSequence]:
        return self._scheduler.waiting + self._guides.waiting

    @property
    def is_waiting_for_guides(self) -> bool:
        return self._guides.is_waiting

    # Adapters, between two steps.

    @property
    def is_loading_adapter(self) -> bool:
        return (lora := self._lora) is not None and lora.is_reading

    def load_adapter(
        self, name: str, path: str, *, pinned: bool = False, preload: bool = True
    ) -> None:
        if (lora := self._lora) is None:
            return super().load_adapter(name, path, pinned=pinned, preload=preload)

        prepared = lora.prepare(path, with_weights=preload or pinned)
        change = partial(lora.load_prepared, name, path, prepared, pinned=pinned, preload=preload)
        self._at_boundary(partial(self._change_adapters, lora, change))

    def unload_adapter(self, name: str) -> None:
        if (lora := self._lora) is None:
            return super().unload_adapter(name)

        self._at_boundary(partial(self._change_adapters, lora, partial(lora.unload, name)))

    def _change_adapters(self, lora: LoraAdapters, change: Callable[[], None]) -> None:
        change()
        self._info = msgspec.structs.replace(self._info, adapters=lora.names)

    # What it reports, and its end.

    @property
    def info(self) -> EngineInfo:
        return self._info

    def _kv_cache_stats(self) -> KvCacheStats:
        cache = self._cache
        return KvCacheStats(
            max_num_blocks=cache.num_blocks,
            free_num_blocks=cache.num_free_blocks,
            used_num_blocks=cache.num_used_blocks,
            tokens_per_block=cache.tokens_per_block,
            alloc_total_blocks=cache.num_new_blocks + cache.num_reused_blocks,
            alloc_new_blocks=cache.num_new_blocks,
            reused_blocks=cache.num_reused_blocks,
            missed_blocks=cache.num_missed_blocks,
            cache_hit_rate=cache.num_reused_blocks
            / (cache.num_reused_blocks + cache.num_missed_blocks or 1),
        )

    def _close(self) -> None:
        self._guides.close()
        if self._events is not None:
            self._events.close()

        del self._runner, self._sampler, self._scheduler, self._cache
        self._lora = None  # other threads may still ask for it


def load(config: EngineConfig, model_path: str, progress: Progress) -> EmbeddedExecutor:
    """Entry point of the handler `lmi-dist`."""
    return EmbeddedExecutor(model_path, config, progress=progress)


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
            own = [sequence, *batch.followers.get(sequence, ())]
            sequences += own
            rows += [row + chunk.num_logits - 1] * len(own)

    return sequences, rows


def _fail_largest(batch: Batch, error: Exception) -> EmbeddedSequence:
    """Fail the sequence that needs the most memory: a prompt before a decode, a longer one before a
    shorter one.

    The other sequences repeat the step.
    """
    start = len(batch.plan.decodes) if batch.plan.prefills else 0
    chunks = list(zip(batch.plan.chunks, batch.sequences, strict=True))[start:]
    sequence = max(chunks, key=lambda pair: (pair[0].num_logits, pair[0].end))[1].owner
    sequence.fail(f"out of memory: {cause_line(error)}", ErrorKind.OUT_OF_MEMORY)
    return sequence


def _is_right(sequence: EmbeddedSequence, drafted: list[int]) -> bool:
    """Whether the token drawn last is the drafted one, where there is one."""
    return sequence.token_ids[-1:] == drafted and not sequence.is_finished


def _step_of(batch: Batch, touched: list[EmbeddedSequence]) -> Step[EmbeddedSequence]:
    """The step that has computed a batch, and given these sequences a token or an error."""
    generating = {sequence.id for sequence in batch.decoding}
    prefilling = {sequence.id for _, sequence, _ in batch.prefilling()}
    num_context_tokens = num_tokens_of(batch.plan.prefills)
    num_accepted = 0 if batch.drafts is None else batch.drafts.num_accepted_tokens
    num_embedded = sum(one.embedding is not None for one in touched)
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
