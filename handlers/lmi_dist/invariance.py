"""Checks on this CPU and with this number of threads whether a sequence gets the same bits in every batch.

`find_grid` looks for attention shapes in which the kernel rounds alike. They differ between makers of CPUs.
`layers_agree` then runs the loaded layers, on a few slots and on all together, and compares every bit. Both use their
own random numbers and take well under a second for models that a CPU serves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from handlers.lmi_dist.attention import KEY_BLOCK, Grid, query_counts
from handlers.lmi_dist.plan import Chunk, Plan

_NUM_ROWS, _MAX_HEADS = 9, 4
_MAX_CHECK_S = 1.0


def find_grid(num_kv_heads: int, group: int, head_dim: int) -> Grid | None:
    """The Grid of all lengths whose bits agree, or None if the rows agree with no padding of the queries."""
    draw = torch.Generator().manual_seed(0)
    num_kv_heads = min(num_kv_heads, _MAX_HEADS)  # the kernel takes heads one by one
    keys = torch.randn(_NUM_ROWS, num_kv_heads, 2 * KEY_BLOCK, head_dim, generator=draw)
    values = torch.randn(keys.shape, generator=draw)
    for num_queries in query_counts(group):
        probe = _Probe(torch.randn(_NUM_ROWS, num_kv_heads, num_queries, head_dim, generator=draw), keys, values)
        if probe.rows_agree() and probe.whole_blocks_agree():
            return Grid(num_queries, tuple(rest for rest in Grid(1).rests if probe.rest_agrees(rest)))
    return None


class _Probe:
    """One random attention problem that can be computed in different shapes."""

    def __init__(self, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """(rows, heads, queries, head_dim) for `query`, (rows, heads, positions, head_dim) for the others."""
        self.query, self.keys, self.values = query, keys, values

    def rows_agree(self) -> bool:
        """Whether rows have the same bits in all calls of two or more rows."""
        return all(
            torch.equal(self._ask(num_rows, num_keys, length), self._ask(_NUM_ROWS, num_keys, length)[:num_rows])
            for num_keys, length in ((100, 128), (300, KEY_BLOCK), (700, 2 * KEY_BLOCK))
            for num_rows in (2, 3, 5, 8)
        )

    def whole_blocks_agree(self) -> bool:
        """Whether a wholly hidden block changes no bit, behind the visible keys or (for windows) before them."""
        behind = torch.equal(self._ask(3, KEY_BLOCK, KEY_BLOCK), self._ask(3, KEY_BLOCK, 2 * KEY_BLOCK))
        first = KEY_BLOCK + 90
        before = [self._ask(3, 2 * KEY_BLOCK - 9, 2 * KEY_BLOCK, start, first) for start in (0, KEY_BLOCK)]
        return behind and torch.equal(*before)

    def rest_agrees(self, rest: int) -> bool:
        """Whether padding to `rest` keys over whole blocks gives the bits of padding to the next whole block."""
        return all(
            torch.equal(self._ask(3, base + num_keys, base + rest), self._ask(3, base + num_keys, base + KEY_BLOCK))
            for base in (0, KEY_BLOCK)
            for num_keys in (7, rest // 2 + 1, max(1, rest - 17), rest)
        )

    def _ask(self, num_rows: int, num_keys: int, length: int, start: int = 0, first: int = 0) -> Tensor:
        """Pass keys [start, length), of which [first, num_keys) are visible: (num_rows, heads, queries, head_dim)."""
        mask = torch.full((num_rows, 1, 1, length - start), -math.inf)
        mask[..., first - start if first else 0 : num_keys - start] = 0.0
        keys, values = self.keys[:num_rows, :, start:length], self.values[:num_rows, :, start:length]
        return functional.scaled_dot_product_attention(self.query[:num_rows], keys, values, attn_mask=mask)


def layers_agree(run: Callable[[Plan], Tensor], num_slots: int, max_length: int, vocab_size: int) -> bool:
    """Whether `run` gives a sequence the same bits by itself, beside a few others and in a step of 64 tokens.

    `run` returns logits (num_logits, vocab_size). The slots must hold random keys and values up to `max_length`. The
    check stops after a second, and then returns True if all comparisons so far agreed.
    """
    deadline = time.monotonic() + _MAX_CHECK_S
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (64,), generator=draw).tolist()
    starts = torch.randint(max_length, (num_slots,), generator=draw).tolist()
    decodes = [Chunk(slot, starts[slot], [ids[slot]]) for slot in range(num_slots - 1)]
    num_prompt_ids = min(64 - len(decodes), max_length)
    prompt = Chunk(num_slots - 1, 0, ids[-num_prompt_ids:], num_prompt_ids)
    together = run(Plan(decodes, [prompt]))
    answers = {chunk.slot: together[index : index + 1] for index, chunk in enumerate(decodes)}
    answers[prompt.slot] = together[len(decodes) :]
    few = max(1, len(decodes) // 3)
    for plan in (
        Plan([], [prompt]),
        Plan(decodes[:1], []),
        Plan(decodes[-1:], [prompt]),
        Plan(decodes[:few], []),
        Plan(decodes[few:], []),
        Plan(decodes[few : few + 1], []),
        Plan(decodes[::2], [prompt]),
    ):
        if plan.chunks and not torch.equal(run(plan), torch.cat([answers[chunk.slot] for chunk in plan.chunks])):
            return False
        if time.monotonic() > deadline:
            break
    return True
