"""The attention of one step with torch.

The rows of a step are cut into calls of torch's kernel, which reads keys and values where they lie:
to gather them would copy the whole cache in every layer of every step. One call computes the
decodes of a group of neighbouring slots, with a mask where their lengths differ. Each prompt chunk
has a call of its own.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from handlers.lmi_dist.kv_slots import KvSlots
from handlers.lmi_dist.operations import Attend
from handlers.lmi_dist.plan import Chunk, Plan

# The cost of one more call, as the bytes of keys and values read in that time. A group is split
# where that saves more.
_SPLIT_BYTES = 400_000


@dataclass(slots=True)
class AttentionCall:
    """One call of the kernel, which answers the last tokens of the chunks of some slots."""

    slots: range
    # The positions of keys and values that are read of each slot.
    positions: range
    # The rows of the queries, and of their answers: `end_row` is behind the last one.
    first_row: int
    end_row: int
    # How many queries each slot has.
    num_queries: int
    # Whether the queries begin at position 0, and each sees the positions up to its own.
    is_causal: bool
    # (slots, 1, queries, positions), 0 or -inf
    mask: Tensor | None = None

    # These two are set where slots without a query lie between the others.
    # (slots,): a row of queries for each slot.
    query_rows: Tensor | None = None
    # (end_row - first_row,): the places in `slots` of those that have a query.
    answered_slots: Tensor | None = None


class KeysValues(NamedTuple):
    """What the queries of a call see, each (slots, kv_heads, positions, head_dim)."""

    keys: Tensor
    values: Tensor


class _CallsKey(NamedTuple):
    """What two layers must have in common to make the same calls."""

    window: int | None
    is_wanted: bool


class Attention:
    """Writes the keys and values of a step and attends to those of each sequence, in any layer.

    The rows of a step are the tokens of the chunks of its plan, in their order.
    """

    def __init__(self, kv: KvSlots, plan: Plan, cells: Tensor) -> None:
        """`cells` are the cells of the rows, see KvSlots.cell_indices."""
        self._kv = kv
        self._plan = plan
        self._cells = cells
        self._calls: dict[_CallsKey, list[AttentionCall]] = {}

    def write(self, layer: int, keys_values: Tensor) -> None:
        """Store the keys of all heads, then the values of all heads, of each row: (rows, 2 *
        kv_heads, head_dim).
        """
        self._kv.flat[layer].index_copy_(0, self._cells, keys_values.reshape(-1, self._kv.head_dim))

    def __call__(self, queries: Tensor, how: Attend) -> Tensor:
        """Attend with the queries of all rows, as an operation says: (rows, heads, head_dim) to
        (rows, heads * head_dim).

        With `is_wanted` these are only the wanted rows.
        """
        key = _CallsKey(how.window, how.is_wanted)
        calls = self._calls.get(key)
        if calls is None:
            calls = list(self._plan_calls(how.window, how.is_wanted))
            self._calls[key] = calls

        if not calls:
            return queries.flatten(1)

        answers = [self._answer(call, queries, how) for call in calls]
        if len(answers) == 1:
            return answers[0]

        return torch.cat(answers)

    def _answer(self, call: AttentionCall, queries: Tensor, how: Attend) -> Tensor:
        """Return the answers of the rows of one call, (end_row - first_row, heads * head_dim), from
        the queries of all rows, (rows, heads, head_dim).
        """
        cached = self._cached_by(call, how.layer)
        if call.num_queries == 1:
            return self._answer_decodes(call, queries, cached, how)

        rows = queries[call.first_row : call.end_row]
        # (1, heads, queries, head_dim)
        queries_of_slot = rows.transpose(0, 1).unsqueeze(0)
        answers_of_slot = _attend(queries_of_slot, cached, call, how)

        # (heads, queries, head_dim)
        answers = answers_of_slot.squeeze(0)
        return answers.transpose(0, 1).flatten(1)

    def _cached_by(self, call: AttentionCall, layer: int) -> KeysValues:
        """Return the keys and values of a layer that a call reads, as views."""
        slots = slice(call.slots.start, call.slots.stop)
        positions = slice(call.positions.start, call.positions.stop)

        all_keys, all_values = self._kv.layers[layer]
        keys = all_keys[slots, :, positions]
        values = all_values[slots, :, positions]
        return KeysValues(keys, values)

    def _answer_decodes(
        self, call: AttentionCall, queries: Tensor, cached: KeysValues, how: Attend
    ) -> Tensor:
        """Return the answers of a call with one query for each slot, from the queries of all
        rows.
        """
        if call.query_rows is None:
            rows = queries[call.first_row : call.end_row]
        else:
            rows = queries.index_select(0, call.query_rows)

        # (slots, kv_heads, heads that share a key head, head_dim)
        groups = rows.unflatten(1, (self._kv.num_kv_heads, -1))
        group_size = groups.shape[2]
        if group_size % 2 and group_size > 1:
            # torch is up to twice as fast with an even number.
            groups = functional.pad(groups, (0, 0, 0, 1))

        padded_answers = _attend(groups, cached, call, how)
        answers = padded_answers[:, :, :group_size].flatten(1)
        if call.answered_slots is None:
            return answers

        return answers.index_select(0, call.answered_slots)

    def _plan_calls(self, window: int | None, is_wanted: bool) -> Iterator[AttentionCall]:
        """Yield the calls of a layer, in the order of rows.

        With `is_wanted` only the tokens whose logits are wanted have rows.
        """
        decodes = [chunk for chunk in self._plan.decodes if chunk.num_logits or not is_wanted]
        for start, end in self._split(decodes):
            yield self._call(decodes[start:end], 1, start, window)

        row = len(decodes)
        for chunk in self._plan.prefills:
            num_queries = chunk.num_logits if is_wanted else len(chunk.token_ids)
            if num_queries:
                yield self._call([chunk], num_queries, row, window)

            row += num_queries

    def _split(self, decodes: Sequence[Chunk]) -> list[tuple[int, int]]:
        """Cut the decodes into groups of neighbouring slots. Returns the start and end of each.

        A call reads as many keys of each of its slots as the longest sequence has. A group ends
        where the next sequence would add more keys to it than one more call costs.
        """
        num_keys_of_call = _SPLIT_BYTES // self._kv.bytes_per_key
        starts: list[int] = []
        # The slots of the group, and the length of its longest sequence.
        first_slot = 0
        end_slot = 0
        longest = 0
        for index, chunk in enumerate(decodes):
            num_keys_together = (chunk.slot + 1 - first_slot) * max(longest, chunk.end)
            num_keys_apart = (end_slot - first_slot) * longest + chunk.end
            if not starts or num_keys_together > num_keys_apart + num_keys_of_call:
                starts.append(index)
                first_slot = chunk.slot
                longest = 0

            end_slot = chunk.slot + 1
            longest = max(longest, chunk.end)

        return list(pairwise([*starts, len(decodes)]))

    def _call(
        self, chunks: Sequence[Chunk], num_queries: int, first_row: int, window: int | None
    ) -> AttentionCall:
        """Return the call for the last tokens of each chunk, whose rows begin at `first_row`."""
        end_of_slot = {chunk.slot: chunk.end for chunk in chunks}
        least_end = min(end_of_slot.values())
        end = max(end_of_slot.values())
        start = 0
        if window is not None:
            first_query = least_end - num_queries
            start = max(0, first_query + 1 - window)

        # A causal call of a whole prompt needs no mask.
        is_whole_prompt = start == 0 and num_queries == end
        is_causal = is_whole_prompt and num_queries > 1 and end <= (window or end)

        slots = range(chunks[0].slot, chunks[-1].slot + 1)
        call = AttentionCall(
            slots=slots,
            positions=range(start, end),
            first_row=first_row,
            end_row=first_row + len(chunks) * num_queries,
            num_queries=num_queries,
            is_causal=is_causal,
        )
        if not is_causal and (num_queries > 1 or least_end < end):
            call.mask = self._mask(call, end_of_slot, window)

        if len(slots) > len(chunks):
            row_of_slot = {slot: first_row + index for index, slot in enumerate(end_of_slot)}
            # The answer of a slot without a query is dropped, so any row will do.
            call.query_rows = self._indices(row_of_slot.get(slot, first_row) for slot in slots)
            call.answered_slots = self._indices(slot - slots.start for slot in end_of_slot)

        return call

    def _mask(self, call: AttentionCall, end_of_slot: dict[int, int], window: int | None) -> Tensor:
        """Return the mask of the last queries of each slot, (slots, 1, queries, positions).

        `end_of_slot` has the number of positions of each slot that has a query.
        """
        device = self._kv.device
        start = call.positions.start
        stop = call.positions.stop

        # (slots,)
        ends = self._indices(end_of_slot.get(slot, stop) for slot in call.slots)
        # (queries,)
        distances = torch.arange(-call.num_queries, 0, device=device)
        # (slots, 1, queries, 1)
        query_positions = (ends[:, None] + distances)[:, None, :, None]
        # (positions,)
        key_positions = torch.arange(start, stop, device=device)

        is_hidden = key_positions > query_positions
        if window is not None:
            is_hidden |= key_positions <= query_positions - window

        mask = torch.zeros(is_hidden.shape, dtype=self._kv.dtype, device=device)
        return mask.masked_fill_(is_hidden, -math.inf)

    def _indices(self, numbers: Iterable[int]) -> Tensor:
        return torch.tensor(list(numbers), device=self._kv.device)


def _attend(queries: Tensor, cached: KeysValues, call: AttentionCall, how: Attend) -> Tensor:
    """Return the answers to queries, both (slots, heads, queries, head_dim).

    Keys and values may have fewer heads, each for as many neighbouring heads of the queries.
    """
    if how.softcap is not None:
        return _attend_capped(queries, cached, call, how.scale, how.softcap)

    return functional.scaled_dot_product_attention(
        queries,
        cached.keys,
        cached.values,
        attn_mask=call.mask,
        is_causal=call.is_causal,
        scale=how.scale,
        enable_gqa=True,
    )


def _attend_capped(
    queries: Tensor, cached: KeysValues, call: AttentionCall, scale: float, softcap: float
) -> Tensor:
    """Attend with scores that stay between -`softcap` and `softcap`, for which torch has no
    call.
    """
    num_slots, num_kv_heads, _, head_dim = cached.keys.shape
    # The queries of all heads that share a key head are in one product.
    folded_queries = queries.reshape(num_slots, num_kv_heads, -1, head_dim)
    scores = torch.matmul(folded_queries, cached.keys.mT)
    scores.mul_(scale / softcap)
    scores.tanh_()
    scores.mul_(softcap)

    mask = call.mask
    if call.is_causal:
        shape = (call.num_queries, call.num_queries)
        mask = torch.full(shape, -math.inf, device=scores.device).triu_(1)

    if mask is not None:
        scores_of_heads = scores.unflatten(2, (-1, call.num_queries))
        scores = (scores_of_heads + mask.unsqueeze(-3)).flatten(2, 3)

    weights = scores.softmax(dim=-1, dtype=torch.float32)
    weights = weights.to(cached.values.dtype)
    answers = torch.matmul(weights, cached.values)
    return answers.view(queries.shape)
