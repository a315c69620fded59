"""Rows of a model's tensors that a request asked for: those of its prompt, and one for each
generated token.

The row of a generated token is the one that it was drawn from, so the first one's is the last of
the prompt. An engine puts rows in; a Sequence moves them into its Results, each once, but those of
beams with every Result, as their tokens.
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
    """The rows of one output by their places, each as (1, …).

    The place of a token is its number. That of a beam's token is the tokens generated before it,
    which beams may share.
    """

    def __init__(self) -> None:
        self.by_place: dict[Hashable, Array] = {}
        # No rows, in the shape of a row, once there was one.
        self.none: Array | None = None

    def put(self, places: Iterable[Hashable], block: Array) -> None:
        """Copy rows (num_tokens, …). They replace those that are there: a step may be repeated."""
        block = block.copy()
        self.none = block[:0]
        rows = (block[index : index + 1] for index in range(len(block)))
        self.by_place.update(zip(places, rows, strict=False))

    def at(self, places: Iterable[Hashable]) -> Array:
        """Return the rows at these places, (num_places, …). There must have been one."""
        assert self.none is not None
        return np.concatenate([self.none, *(self.by_place[place] for place in places)])


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

        generation_names = self._names + [LOGITS] * output.return_generation_logits
        context_names = self._context_names + [LOGITS] * output.return_context_logits
        self.generation = {name: Rows() for name in generation_names}
        self.context = {name: Rows() for name in context_names} if has_context else {}
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
        """Give a Result the rows of its tokens, by their places in each beam, and the first one
        those of the prompt.
        """
        generation: dict[str, Tensor] = {}
        for name, rows in self.generation.items():
            if rows.none is not None:
                rows_of_beams = [rows.at(places) for places in beams]
                generation[name] = _tensor(_padded(rows_of_beams))

        # Without this token the prompt was not computed to its end.
        last = self._num_prompt_tokens - 1
        context: dict[str, Tensor] = {}
        for name, rows in self.context.items():
            if is_first and last in rows.by_place:
                context[name] = _tensor(rows.at(rows.by_place))

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

    def drop(self, places: Iterable[Hashable]) -> None:
        """Forget the rows of the prompt, and of these tokens: a Result has carried them."""
        self.context.clear()
        for place in places:
            for rows in self.generation.values():
                rows.by_place.pop(place, None)


def _padded(beams: list[Array]) -> Array:
    """From (num_tokens, …) of each beam to (num_beams, num_tokens, …), with zeros behind a shorter
    one.
    """
    num_tokens = max(map(len, beams))
    shape = (len(beams), num_tokens, *beams[0].shape[1:])
    padded = np.zeros(shape, beams[0].dtype)
    for beam, rows in zip(padded, beams, strict=True):
        beam[: len(rows)] = rows

    return padded


def _tensor(array: Array) -> Tensor:
    return Tensor(array.shape, array.dtype.name, array.tobytes())
