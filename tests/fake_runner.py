"""A runner without weights: the logits of a position are a fixed function of the tokens up to it.

It keeps the tokens of each slot as a real cache keeps keys and values. It refuses a plan that reads what was never
written, and so finds a scheduler that forgets to recompute.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from handlers.lmi_dist.plan import Plan

_FACTOR = 0x9E3779B97F4A7C15


class FakeRunner:
    dtype, device, is_batch_invariant = "float32", "cpu", True

    def __init__(self, vocab_size: int = 50, context_length: int = 512, poison: dict[int, float] | None = None) -> None:
        """`poison`: a value of the logits after a token. Such tokens come only in prompts, never in an answer."""
        self.vocab_size, self.context_length = vocab_size, context_length
        self.slots: dict[int, list[int]] = {}
        self.plans: list[Plan] = []
        self.poison = poison or {}

    def forward(self, plan: Plan) -> Tensor:
        self.plans.append(plan)
        logits: list[Tensor] = []
        for chunk in plan.chunks:
            slot = self.slots.setdefault(chunk.slot, [])
            assert chunk.start <= len(slot), "reads keys that nobody wrote"
            slot[chunk.start :] = chunk.token_ids
            logits += [self.logits(slot[: end + 1]) for end in range(chunk.end - chunk.num_logits, chunk.end)]
        return torch.stack(logits) if logits else torch.empty(0, self.vocab_size)

    def logits(self, token_ids: list[int]) -> Tensor:
        """(vocab,) float32, between -4 and 4."""
        state = 0
        for token_id in token_ids:
            state = (state * 31 + token_id + 1) * _FACTOR % 2**64
        steps = torch.arange(1, self.vocab_size + 1, dtype=torch.float64)
        logits = (4 * torch.sin(steps * (1 + state % 100_003))).float()
        logits[list(self.poison)] = -math.inf
        if token_ids[-1] in self.poison:
            logits[3] = self.poison[token_ids[-1]]
        return logits

    def copy(self, slot: int, to_slots: list[int], num_tokens: int) -> None:
        assert slot not in to_slots and num_tokens <= len(self.slots[slot]), "copies keys that nobody wrote"
        self.slots |= {to_slot: self.slots[slot][:num_tokens] for to_slot in to_slots}

    def release(self, slot: int) -> None:
        self.slots.pop(slot, None)
