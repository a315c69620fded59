"""Runners without weights: the logits of a position are a fixed function of the tokens up to it.

They keep tokens as a real cache keeps keys and values, and refuse a plan that reads what was never
written, or what belongs to other tokens. So they find a scheduler that forgets to recompute, or
that shares what differs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from handlers.lmi_dist.kv_cache import Slots
from handlers.lmi_dist.pace import Pace
from handlers.lmi_dist.plan import Chunk, Plan
from handlers.lmi_dist.runner import BlockMemory

_FACTOR = 0x9E3779B97F4A7C15

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.uint64]


def log_softmax(logits: Floats) -> Floats:
    """(vocab,) to (vocab,), within a rounding of what an engine reports."""
    shifted = logits.astype(np.float64) - logits.max()
    return (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)


class SteadyPace(Pace):
    """A pace that allows as many prompt tokens beside decodes as without."""

    def num_prompt_tokens(self, num_decodes: int, num_prompts: int = 1) -> int:
        return super().num_prompt_tokens(0)


class FakeRunner:
    """Keeps the state after each token of each slot, and is its own `Slots`."""

    dtype = "float32"
    device = "cpu"
    kernels = "none"
    is_batch_invariant = True
    tokens_per_block = 16
    adapters = None
    pooling = None
    memory: BlockMemory | None = None
    weight_bytes: int | None = None

    def __init__(
        self,
        vocab_size: int = 50,
        context_length: int = 512,
        poison: dict[int, float] | None = None,
    ) -> None:
        """`poison`: a value of the logits after a token. Such tokens come only in prompts, never in
        an answer.
        """
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.slots: Slots | None = self
        self.states: dict[int, list[int]] = {}  # by slot
        self.plans: list[Plan] = []
        self.poison = poison or {}
        # The states at the wanted positions of the last step
        self.wanted: list[int] = []

    def forward(self, plan: Plan) -> Floats:
        self.plans.append(plan)
        logits: list[Floats] = []
        self.wanted = []
        for chunk in plan.chunks:
            slot = self.states.setdefault(chunk.slot, [])
            assert chunk.start <= len(slot), "reads keys that nobody wrote"
            del slot[chunk.start :]
            for token_id in chunk.token_ids:
                slot.append(_next_state(slot[-1] if slot else 0, token_id))

            first = len(chunk.token_ids) - chunk.num_logits
            self.wanted += slot[chunk.start + first :]
            logits += map(self._logits, slot[chunk.start + first :], chunk.token_ids[first:])

        return np.stack(logits) if logits else np.empty((0, self.vocab_size), np.float32)

    def output(self, name: str) -> Floats | None:
        """(num_logits, 1) float32: a share of the state, which says all tokens up to a position."""
        return (
            np.array([[_share(state)] for state in self.wanted], np.float32)
            if name == "state"
            else None
        )

    def logits(self, token_ids: list[int]) -> Floats:
        """(vocab,) float32, between -4 and 4."""
        return self._logits(_state(token_ids), token_ids[-1])

    def share(self, token_ids: list[int]) -> float:
        """The output `state` after these tokens."""
        return _share(_state(token_ids))

    def _logits(self, state: int, token_id: int) -> Floats:
        """The logits after `token_id`, with which all tokens together lead to `state`."""
        logits = _waves(self.vocab_size, state % 100_003)
        if self.poison:
            logits = logits.copy()
            logits[list(self.poison)] = -math.inf
            logits[3] = self.poison.get(token_id, logits[3])

        return logits

    def copy(self, slot: int, to_slots: list[int], num_tokens: int) -> None:
        assert slot not in to_slots and num_tokens <= len(self.states[slot]), (
            "copies keys that nobody wrote"
        )
        self.states |= {to_slot: self.states[slot][:num_tokens] for to_slot in to_slots}

    def release(self, slot: int) -> None:
        self.states.pop(slot, None)


class SharingRunner(FakeRunner):
    """Keeps tokens by block, each with the state before it and the state after it.

    The state says all tokens up to a position, as keys and values do. So a block is known to be
    read by a sequence that begins with other tokens than its writer, or to be overwritten while
    others read it.
    """

    def __init__(
        self,
        vocab_size: int = 50,
        context_length: int = 512,
        poison: dict[int, float] | None = None,
    ) -> None:
        super().__init__(vocab_size, context_length, poison)
        self.slots = None
        # Three numbers of eight bytes for each token
        self.block_bytes = 24 * self.tokens_per_block
        # By block and place: whether it was written, and the states before and after its token
        self.cells: dict[int, Numbers] = defaultdict(self._empty_block)

    def _empty_block(self) -> Numbers:
        return np.zeros((self.tokens_per_block, 3), np.uint64)

    def block(self, number: int) -> Any:
        """What a block holds, as bytes."""
        return self.cells[number].reshape(-1).view(np.uint8)

    def adapter(self, number: int) -> Any:
        """There is none."""
        raise KeyError(number)

    def forward(self, plan: Plan) -> Floats:
        self.plans.append(plan)
        for source, block in plan.copies:
            assert source != block
            self.cells[block][:] = self.cells[source]

        written_cells: set[tuple[int, int]] = set()
        for chunk in plan.chunks:
            self._write(chunk, written_cells)

        states = [wanted_state for chunk in plan.chunks for wanted_state in self._read(chunk)]
        self.wanted = [state for state, _ in states]
        logits = [self._logits(*wanted_state) for wanted_state in states]
        return np.stack(logits) if logits else np.empty((0, self.vocab_size), np.float32)

    def _cell(self, chunk: Chunk, position: int) -> tuple[int, int]:
        return chunk.table[position // self.tokens_per_block], position % self.tokens_per_block

    def _states(self, cell: tuple[int, int]) -> tuple[int, int]:
        block, place = cell
        is_written, before, after = self.cells[block][place].tolist()
        assert is_written, "reads keys that nobody wrote"
        return before, after

    def _write(self, chunk: Chunk, written: set[tuple[int, int]]) -> None:
        state = 0
        if chunk.start:
            _, state = self._states(self._cell(chunk, chunk.start - 1))

        for position, token_id in enumerate(chunk.token_ids, start=chunk.start):
            cell = self._cell(chunk, position)
            assert cell not in written, "two sequences write to one place"
            written.add(cell)
            block, place = cell
            next_state = _next_state(state, token_id)
            self.cells[block][place] = True, state, next_state
            state = next_state

    def _read(self, chunk: Chunk) -> list[tuple[int, int]]:
        """State and token of each wanted position, after a look at every key that the chunk attends
        to.
        """
        state = 0
        states = []
        for position in range(chunk.end):
            before, after = self._states(self._cell(chunk, position))
            assert before == state, "reads keys of other tokens"
            state = after
            states.append(state)

        start = len(chunk.token_ids) - chunk.num_logits
        return list(zip(states[chunk.start + start :], chunk.token_ids[start:], strict=True))


@cache
def _waves(vocab_size: int, state: int) -> Floats:
    """(vocab_size,) float32, not to be changed."""
    waves = 4 * np.sin(np.arange(1, vocab_size + 1, dtype=np.float64) * (1 + state))
    return waves.astype(np.float32)


def _state(token_ids: list[int]) -> int:
    state = 0
    for token_id in token_ids:
        state = _next_state(state, token_id)

    return state


def _share(state: int) -> float:
    return float(state % 100_003)


def _next_state(state: int, token_id: int) -> int:
    return (state * 31 + token_id + 1) * _FACTOR % 2**64
