"""Rows of a model's tensors that a request asked for: those of its prompt, and one for each
generated token.

The row of a generated token is the one that it was drawn from, so the row of the first token is
the last one of the prompt. An engine puts rows in, and a Sequence moves them into its Results. Each
row is in one Result; only the rows of beams are in every Result, as the tokens of beams are.
"""

from collections.abc import Hashable, Iterable, Sequence as SequenceOf
from itertools import count
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lmi.executor import OutputConfig, Result, Tensor

Array: TypeAlias = npt.NDArray[Any]

# The output that the flags of an OutputConfig ask for too.
LOGITS = "logits"


class Rows:
    """The rows of one output by the places of their tokens, each row as (1, …).

    The place of a token is its number. The place of a beam's token is all tokens generated before
    it, so that beams share the rows of what they have in common.
    """

    def __init__(self) -> None:
        self.by_place: dict[Hashable, Array] = {}
        # An array without rows, (0, …). It is there once there was a row.
        self.no_rows: Array | None = None

    def put(self, places: Iterable[Hashable], block: Array) -> None:
        """Copy rows (num_tokens, …). They replace those that are there: a step may be repeated."""
        block = block.copy()
        self.no_rows = block[:0]
        rows = (block[index : index + 1] for index in range(len(block)))
        self.by_place.update(zip(places, rows, strict=False))

    def at(self, places: Iterable[Hashable]) -> Array:
        """Return the rows at these places, (num_places, …). There must have been one."""
        assert self.no_rows is not None
        rows = [self.by_place[place] for place in places]
        return np.concatenate([self.no_rows, *rows])


class Captured:
    """The rows that one sequence keeps for its Results."""

    def __init__(self, output: OutputConfig, num_prompt_tokens: int, *, has_context: bool) -> None:
        """`has_context`: whether the prompt's rows are kept too. Only the first sequence of a
        request has them.
        """
        tensors = output.additional_model_outputs
        self._names = [tensor.name for tensor in tensors]
        self._context_names = [tensor.name for tensor in tensors if tensor.gather_context]
        self._output = output
        self._num_prompt_tokens = num_prompt_tokens

        # By output: the rows of generated tokens, and those of the prompt.
        self.generation = {name: Rows() for name in self._names}
        if output.return_generation_logits:
            self.generation[LOGITS] = Rows()

        self.context: dict[str, Rows] = {}
        if has_context:
            self.context = {name: Rows() for name in self._context_names}
            if output.return_context_logits:
                self.context[LOGITS] = Rows()

        # Whether rows of the prompt were computed, perhaps before a preemption.
        self.has_begun = False

    def put_context(self, name: str, token: int, block: Array) -> None:
        """Keep rows of the prompt, (num_tokens, …), of which the first is that of token number
        `token`.
        """
        self.has_begun = True
        self.context[name].put(count(token), block)

    def restart(self) -> None:
        """Forget the rows of a prompt that is computed again."""
        self.context = {name: Rows() for name in self.context}

    def add_to(
        self, result: Result, beams: SequenceOf[SequenceOf[Hashable]], *, is_first: bool
    ) -> None:
        """Give a Result the rows of its tokens, and the first Result those of the prompt.

        `beams` has the places of the tokens of each beam; a sequence without beams is one.
        """
        generation = self._generation_tensors(beams)
        context = self._context_tensors() if is_first else {}
        if self._output.return_generation_logits:
            result.generation_logits = generation.get(LOGITS)

        if self._output.return_context_logits:
            result.context_logits = context.get(LOGITS)

        if self._names:
            outputs: dict[str, Tensor] = {}
            for name in self._context_names:
                if name in context:
                    outputs[f"context_{name}"] = context[name]

            for name in self._names:
                if name in generation:
                    outputs[f"generation_{name}"] = generation[name]

            result.additional_outputs = outputs

    def _generation_tensors(self, beams: SequenceOf[SequenceOf[Hashable]]) -> dict[str, Tensor]:
        """Return the rows of these tokens by output, (num_beams, num_tokens, …)."""
        tensors: dict[str, Tensor] = {}
        for name, rows in self.generation.items():
            if rows.no_rows is not None:
                rows_of_beams = [rows.at(places) for places in beams]
                tensors[name] = _tensor(_padded(rows_of_beams))

        return tensors

    def _context_tensors(self) -> dict[str, Tensor]:
        """Return the rows of the prompt by output, of those that were computed to its end."""
        last_token = self._num_prompt_tokens - 1
        tensors: dict[str, Tensor] = {}
        for name, rows in self.context.items():
            if last_token in rows.by_place:
                tensors[name] = _tensor(rows.at(rows.by_place))

        return tensors

    def drop(self, places: Iterable[Hashable]) -> None:
        """Forget the rows of the prompt, and of these tokens: a Result has carried them."""
        self.context.clear()
        for place in places:
            for rows in self.generation.values():
                rows.by_place.pop(place, None)


def _padded(rows_of_beams: list[Array]) -> Array:
    """Return (num_beams, num_tokens, …) from (num_tokens, …) of each beam, with zeros behind those
    of a shorter one.
    """
    num_tokens = max(map(len, rows_of_beams))
    first = rows_of_beams[0]
    padded = np.zeros((len(rows_of_beams), num_tokens, *first.shape[1:]), first.dtype)
    for beam, rows in enumerate(rows_of_beams):
        padded[beam, : len(rows)] = rows

    return padded


def _tensor(array: Array) -> Tensor:
    return Tensor(array.shape, array.dtype.name, array.tobytes())
