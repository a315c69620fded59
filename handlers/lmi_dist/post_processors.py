"""The user's functions that change the logits of a request before its token is drawn.

They run on the thread of the engine, between two steps of the model: every request waits while they
run. Logits are torch's tensors in the host's memory where torch is installed, and numpy's arrays
elsewhere; the stream is None. Source: LogitsPostProcessorConfig of TensorRT-LLM's Executor API.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from handlers.base.post_processors import BATCHED, check_post_processors, load_post_processors
from handlers.lmi_dist.native.sampling_records import Floats
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.errors import error_line, shorten
from lmi.executor import ExecutorConfig, LogitsPostProcessorConfig
from lmi.executor.checks import broken
from lmi.settings.config import EngineConfig

# Functions get (id, logits, token_ids, stream, client_id), the batched one lists of all but the
# stream. On a CPU there is no stream.
NO_STREAM = None
# The library whose arrays functions get.
ARRAYS = "numpy" if find_spec("torch") is None else "torch"

log = logging.getLogger(__name__)


class SequenceLogits(NamedTuple):
    """The logits of one sequence in a step, and the tokens that it has so far."""

    # The first of its beams, if it has beams.
    sequence: EmbeddedSequence
    # Float32 (1, num_beams, vocab_size), a view: a tensor of torch, or an array of numpy.
    logits: Any
    # The tokens of each beam, without the prompt.
    token_ids: list[list[int]]


class PostProcessors:
    """The functions of a configuration, which is read once."""

    def __init__(self, config: LogitsPostProcessorConfig) -> None:
        """Raises ValueError if the configuration is wrong."""
        check_post_processors(config)
        self._named = dict(config.processor_map)
        self._batched = config.processor_batched
        # A request may give one of these.
        self.names = tuple(self._named)
        if self._batched is not None:
            self.names += (BATCHED,)

    def apply(self, logits: Floats, sequences: list[EmbeddedSequence]) -> None:
        """Let functions change the rows of `logits` (num_sequences, vocab_size), of sequences whose
        requests name one.

        The beams of a search are neighbours among the sequences. A sequence whose function fails
        gets an error.
        """
        # The batched function is called last, and once.
        batch: list[SequenceLogits] = []
        for piece in _pieces(logits, sequences):
            if piece.sequence.error is not None:
                # The function has failed for a sibling.
                continue

            if piece.sequence.request.logits_post_processor_name == BATCHED:
                batch.append(piece)
            else:
                self._process_sequence(piece)

        if batch:
            self._process_batch(batch)

    def _process_sequence(self, piece: SequenceLogits) -> None:
        """Call the function that the request of a sequence names."""
        sequence = piece.sequence
        logits = piece.logits
        name = sequence.request.logits_post_processor_name or ""
        client_id = sequence.request.client_id

        try:
            changed = self._named[name](sequence.id, logits, piece.token_ids, NO_STREAM, client_id)
            if changed is not None:
                _replace(logits, changed)
        except (Exception, SystemExit) as error:
            short_name = shorten(name)
            log.exception("logits post-processor %s failed for request %d", short_name, sequence.id)
            sequence.fail(f"logits post-processor {short_name} failed: {error_line(error)}")

    def _process_batch(self, pieces: list[SequenceLogits]) -> None:
        """Call the batched function for all sequences whose requests name it."""
        assert self._batched is not None
        sequences = [piece.sequence for piece in pieces]
        logits = [piece.logits for piece in pieces]
        token_ids = [piece.token_ids for piece in pieces]
        ids = [sequence.id for sequence in sequences]
        client_ids = [sequence.request.client_id for sequence in sequences]

        try:
            self._batched(ids, logits, token_ids, NO_STREAM, client_ids)
            # An entry of the list may be another tensor now.
            for piece, changed in zip(pieces, logits, strict=True):
                _replace(piece.logits, changed)
        except (Exception, SystemExit) as error:
            log.exception("the batched logits post-processor failed")
            for sequence in sequences:
                sequence.fail(f"the batched logits post-processor failed: {error_line(error)}")


def new_post_processors(
    settings: ExecutorConfig, options: EngineConfig, model: object
) -> PostProcessors | None:
    """Return the functions of the file that an option names, in the folder `model`, else those of
    the configuration, or None if there are none.

    Raises ValueError for a wrong configuration, and ModelUnusable for a wrong file.
    """
    config = settings.logits_post_processor_config
    if options.logits_post_processors is not None:
        folder = model if isinstance(model, str | os.PathLike) else ""
        config = load_post_processors(Path(folder, options.logits_post_processors))

    if config is None:
        return None

    return PostProcessors(config)


def _pieces(logits: Floats, sequences: list[EmbeddedSequence]) -> Iterator[SequenceLogits]:
    """Yield a piece for each sequence, or for all beams of a search, in the memory of `logits`."""
    arrays: Any = logits
    if ARRAYS == "torch":
        import torch

        arrays = torch.from_numpy(logits)

    first = 0
    for _, group in groupby(sequences, key=attrgetter("id", "index")):
        beams = list(group)
        end = first + len(beams)
        token_ids = [beam.token_ids[beam.num_prompt_tokens :] for beam in beams]
        yield SequenceLogits(beams[0], arrays[first:end][None], token_ids)

        first = end


def _replace(logits: Any, changed: Any) -> None:
    """Copy what a function gave into the logits of the step.

    Raises ValueError if it has another shape.
    """
    if changed is logits:
        return

    is_array = isinstance(changed, type(logits))
    if not is_array or changed.shape != logits.shape:
        returned = tuple(changed.shape) if is_array else changed
        noun = "an array" if ARRAYS == "numpy" else "a tensor"
        raise broken("what it returns", f"None or {noun} of shape {tuple(logits.shape)}", returned)

    logits[...] = changed
