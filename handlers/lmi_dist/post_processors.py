"""Logits post-processors: functions of the user that change the logits of a request before its token is drawn.

They run on the thread of the engine, between two steps of the model: what they take, every request waits for. Logits
are torch's tensors in the host's memory where torch is installed, and numpy's arrays elsewhere; the stream is None.
Source: LogitsPostProcessorConfig of TensorRT-LLM's Executor API.
"""

import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from handlers.base.configuration import BATCHED, check_post_processors, load_post_processors, said
from handlers.lmi_dist.native.sampling import Floats
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.errors import shorten
from lmi.executor import ExecutorConfig, LogitsPostProcessorConfig
from lmi.executor.checks import broken
from lmi.settings.config import EngineConfig

ARRAYS = "numpy" if find_spec("torch") is None else "torch"  # the library whose arrays functions get

log = logging.getLogger(__name__)


class SequenceLogits(NamedTuple):
    """The logits of one sequence in a step, float32 (1, num_beams, vocab), a view; and what its beams have so far."""

    sequence: EmbeddedSequence
    logits: Any  # a tensor of torch, or an array of numpy
    token_ids: list[list[int]]  # of each beam, without the prompt


class PostProcessors:
    """The functions of a configuration, which is read once. Raises ValueError if it is wrong."""

    def __init__(self, config: LogitsPostProcessorConfig) -> None:
        check_post_processors(config)
        self._named = dict(config.processor_map)
        self._batched = config.processor_batched

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a request may give."""
        return (*self._named, *([BATCHED] if self._batched is not None else []))

    def apply(self, logits: Floats, sequences: list[EmbeddedSequence]) -> None:
        """Let the functions change rows of `logits` (num_sequences, vocab), whose requests all name one.

        The beams of a search are neighbours among the sequences. A sequence whose function fails has an error then.
        """
        batched = []  # the batched function is called last, and once
        for piece in _pieces(logits, sequences):
            if piece.sequence.error is not None:
                continue  # the function has failed for a sibling
            if piece.sequence.request.logits_post_processor_name == BATCHED:
                batched.append(piece)
            else:
                self._process_one(piece)
        if batched:
            self._process_batch(batched)

    def _process_one(self, piece: SequenceLogits) -> None:
        sequence, logits, token_ids = piece
        name, client_id = sequence.request.logits_post_processor_name or "", sequence.request.client_id
        try:
            changed = self._named[name](sequence.id, logits, token_ids, None, client_id)
            if changed is not None:
                _replace(logits, changed)
        except (Exception, SystemExit) as error:
            log.exception("logits post-processor %s failed for request %d", shorten(name), sequence.id)
            sequence.fail(f"logits post-processor {shorten(name)} failed: {said(error)}")

    def _process_batch(self, pieces: list[SequenceLogits]) -> None:
        assert self._batched is not None
        sequences = [piece.sequence for piece in pieces]
        logits = [piece.logits for piece in pieces]
        token_ids = [piece.token_ids for piece in pieces]
        client_ids = [one.request.client_id for one in sequences]
        try:
            self._batched([one.id for one in sequences], logits, token_ids, None, client_ids)
            for piece, changed in zip(pieces, logits, strict=True):  # an entry of the list may be another tensor now
                _replace(piece.logits, changed)
        except (Exception, SystemExit) as error:
            log.exception("the batched logits post-processor failed")
            for one in sequences:
                one.fail(f"the batched logits post-processor failed: {said(error)}")


def new_post_processors(settings: ExecutorConfig, options: EngineConfig, model: object) -> PostProcessors | None:
    """The functions of the configuration, or of the file that an option names, in the folder `model`; None without."""
    config = settings.logits_post_processor_config
    if options.logits_post_processors is not None:
        folder = model if isinstance(model, str | os.PathLike) else ""
        config = load_post_processors(Path(folder, options.logits_post_processors))
    return None if config is None else PostProcessors(config)


def _pieces(logits: Floats, sequences: list[EmbeddedSequence]) -> Iterator[SequenceLogits]:
    """A piece for each sequence, or for all beams of a search, in the same memory."""
    given: Any = logits
    if ARRAYS == "torch":
        import torch

        given = torch.from_numpy(logits)
    for _, group in groupby(range(len(sequences)), key=lambda row: (sequences[row].id, sequences[row].index)):
        own = list(group)
        beams = [sequences[row] for row in own]
        token_ids = [beam.token_ids[beam.num_prompt_tokens :] for beam in beams]
        yield SequenceLogits(beams[0], given[own[0] : own[-1] + 1][None], token_ids)


def _replace(logits: Any, changed: Any) -> None:
    """Copy what a function gave into the logits of the step. Raises ValueError if it has another shape."""
    if changed is logits:
        return
    is_like = isinstance(changed, type(logits))
    if not is_like or changed.shape != logits.shape:
        given = tuple(changed.shape) if is_like else changed
        noun = "an array" if ARRAYS == "numpy" else "a tensor"
        raise broken("what it returns", f"None or {noun} of shape {tuple(logits.shape)}", given)
    logits[...] = changed
