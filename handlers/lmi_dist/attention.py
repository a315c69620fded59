"""Attention of one step over the slots of the cache.

Decodes are computed in groups of neighbouring slots: one call over views of the slots, all padded to the longest, with
a mask. The queries that share a key head are folded into the query length, so no key is repeated. Prompt chunks are
computed one by one with a causal mask. Padded lengths come from the `Grid`, on which the kernel gives the same bits for
each length. This module knows nothing of projections.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from handlers.lmi_dist.kv_slots import KvSlots, Span
from handlers.lmi_dist.plan import Chunk, Plan

KEY_BLOCK = 512  # keys that torch's CPU kernel takes at a time; whole blocks never change each other's rounding
# The cost of one more call, as the bytes of keys and values read in that time. A group is split where that saves more.
_SPLIT_BYTES = 400_000


@dataclass(frozen=True)
class Grid:
    """The shapes of decode attention: the number of queries for each key head, and the padded numbers of keys.

    `rests` are the lengths allowed over a multiple of KEY_BLOCK. Which of them give a sequence the same bits depends on
    the CPU: see `invariance`.
    """

    num_queries: int
    rests: tuple[int, ...] = tuple(range(16, KEY_BLOCK + 1, 16))

    def length(self, num_keys: int) -> int:
        whole, rest = divmod(num_keys - 1, KEY_BLOCK)
        return whole * KEY_BLOCK + next(size for size in self.rests if size > rest)


def query_counts(group: int) -> list[int]:
    """The numbers of queries that a group may be padded to, best first. An even number is faster than an odd one."""
    first = group if group == 1 else group + group % 2
    return list(dict.fromkeys([first, *(-(-group // multiple) * multiple for multiple in (2, 4, 8))]))


@dataclass(slots=True)
class SlotGroup:
    """Decodes of neighbouring slots, computed in one call. The query of slot i of the span is `first_query` + i."""

    span: Span
    mask: Tensor  # (slots, 1, 1, positions), 0 or -inf
    first_query: int
    first_token: int  # the first of the `num_tokens` tokens that get the answers
    num_tokens: int
    queries: Tensor | None = None  # (slots,), replaces first_query if slots without a token lie between
    answers: Tensor | None = None  # (num_tokens,), in that case the slots whose answers are kept

    @property
    def num_plain_slots(self) -> int:
        """The number of slots if the query of each slot i is `first_query` + i, else 0."""
        return self.span.last_slot - self.span.first_slot if self.queries is None else 0


@dataclass(slots=True)
class ChunkSpan:
    """One prompt chunk: its tokens and the keys that they attend to."""

    span: Span
    mask: Tensor | None  # (tokens, positions), or None for a causal mask from position 0
    first_token: int
    last_token: int


@dataclass(slots=True)
class View:
    """The attention calls of one step in the layers of one window size."""

    num_tokens: int
    groups: list[SlotGroup]
    chunks: list[ChunkSpan]


@dataclass(frozen=True)
class Attention:
    """Attention over `kv` with `group` queries for each key head, padded by the caller to `grid.num_queries`.

    With `is_paired` no decode call has a single row, which may round differently than in a batch.
    """

    kv: KvSlots
    grid: Grid
    group: int
    is_paired: bool

    def new_queries(self, num_rows: int) -> Tensor | None:
        """Zeros (num_rows, num_queries, kv_heads, head_dim) for padded queries, or None if no padding is needed."""
        if self.grid.num_queries == self.group:
            return None
        shape = (num_rows, self.grid.num_queries, self.kv.num_heads, self.kv.head_dim)
        return torch.zeros(shape, dtype=self.kv.dtype, device=self.kv.device)

    def plan(self, plan: Plan, num_tokens: int, window: int | None) -> View:
        """The groups and masks of a step. Its `num_tokens` rows are those of the plan and any padding behind them."""
        groups = [
            self._group(plan.decodes[first:last], first, num_tokens, window)
            for first, last in self._split(plan.decodes)
        ]
        chunks, first_token = [], len(plan.decodes)
        for chunk in plan.prefills:
            chunks.append(self._chunk(chunk, first_token, window))
            first_token += len(chunk.token_ids)
        return View(num_tokens, groups, chunks)

    def _split(self, decodes: Sequence[Chunk]) -> list[tuple[int, int]]:
        """Cut the decodes where padding them together would cost more than one more call."""
        spare_keys = _SPLIT_BYTES // self.kv.bytes_per_key
        cuts: list[int] = []
        first_slot = last_slot = longest = 0
        for index, chunk in enumerate(decodes):
            length = self.grid.length(chunk.end)
            together = (chunk.slot + 1 - first_slot) * max(longest, length)
            if not cuts or together > (last_slot - first_slot) * longest + length + spare_keys:
                cuts.append(index)
                first_slot, longest = chunk.slot, 0
            last_slot, longest = chunk.slot + 1, max(longest, length)
        return list(zip(cuts, [*cuts[1:], len(decodes)], strict=True)) if cuts else []

    def _group(self, decodes: Sequence[Chunk], first_token: int, num_tokens: int, window: int | None) -> SlotGroup:
        first_slot, last_slot, first_query = decodes[0].slot, decodes[-1].slot + 1, first_token
        if self.is_paired and len(decodes) == 1:  # a neighbour joins in; its answer is dropped
            if first_token + 1 < num_tokens:
                last_slot += 1
            else:
                first_slot, first_query = first_slot - 1, first_query - 1
        end = self.grid.length(max(chunk.end for chunk in decodes))
        start = 0 if window is None else max(0, min(chunk.end for chunk in decodes) - window) // KEY_BLOCK * KEY_BLOCK
        span = Span(first_slot, last_slot, start, end)
        group = SlotGroup(span, self._mask(span, decodes, window), first_query, first_token, len(decodes))
        if len(decodes) > 1 and last_slot - first_slot > len(decodes):
            tokens_of = {chunk.slot: first_token + index for index, chunk in enumerate(decodes)}
            queries = [tokens_of.get(slot, first_token) for slot in range(first_slot, last_slot)]
            group.queries = torch.tensor(queries, device=self.kv.device)
            group.answers = torch.tensor([chunk.slot - first_slot for chunk in decodes], device=self.kv.device)
        return group

    def _mask(self, span: Span, decodes: Sequence[Chunk], window: int | None) -> Tensor:
        """The mask of the new token of each slot: (slots, 1, 1, positions).

        Nothing is hidden from slots without a token, because a slot with every position hidden gives NaN.
        """
        ends = dict.fromkeys(range(span.first_slot, span.last_slot), span.end)
        ends.update((chunk.slot, chunk.end) for chunk in decodes)
        positions = torch.arange(span.start, span.end, device=self.kv.device)
        ends_of_slots = torch.tensor(list(ends.values()), device=self.kv.device)[:, None]
        is_hidden = positions >= ends_of_slots  # (slots, positions)
        if window is not None:
            firsts = {slot: 0 for slot in ends} | {chunk.slot: chunk.end - window for chunk in decodes}
            is_hidden |= positions < torch.tensor(list(firsts.values()), device=self.kv.device)[:, None]
        mask = torch.zeros(is_hidden.shape, dtype=self.kv.dtype, device=self.kv.device)
        return mask.masked_fill_(is_hidden, -math.inf)[:, None, None]

    def _chunk(self, chunk: Chunk, first_token: int, window: int | None) -> ChunkSpan:
        start = 0 if window is None else max(0, chunk.start + 1 - window) // KEY_BLOCK * KEY_BLOCK
        span = Span(chunk.slot, chunk.slot + 1, start, chunk.end)
        last_token = first_token + len(chunk.token_ids)
        if chunk.start == 0 and (window is None or window >= chunk.end):
            return ChunkSpan(span, None, first_token, last_token)
        keys = torch.arange(start, chunk.end, device=self.kv.device)
        queries = torch.arange(chunk.start, chunk.end, device=self.kv.device)[:, None]
        is_hidden = keys > queries  # (tokens, positions)
        if window is not None:
            is_hidden |= keys <= queries - window
        mask = torch.zeros(is_hidden.shape, dtype=self.kv.dtype, device=self.kv.device)
        return ChunkSpan(span, mask.masked_fill_(is_hidden, -math.inf), first_token, last_token)

    def __call__(self, layer: int, query: Tensor, view: View, scale: float, softcap: float | None = None) -> Tensor:
        """(tokens, num_queries, kv_heads, head_dim) to (tokens, group * kv_heads * head_dim)."""
        if len(view.groups) == 1 and view.groups[0].num_plain_slots == view.num_tokens and not view.chunks:
            return self._decode(layer, query, view.groups[0], scale, softcap).flatten(1)
        output = query.new_zeros(query.shape[0], self.group, *query.shape[2:])
        for group in view.groups:
            answer = self._decode(layer, query, group, scale, softcap)
            if group.answers is not None:
                answer = answer.index_select(0, group.answers)
            else:
                offset = group.first_token - group.first_query
                answer = answer[offset : offset + group.num_tokens]
            output[group.first_token : group.first_token + group.num_tokens] = answer
        for chunk in view.chunks:
            output[chunk.first_token : chunk.last_token] = self._prefill(layer, query, chunk, scale, softcap)
        return output.flatten(1)

    def _decode(self, layer: int, query: Tensor, group: SlotGroup, scale: float, softcap: float | None) -> Tensor:
        """The answers of all slots of a group: (slots, group, kv_heads, head_dim)."""
        keys, values = self.kv.read(layer, group.span)
        if group.queries is None:
            query = query[group.first_query : group.first_query + keys.shape[0]]
        else:
            query = query.index_select(0, group.queries)
        query = query.transpose(1, 2)  # (slots, kv_heads, queries, head_dim)
        answer = _attend(query, keys, values, group.mask, scale, softcap)
        return answer.transpose(1, 2)[:, : self.group]

    def _prefill(self, layer: int, query: Tensor, chunk: ChunkSpan, scale: float, softcap: float | None) -> Tensor:
        """The answer of one chunk, with its query groups as a batch: (tokens, group, kv_heads, head_dim)."""
        keys, values = self.kv.read(layer, chunk.span)
        query = query[chunk.first_token : chunk.last_token, : self.group].permute(1, 2, 0, 3)
        keys, values = keys.expand(self.group, -1, -1, -1), values.expand(self.group, -1, -1, -1)
        return _attend(query, keys, values, chunk.mask, scale, softcap).permute(2, 0, 1, 3)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Attend with (rows, heads, length, head_dim) tensors; causal without a mask. Returns the shape of `query`."""
    if softcap is None:
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
        )
    scores = torch.matmul(query, keys.transpose(2, 3)).mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is None:
        mask = torch.full(scores.shape[2:], -math.inf, dtype=scores.dtype, device=scores.device).triu_(1)
    return torch.matmul(scores.add_(mask).softmax(dim=-1, dtype=torch.float32).to(values.dtype), values)
