"""Embeddings: how the hidden states of a prompt become one vector.

Sums of hidden states are in float64 and in the order of the tokens, so an embedding does not depend
on cuts of the prompt.
"""

from collections.abc import Iterable

import numpy as np
from msgspec import Struct

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.plan import Chunk
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.executor import Embeddings, Tensor

# As of torch's normalize.
LEAST_NORM = 1e-12


class Pooling(Struct, frozen=True):
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
