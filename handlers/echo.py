"""An engine without a model. It repeats the prompt's tokens as the answer, one token a step.

It serves load tests of everything before the engine, and tests of faults. It keeps the whole
contract and ignores how a token should be chosen. Every log-prob is the same. Only what would
forbid a token of the prompt, or needs logits, is refused. Its options:

- `echo_step_ms`: how long a step takes, 10.
- `echo_prompt_s`: how long it computes a prompt before the first token, 0.
- `echo_max_num_sequences`: 64.
- `echo_fault_token`, `echo_hang_token`, `echo_die_token`: the id of a token with which a prompt
  breaks it: the step raises, never ends, or the process exits.
"""

import json
import os
import time
from collections.abc import Callable, Sequence as SequenceOf
from functools import partial
from pathlib import Path
from threading import Event

from handlers.base.stepped import Step, SteppedExecutor
from handlers.base.token_sequence import TokenSequence
from lmi.executor import (
    Capabilities,
    EngineInfo,
    IterationStats,
    Progress,
    PromptLogProb,
    TokenLogProb,
)
from lmi.settings.config import EngineConfig

LOG_PROB = -1.0
STEP_MS = 10.0
MAX_NUM_SEQUENCES = 64
# Where no config.json names them.
VOCAB_SIZE = 1 << 20
CONTEXT_LENGTH = 4096


def load(config: EngineConfig, model_path: str, progress: Progress) -> "EchoExecutor":
    """Entry point of the handler `echo`. It reads only config.json from the model folder, if it is
    there.
    """
    executor = EchoExecutor(config, model_path)
    progress("ready", 1.0)
    return executor


class EchoExecutor(SteppedExecutor[TokenSequence]):
    """An engine without a model, whose answer is its prompt."""

    def __init__(self, config: EngineConfig | None = None, model_path: str | None = None) -> None:
        config = config or EngineConfig(handler="echo")
        super().__init__(
            TokenSequence,
            config.max_queue_size,
            num_request_stats=config.request_stats_max_iterations,
        )
        options = config.options
        self._step_s = float(options.get("echo_step_ms", STEP_MS)) / 1000
        self._prompt_s = float(options.get("echo_prompt_s", 0.0))
        # What happens in a step that takes in a prompt with a token, by its id.
        self._faults = {int(options[name]): act for name, act in FAULTS.items() if name in options}

        self._waiting: list[TokenSequence] = []
        self._running: list[TokenSequence] = []
        # When each prompt was begun that is not computed whole.
        self._begun_s: dict[TokenSequence, float] = {}
        self._info = _describe(config, Path(model_path) if model_path else None)
        self._start()

    @property
    def info(self) -> EngineInfo:
        """What the engine says of itself."""
        return self._info

    def _add(self, sequence: TokenSequence) -> None:
        self._waiting.append(sequence)

    def _remove(self, sequence: TokenSequence) -> None:
        sequences = self._running if sequence in self._running else self._waiting
        sequences.remove(sequence)
        self._begun_s.pop(sequence, None)

    @property
    def _active(self) -> SequenceOf[TokenSequence]:
        return self._running

    @property
    def _queued(self) -> SequenceOf[TokenSequence]:
        return self._waiting

    def _step(self) -> Step[TokenSequence]:
        """A step takes `echo_step_ms` for any number of sequences, as a small model's step does."""
        started_s = time.perf_counter()
        admitted = self._admit(started_s)
        for sequence in self._running:
            if self._has_prompt(sequence, started_s):
                _advance(sequence)

        worked_s = time.perf_counter() - started_s
        time.sleep(max(0.0, self._step_s - worked_s))

        stats = IterationStats(
            num_context_tokens=sum(sequence.num_prompt_tokens for sequence in admitted),
            num_generation_tokens=len(self._running) - len(admitted),
        )
        return Step(list(self._running), stats)

    def _admit(self, now: float) -> SequenceOf[TokenSequence]:
        """Let as many sequences run as have room, and return them. A prompt may hold a fault."""
        num_free = self._info.max_num_sequences - len(self._running)
        admitted = self._waiting[:num_free]
        self._waiting = self._waiting[num_free:]
        self._running += admitted

        for sequence in admitted:
            for token_id in self._faults.keys() & set(sequence.request.input_token_ids):
                self._faults[token_id]()

            _note_prompt(sequence)
            self._begun_s[sequence] = now

        return admitted

    def _has_prompt(self, sequence: TokenSequence, now: float) -> bool:
        """Compute the part of a prompt that is due, and return whether it is all."""
        begun_s = self._begun_s.get(sequence)
        if begun_s is None:
            return True

        computed_s = now - begun_s
        if computed_s < self._prompt_s:
            share = computed_s / self._prompt_s
            sequence.num_computed = int(sequence.num_prompt_tokens * share)
            return False

        del self._begun_s[sequence]
        return True


def _advance(sequence: TokenSequence) -> None:
    """Append the token that lies one prompt length back, so the prompt repeats."""
    sequence.num_computed = sequence.num_tokens
    token_id = sequence.token_ids[-sequence.num_prompt_tokens]
    num_top = sequence.request.output_config.num_top_log_probs
    top = _top_tokens(token_id, num_top) if num_top else None
    sequence.append(token_id, LOG_PROB, top)


def _note_prompt(sequence: TokenSequence) -> None:
    """Give a sequence the log-probs of its prompt, if they are wanted. The first token has none."""
    if not sequence.lacks_prompt_log_probs:
        return

    num_top = sequence.request.output_config.num_prompt_log_probs or 0
    log_probs = [PromptLogProb(None)]
    for token_id in sequence.request.input_token_ids[1:]:
        log_probs.append(PromptLogProb(LOG_PROB, _top_tokens(token_id, num_top)))

    sequence.prompt_log_probs = log_probs


def _top_tokens(token_id: int, num_top: int) -> list[TokenLogProb]:
    """Return the token and those before it, down to 0, and then those after it."""
    first = max(0, token_id - num_top + 1)
    below = range(token_id, first - 1, -1)
    above = range(token_id + 1, first + num_top)
    return [TokenLogProb(alternative, LOG_PROB) for alternative in (*below, *above)]


def _raise() -> None:
    raise RuntimeError("the prompt held echo_fault_token")


FAULTS: dict[str, Callable[[], object]] = {
    "echo_fault_token": _raise,
    "echo_hang_token": Event().wait,
    "echo_die_token": partial(os._exit, 1),
}


def _describe(config: EngineConfig, folder: Path | None) -> EngineInfo:
    """Return what the engine says of itself, with the facts of the model's config.json."""
    facts: dict[str, int] = {}
    if folder is not None and (folder / "config.json").is_file():
        facts = json.loads((folder / "config.json").read_bytes())

    context_length = facts.get("max_position_embeddings", CONTEXT_LENGTH)
    max_num_sequences = config.options.get(
        "echo_max_num_sequences", config.max_num_sequences or MAX_NUM_SEQUENCES
    )
    return EngineInfo(
        name="echo",
        vocab_size=facts.get("vocab_size", VOCAB_SIZE),
        max_sequence_length=config.max_sequence_length or context_length,
        max_num_sequences=int(max_num_sequences),
        capabilities=Capabilities(
            num_return_sequences=True,
            typical_p=True,
            bad_words=False,
            perf_metrics=True,
            batch_invariant=True,
            log_probs_invariant=True,
        ),
    )
