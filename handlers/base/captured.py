"""Rows of a model's tensors that a request asked for: those of its prompt, and one for each generated token.

The row of a generated token is the one that it was drawn from, so the first one's is the last of the prompt. An engine
puts rows in; a Sequence moves them into its Results, each once, but those of beams with every Result, as their tokens.
Plain Python: a row is its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from lmi.executor import OutputConfig, Result, Tensor

LOGITS = "logits"  # the output that the flags of an OutputConfig ask for too


@dataclass(slots=True)
class CapturedRows:
    """Rows of one output, one behind the other, in the order of tokens."""

    shape: tuple[int, ...] = (0,)  # of one row
    dtype: str = "float32"
    rows: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Rows:
    """The rows of one output that a sequence has, from token `start` on."""

    start: int = 0
    block: CapturedRows = field(default_factory=CapturedRows)

    @property
    def end(self) -> int:
        return self.start + len(self.block.rows)

    def put(self, token: int, block: CapturedRows) -> None:
        """Put the rows from `token` on. They replace those that are there: a step may be repeated."""
        if not self.block.rows:
            self.start = token
        self.block.shape, self.block.dtype = block.shape, block.dtype
        self.block.rows[token - self.start :] = block.rows

    def drop(self, end: int) -> None:
        """Forget the rows before token `end`."""
        if end > self.start:
            del self.block.rows[: end - self.start]
            self.start = end

    def tensor(self, end: int) -> Tensor:
        """The rows up to token `end`, (num_tokens, *shape)."""
        rows = self.block.rows[: end - self.start]
        return Tensor((len(rows), *self.block.shape), self.block.dtype, b"".join(rows))


@dataclass(slots=True)
class PrefixRows:
    """The rows of one output that a search has: each by the generated tokens before it, which beams may share."""

    block: CapturedRows = field(default_factory=CapturedRows)  # says what a row is, and has none
    rows: dict[tuple[int, ...], bytes] = field(default_factory=dict)

    def put(self, token_ids: list[int], block: CapturedRows) -> None:
        self.block = CapturedRows(block.shape, block.dtype)
        [self.rows[tuple(token_ids)]] = block.rows

    def tensor(self, beams: list[list[int]]) -> Tensor:
        """The rows of beams with these tokens, (num_beams, num_tokens, *shape). Behind a shorter beam there are zeros.

        There must be a row.
        """
        most, num_bytes = max(map(len, beams)), len(next(iter(self.rows.values())))
        data = bytearray()
        for beam in beams:
            data += b"".join(self.rows[tuple(beam[:end])] for end in range(len(beam)))
            data += bytes((most - len(beam)) * num_bytes)
        return Tensor((len(beams), most, *self.block.shape), self.block.dtype, bytes(data))


class Captured:
    """The rows that one sequence keeps for its Results."""

    def __init__(self, output: OutputConfig, num_prompt_tokens: int, *, has_context: bool) -> None:
        """`has_context`: whether the prompt's rows are kept too. Only the first sequence of a request has them."""
        names = [one.name for one in output.additional_model_outputs]
        context = [one.name for one in output.additional_model_outputs if one.gather_context]
        context += [LOGITS] * output.return_context_logits
        self.generation = {name: Rows() for name in names + [LOGITS] * output.return_generation_logits}
        self.beams = {name: PrefixRows() for name in self.generation}  # in place of `generation`, where there are beams
        self.context = {name: Rows() for name in context} if has_context else {}
        self.has_begun = False  # whether rows of the prompt were computed, perhaps before a preemption
        self._output, self._names = output, names
        self._num_prompt_tokens = num_prompt_tokens

    def put_context(self, name: str, token: int, block: CapturedRows) -> None:
        self.has_begun = True
        self.context[name].put(token, block)

    def restart(self) -> None:
        """Forget the rows of a prompt that is computed again."""
        self.context = {name: Rows() for name in self.context}

    def add_to(self, result: Result, num_generated: int, *, is_first: bool) -> None:
        """Give a Result the rows of the tokens that no Result has carried, and the first one those of the prompt."""
        rows = {name: one.tensor(num_generated) for name, one in self.generation.items() if one.end}
        self._add(result, {name: replace(one, shape=(1, *one.shape)) for name, one in rows.items()}, is_first)

    def add_beams_to(self, result: Result, beams: list[list[int]], *, is_first: bool) -> None:
        """Give a Result the rows of all tokens of its beams, and the first one those of the prompt."""
        self._add(result, {name: one.tensor(beams) for name, one in self.beams.items() if one.rows}, is_first)

    def _add(self, result: Result, rows: dict[str, Tensor], is_first: bool) -> None:
        context = {  # none of a prompt that was not computed to its end
            name: one.tensor(one.end)
            for name, one in self.context.items()
            if is_first and one.end == self._num_prompt_tokens
        }
        if self._output.return_generation_logits:
            result.generation_logits = rows.get(LOGITS)
        if self._output.return_context_logits:
            result.context_logits = context.get(LOGITS)
        if self._names:
            wanted = {one.name for one in self._output.additional_model_outputs if one.gather_context}
            result.additional_outputs = {f"context_{name}": one for name, one in context.items() if name in wanted}
            result.additional_outputs |= {f"generation_{name}": rows[name] for name in self._names if name in rows}

    def drop(self, num_sent: int) -> None:
        """Forget what Results have carried."""
        for rows in self.generation.values():
            rows.drop(num_sent)
        if num_sent:
            self.context.clear()


def new_captured(output: OutputConfig, num_prompt_tokens: int, index: int) -> Captured | None:
    """What sequence `index` of a request keeps, or None if the request asks for no rows."""
    if output.additional_model_outputs or output.return_context_logits or output.return_generation_logits:
        return Captured(output, num_prompt_tokens, has_context=index == 0)
    return None
