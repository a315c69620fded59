"""What requests want of a step beside tokens: rows of the logits and of declared outputs, and
embeddings of prompts.

Rows are taken from a step before the sampler and its rules change the logits. The bytes of a row
depend on nothing but its sequence, where the runner is batch-invariant. Sums of hidden states are
in float64 and in the order of the tokens, so an embedding does not depend on cuts of the prompt.
"""

import difflib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from handlers.base.captured import LOGITS
from handlers.base.configuration import CONTEXT
from handlers.lmi_dist.runner import Chunk, Runner
from handlers.lmi_dist.sequence import EmbeddedSequence
from handlers.lmi_dist.weights import Array
from lmi.errors import BadConfiguration, shorten
from lmi.executor import Embeddings, Tensor
from lmi.settings.config import EngineConfig

# The states after the last norm.
HIDDEN_STATES = "hidden_states"
# As of torch's normalize.
LEAST_NORM = 1e-12


def layer_name(layer: int) -> str:
    """The name of what a layer gives to the next one."""
    return f"{HIDDEN_STATES}.{layer}"


def hidden_names(num_layers: int) -> tuple[str, ...]:
    """The outputs that every model has beside the logits."""
    return (HIDDEN_STATES, *map(layer_name, range(num_layers)))


def declared_names(config: EngineConfig, outputs: Iterable[str]) -> list[str]:
    """The declared outputs that a runner keeps, which are all but the logits.

    Raises BadConfiguration with one line for each that is none of the model's `outputs`, which
    names the nearest one.
    """
    names: list[str] = []
    faults: list[str] = []
    possible_names = [LOGITS, *outputs]
    for text in config.additional_outputs:
        name = text.removesuffix(CONTEXT)
        if name not in possible_names:
            nearest = difflib.get_close_matches(name, possible_names, n=1, cutoff=0.0)[0]
            faults.append(
                f"additional_outputs: the model has no output {shorten(name)}; "
                f"the nearest is {nearest}"
            )
        elif name != LOGITS:
            names.append(name)

    if faults:
        raise BadConfiguration("\n".join(faults))

    return names


def take_prompt(
    runner: Runner, sequence: EmbeddedSequence, chunk: Chunk, logits: Array, first: int
) -> None:
    """Keep the rows of a chunk of a prompt, which begin at row `first` of `logits` (num_logits,
    vocab).
    """
    captured = sequence.captured
    assert captured is not None

    for name in captured.context:
        rows = _rows(runner, name, logits)[first : first + chunk.num_logits]
        captured.put_context(name, chunk.start, rows)


def take_draws(
    runner: Runner, logits: Array, rows: list[int], sequences: list[EmbeddedSequence]
) -> None:
    """Keep the row of `logits` (num_logits, vocab) from which each sequence draws its
    next token.
    """
    for row, sequence in zip(rows, sequences, strict=True):
        captured = sequence.captured
        if captured is None:
            continue

        for name, rows_of_output in captured.generation.items():
            place: Hashable = sequence.num_generated
            if sequence.request.sampling_config.beam_width > 1:
                place = tuple(sequence.token_ids[sequence.num_prompt_tokens :])

            rows_of_output.put([place], _rows(runner, name, logits)[row : row + 1])


def _rows(runner: Runner, name: str, logits: Array) -> Array:
    """The rows of the runner's last step, (num_logits, …)."""
    return logits if name == LOGITS else runner.output(name)


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the states (num_tokens, size) behind the last norm become an embedding."""

    # Of the states of all tokens. Otherwise the embedding is the state of the last one.
    is_mean: bool
    is_normalised: bool
    embeddings: Embeddings
    # In tokens: of those that the model was trained for, or its context.
    max_length: int

    def take(
        self, prefilling: Iterable[tuple[Chunk, EmbeddedSequence, int]], states: Array
    ) -> list[EmbeddedSequence]:
        """Pool the states (num_wanted, size) of a step, with the first row of each chunk of a
        prompt.

        Returns the sequences that have their embedding or an error. Sequences change only after all
        is computed, so that a step that ran out of memory can be repeated.
        """
        pooled: list[tuple[Chunk, EmbeddedSequence, Array | None]] = []
        for chunk, sequence, row in prefilling:
            states_of_chunk = states[row : row + chunk.num_logits]
            pooled.append((chunk, sequence, self._pool(sequence, states_of_chunk)))

        for chunk, sequence, state in pooled:
            sequence.num_computed = chunk.end
            if chunk.end < sequence.num_prompt_tokens:
                sequence.pooled = state
            else:
                self._end(sequence, state)

        return [sequence for _, sequence, _ in pooled if sequence.is_finished]

    def _pool(self, sequence: EmbeddedSequence, states: Array) -> Array | None:
        """The sum, float64 (size,), of all states so far, or the last one, or None inside a prompt
        without a sum.
        """
        if not self.is_mean:
            return states[-1].astype(np.float64) if len(states) else None

        if sequence.pooled is None:
            total = np.zeros(states.shape[1])
        else:
            total = sequence.pooled.copy()

        for state in states:
            total += state

        return total

    def _end(self, sequence: EmbeddedSequence, state: Array | None) -> None:
        params = sequence.request.pooling_params
        assert params is not None and state is not None
        embedding = state
        if self.is_mean:
            embedding = embedding / sequence.num_prompt_tokens

        embedding = embedding[: params.dimensions]
        if self.is_normalised:
            norm = float(np.linalg.norm(embedding))
            embedding = embedding / max(norm, LEAST_NORM)

        if np.isfinite(embedding).all():
            sequence.embed(Tensor(embedding.shape, "float32", embedding.astype("<f4").tobytes()))
        else:
            sequence.fail("the model's hidden states for the prompt are not numbers")
