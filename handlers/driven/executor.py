"""An Executor over a foreign engine, which queues, batches and caches by itself, and is seen
through a dozen methods.

A step that raises leaves the engine's state in doubt: sequences that ran end with an error, and
those that waited are given to the engine again.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from handlers.base.adapters import Adapters
from handlers.base.sequence import Sequence
from handlers.base.stepped import EngineStopped, Step, SteppedExecutor
from handlers.driven.beam_rounds import BeamRounds, BeamRow, check_beams
from handlers.driven.engine import Engine, EngineLoad, name_of
from handlers.driven.outputs import SequenceOutput, feed
from handlers.driven.preparation import Preparation
from handlers.driven.turns import Turns
from lmi import errors
from lmi.executor import EngineInfo, ErrorKind, ExecutorConfig, KvCacheStats, Request

log = logging.getLogger(__name__)

Work = TypeVar("Work")


class DrivenExecutor(SteppedExecutor[Sequence], Generic[Work]):
    """A subclass sets `title`, implements `_work`, and calls `_start` when the engine is warm."""

    # The name of the engine for messages.
    title: ClassVar[str]
    # Whether the engine searches by itself. Then it gets a sequence with beams as any other.
    searches_beams: ClassVar[bool] = False

    def __init__(
        self,
        engine: Engine[Work],
        info: EngineInfo,
        settings: ExecutorConfig,
        *,
        max_resident_adapters: int = 0,
        mixes_adapters: bool = True,
    ) -> None:
        """`mixes_adapters` says that one batch may hold sequences with and without an adapter."""
        super().__init__(
            Sequence,
            settings.max_queue_size,
            settings.iter_stats_max_iterations,
            settings.request_stats_max_iterations,
        )
        self._engine = engine
        self._info = msgspec.structs.replace(info, max_loras=max_resident_adapters)
        self._adapters = Adapters(engine, self.title, max_resident_adapters, self._kind_of)

        # The engine has a bound too.
        max_batch = info.max_num_sequences if info.num_express_places else math.inf
        self._turns = Turns[Sequence](max_batch, adapters_take_turns=not mixes_adapters)

        # A sequence passes one after the other.
        self._preparations: SequenceOf[Preparation[Any]] = ()
        # The sequences that the engine has, by their ids there.
        self._known: dict[str, Sequence] = {}
        self._load = EngineLoad()
        # Whether sequences were aborted since it told its load.
        self._has_aborted = False
        self._num_preemptions = 0

    # An engine's package decides these.

    def _work(self, sequence: Sequence) -> Work:
        """Translate a sequence for the engine. May raise what `Engine.add` raises."""
        raise NotImplementedError

    def _row_work(self, sequence: Sequence, row: BeamRow) -> Work:
        """Translate a running beam of a sequence, as `_work`. Only an engine that does not search
        beams needs it.
        """
        raise NotImplementedError

    def _kind_of(self, error: Exception) -> ErrorKind:
        if errors.is_out_of_memory(error) or isinstance(error, errors.OutOfMemory):
            return ErrorKind.OUT_OF_MEMORY

        if isinstance(error, errors.Unavailable):
            return ErrorKind.UNAVAILABLE

        if isinstance(error, ValueError | errors.InvalidRequest):
            return ErrorKind.INVALID

        return ErrorKind.GENERATION

    def _run_to_the_end(self, works: SequenceOf[Work]) -> None:
        """Warm the engine up, before it has requests. Raises what ends a work, as it would end
        every request.
        """
        num_open = len(works)
        for work in works:
            self._engine.add(work)

        while num_open:
            for output in self._engine.step() or ():
                if isinstance(output.end, Exception):
                    raise output.end

                num_open -= output.end is not None

    # The contract.

    @property
    def info(self) -> EngineInfo:
        """What the engine says of itself, with the adapters that are loaded."""
        return self._info

    def _check(self, request: Request) -> None:
        super()._check(request)
        if not self.searches_beams:
            check_beams(request, self.info)

    def can_enqueue_requests(self) -> bool:
        """Whether it takes requests, and all processes of the engine live."""
        return super().can_enqueue_requests() and self._engine.is_alive

    @property
    def is_loading_adapter(self) -> bool:
        """Whether the engine makes no step because it reads the weights of an adapter."""
        return self._adapters.is_reading

    @property
    def is_waiting_for_guides(self) -> bool:
        """Whether the engine makes no step because it waits for a guide."""
        return any(
            preparation.is_of_guides and preparation.is_waiting
            for preparation in self._preparations
        )

    def load_adapter(
        self, name: str, path: str, *, pinned: bool = False, preload: bool = True
    ) -> None:
        """Load an adapter between two steps: see `Adapters.load`."""
        if not self.capabilities.lora:
            super().load_adapter(name, path, pinned=pinned, preload=preload)

        change = partial(self._adapters.load, name, path, pinned=pinned, preload=preload)
        self._change_adapters(change)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter between two steps: see `Adapters.unload`."""
        if not self.capabilities.lora:
            super().unload_adapter(name)

        self._change_adapters(partial(self._adapters.unload, name))

    def _change_adapters(self, change: Callable[[], None]) -> None:
        def run() -> None:
            change()
            self._info = msgspec.structs.replace(self._info, adapters=self._adapters.names)

        self._at_boundary(run)

    # The sequences that the engine has, and those that wait for it.

    @property
    def _in_preparation(self) -> list[Sequence]:
        """The sequences whose preparations go on."""
        return [sequence for preparation in self._preparations for sequence in preparation.waiting]

    def _add(self, sequence: Sequence, first: int = 0) -> None:
        """Begin the next preparation that a sequence needs. Its turn may come when there is none
        left.
        """
        for preparation in self._preparations[first:]:
            future = preparation.begin(sequence)
            if future is not None:
                preparation.add_waiting(sequence, future)
                return

        try:
            self._adapters.claim(sequence)
        except errors.UnknownAdapter as error:
            self._fail(sequence, error)
        else:
            self._turns.add(sequence)

    def _go_on(self) -> list[Sequence]:
        """Let the sequences go on that are prepared. Returns those that were refused instead."""
        prepared = []
        for number, preparation in enumerate(self._preparations):
            for sequence, future in preparation.take_done():
                prepared.append(sequence)
                if self._equip(preparation, sequence, future):
                    self._add(sequence, number + 1)

        return [sequence for sequence in prepared if sequence.is_finished]

    def _equip(
        self, preparation: Preparation[Any], sequence: Sequence, future: Future[Any]
    ) -> bool:
        """Give a sequence what was prepared for it. Returns False if that failed."""
        try:
            preparation.equip(sequence, future.result())
        except errors.LmiError as error:
            self._fail(sequence, error)
            return False
        except Exception as error:
            log.exception("request %d was not prepared", sequence.id)
            sequence.fail(f"the request was not prepared: {errors.cause_line(error)}")
            return False

        return True

    def _remove(self, sequence: Sequence) -> None:
        for preparation in self._preparations:
            future = preparation.drop_waiting(sequence)
            if future is not None:
                # Nobody waits for it. What has begun goes on.
                future.cancel()

        names = [name for name in _names_of(sequence) if self._known.pop(name, None) is not None]
        if names:
            self._engine.abort(names)
            self._has_aborted = True
        elif sequence in self._turns.waiting:
            self._turns.waiting.remove(sequence)

        self._adapters.release(sequence)

    @property
    def _active(self) -> SequenceOf[Sequence]:
        # Another thread may ask while a step changes them.
        sequences = self._known.copy()
        load = self._load
        if isinstance(load.running, int):
            running: Iterable[Sequence] = islice(sequences.values(), load.running)
        else:
            running = (sequences[name] for name in load.running if name in sequences)

        # Several beams of a sequence may run.
        return list(dict.fromkeys(running))

    @property
    def _queued(self) -> SequenceOf[Sequence]:
        sequences = self._known.copy()
        active = self._active
        waiting = self._turns.waiting.copy()
        # This is so nearly always.
        if len(active) >= len(sequences):
            return [*waiting, *self._in_preparation]

        begun = set(active)
        queued = dict.fromkeys(sequence for sequence in sequences.values() if sequence not in begun)
        return [*queued, *waiting, *self._in_preparation]

    def _wake(self) -> None:
        for preparation in self._preparations:
            preparation.wake()

        self._engine.wake()

    def _kv_cache_stats(self) -> KvCacheStats:
        """Return what the sequences that are left hold. After the last one no step would tell."""
        if self._has_aborted:
            self._load.kv_cache = self._engine.load().kv_cache
            self._has_aborted = False

        return self._load.kv_cache

    def _close(self) -> None:
        for preparation in self._preparations:
            preparation.close()

        self._engine.close()

    # One step.

    def _step(self) -> Step[Sequence] | None:
        ended = self._go_on()
        if ended:
            return Step(ended)

        busy = [preparation for preparation in self._preparations if preparation.waiting]
        if busy and not self._known and not self._turns.waiting:
            busy[0].wait()
            return None

        refused = []
        for sequence in self._turns.take(self._known):
            if not self._give(sequence):
                refused.append(sequence)

        try:
            outputs = self._engine.step() if self._known else ()
        except EngineStopped:
            raise
        except Exception:
            self._start_over()
            raise

        if outputs is None and not refused:
            return None

        self._load = self._engine.load()
        self._has_aborted = False

        step = Step(refused)
        step.stats.num_preemptions = self._load.num_preemptions - self._num_preemptions
        self._num_preemptions = self._load.num_preemptions
        for output in outputs or ():
            self._take(output, step)

        return step

    def _give(self, sequence: Sequence) -> bool:
        """Give the engine a sequence, or each of its running beams. Returns False if it was
        refused.
        """
        try:
            if sequence.search is None or self.searches_beams:
                self._engine.add(self._work(sequence))
                self._known[name_of(sequence)] = sequence
            else:
                self._begin_round(sequence)
        except Exception as error:
            self._tell_refusal(sequence, error)
            self._fail(sequence, error)
            return False

        return True

    def _begin_round(self, sequence: Sequence) -> None:
        """Give the engine each running beam of a sequence. Raises what `Engine.add` raises."""
        if sequence.beam_state is None:
            sequence.beam_state = BeamRounds(sequence, name_of(sequence))

        for row in _rounds(sequence).begin():
            self._engine.add(self._row_work(sequence, row))
            self._known[row.name] = sequence

    def _tell_refusal(self, sequence: Sequence, error: Exception) -> None:
        """Tell the log of a sequence that was refused, unless its client can mend it."""
        if self._kind_of(error) is ErrorKind.INVALID:
            return

        # Of an LmiError the client reads all that is known.
        is_explained = isinstance(error, errors.LmiError)
        log.error(
            "%s did not take request %d: %s",
            self.title,
            sequence.id,
            error,
            exc_info=error if not is_explained else None,
        )

    def _take(self, output: SequenceOutput, step: Step[Sequence]) -> None:
        sequence = self._known.get(output.id)
        # The sequence may have ended a moment ago.
        if sequence is None:
            return

        is_first = sequence.is_prefilling
        if sequence.search is None or self.searches_beams:
            num_before = sequence.num_tokens
            feed(sequence, output)
            # An output may carry the tokens of several steps.
            num_new = sequence.num_tokens - num_before
        else:
            num_new = self._take_row(sequence, output)

        if is_first and not sequence.is_prefilling:
            step.stats.num_context_tokens += sequence.num_prompt_tokens
            # The first token comes with the prompt.
            num_new -= num_new > 0

        step.stats.num_generation_tokens += max(0, num_new) + (output.embedding is not None)
        if isinstance(output.end, Exception) and not sequence.is_finished:
            self._fail(sequence, output.end, f"{self.title} gave the request up: {output.end}")

        if output.end is not None:
            del self._known[output.id]

        step.touched.append(sequence)

    def _take_row(self, sequence: Sequence, output: SequenceOutput) -> int:
        """Note the output of one beam. Begin the next round after a round's last one, and return
        its new tokens.
        """
        rounds = _rounds(sequence)
        if sequence.is_finished or isinstance(output.end, Exception):
            return 0

        if not rounds.take(output):
            return 0

        num_rows = len(rounds.names)
        if not sequence.is_finished and self._give(sequence):
            self._note_running(rounds.names)

        return num_rows

    def _note_running(self, names: list[str]) -> None:
        """Count rows as running that go on from others, though the engine has not seen them."""
        running = self._load.running
        if isinstance(running, int):
            self._load.running = running + len(names)
        else:
            self._load.running = [*running, *names]

    def _fail(self, sequence: Sequence, error: Exception, message: str = "") -> None:
        """End a sequence with an error. The client reads the message of an LmiError, else `message`
        or the error.
        """
        if isinstance(error, errors.LmiError):
            sequence.fail(error.message, self._kind_of(error), error.field)
        else:
            sequence.fail(message or str(error), self._kind_of(error))

    def _start_over(self) -> None:
        """Empty the engine after a step that raised. Queued sequences without a token wait again;
        the rest may fail.
        """
        self._load = self._engine.load()
        in_preparation = self._in_preparation
        waiting = []
        for sequence in self._queued:
            # A sequence with tokens was preempted.
            if sequence not in in_preparation and not sequence.num_generated:
                waiting.append(sequence)

        self._engine.abort(self._known)
        self._has_aborted = True
        for sequence in waiting:
            for name in _names_of(sequence):
                self._known.pop(name, None)

        self._load = replace(self._load, running=list(self._known))
        self._turns.waiting.clear()
        for sequence in waiting:
            self._turns.add(sequence)


def _names_of(sequence: Sequence) -> list[str]:
    """The ids of a sequence, or of its running beams, at the engine."""
    if sequence.beam_state is None:
        return [name_of(sequence)]

    return _rounds(sequence).names


def _rounds(sequence: Sequence) -> BeamRounds:
    assert isinstance(sequence.beam_state, BeamRounds)
    return sequence.beam_state
