"""One step with torch: its rows, their attention, and the slots of memory that hold each sequence's
keys and values.

Slots are read through views and never gathered: reading scattered blocks would copy the whole cache
in every layer of every step. Decodes are computed in groups of neighbouring slots: one call with a
mask where the sequences differ in length. Prompt chunks are computed one by one.
"""

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from handlers.lmi_dist.facts import ModelFacts
from handlers.lmi_dist.operations import Attend
from handlers.lmi_dist.placement import Placement
from handlers.lmi_dist.plan import Chunk, Plan

# Linux: slots may be longer in sum than the memory. Python 3.11 has no name for it.
_MAP_NORESERVE = 0x4000
# The cost of one more call, as the bytes of keys and values read in that time. A group is split
# where that saves more.
_SPLIT_BYTES = 400_000


class KvSlots:
    """The keys and values of sequences, each in a slot of `max_length` positions.

    The storage is (slot, layer, keys of all heads then values of all heads, position, channel).
    """

    def __init__(
        self, facts: ModelFacts, placement: Placement, num_slots: int, max_length: int
    ) -> None:
        num_layers = facts.num_layers
        num_heads = facts.num_kv_heads
        head_dim = facts.head_dim
        shape = (num_slots, num_layers, 2 * num_heads, max_length, head_dim)
        dtype = placement.dtype
        device = placement.device
        self.dtype = dtype
        self.device = device
        self.num_heads = num_heads
        self.head_dim = head_dim
        # Of one position in one layer.
        self.bytes_per_key = 2 * num_heads * head_dim * dtype.itemsize
        self._slot_bytes = num_layers * 2 * num_heads * max_length * head_dim * dtype.itemsize
        self._mapping: mmap.mmap | None = None
        if device.type == "cpu":
            # This is zeroed memory that costs nothing until it is written.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._mapping = mmap.mmap(-1, num_slots * self._slot_bytes, flags=flags)
            # Huge pages would commit 2 MB at the first token.
            self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
            self._storage = torch.frombuffer(self._mapping, dtype=dtype).view(shape)
        else:
            # An accelerator has no lazy mapping. Masked positions must hold finite numbers, as
            # 0 x NaN is NaN.
            self._storage = torch.zeros(shape, dtype=dtype, device=device)

        heads_of_layer = 2 * num_heads * max_length
        flat = self._storage.view(-1, head_dim)
        self.flat = [flat[layer * heads_of_layer :] for layer in range(num_layers)]
        self._heads = torch.arange(2 * num_heads, device=device) * max_length
        self._slot_stride = num_layers * heads_of_layer

        # Keys and values of each layer: (slots, heads, positions, channels).
        self.layers: list[tuple[Tensor, Tensor]] = []
        for slots in self._storage.unbind(1):
            self.layers.append((slots[:, :num_heads], slots[:, num_heads:]))

    def cell_indices(self, slots: Tensor, positions: Tensor) -> Tensor:
        """The cells of each token, which are the same in every layer.

        A cell is one head's key or value.

        (num_tokens,) and (num_tokens,) to (num_tokens * 2 * num_heads,).
        """
        first = slots * self._slot_stride + positions
        return (first[:, None] + self._heads).view(-1)

    @torch.inference_mode()
    def copy(self, slot: int, to_slots: list[int], num_tokens: int) -> None:
        """Copy the keys and values of the first `num_tokens` of a slot, bit by bit, without a
        buffer.
        """
        for to_slot in to_slots:
            self._storage[to_slot, :, :, :num_tokens] = self._storage[slot, :, :, :num_tokens]

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        """Give the pages of a free slot back to the system.

        Pages shared with a neighbouring slot stay.

        On an accelerator the slot is cleared: it may hold numbers that are not finite, and its next
        owner reads past its end.
        """
        if self._mapping is None:
            self._storage[slot].zero_()
            return

        first = -(-slot * self._slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (slot + 1) * self._slot_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


@dataclass(slots=True)
class AttentionCall:
    """One call of the kernel, for the last `num_queries` tokens of the chunk in each of the
    slots.
    """

    slots: range
    # The positions in each of the slots.
    positions: range
    # The rows of the queries, and of their answers.
    first: int
    last: int
    num_queries: int
    # Each query sees the positions up to its own. The first query is at position 0.
    is_causal: bool
    # (slots, 1, queries, positions), 0 or -inf
    mask: Tensor | None = None
    # (slots,): the rows of the queries if slots without one lie between.
    queries: Tensor | None = None
    # (last - first,): in that case the slots whose answers are kept.
    answers: Tensor | None = None


class Attention:
    """Writes the keys and values of a step and attends to those of each sequence, in any layer.

    The rows of a step are the tokens of the chunks of its plan, in their order.
    """

    def __init__(self, kv: KvSlots, plan: Plan, cells: Tensor) -> None:
        """`cells` are the cells of the rows, see KvSlots.cell_indices."""
        self._kv = kv
        self._plan = plan
        self._cells = cells
        self._calls: dict[tuple[int | None, bool], list[AttentionCall]] = {}

    def write(self, layer: int, keys_values: Tensor) -> None:
        """Store the keys of all heads, then the values of all heads, of each row: (rows, 2 *
        kv_heads, head_dim).
        """
        self._kv.flat[layer].index_copy_(0, self._cells, keys_values.reshape(-1, self._kv.head_dim))

    def __call__(self, queries: Tensor, how: Attend) -> Tensor:
        """(rows, heads, head_dim) to (rows, heads * head_dim).

        With `is_wanted` these are only the wanted rows.
        """
        window = how.window
        is_wanted = how.is_wanted
        calls = self._calls.get((window, is_wanted))
        if calls is None:
            calls = list(self._plan_calls(window, is_wanted))
            self._calls[window, is_wanted] = calls

        if not calls:
            return queries.flatten(1)

        answers = [self._answer(call, queries, how) for call in calls]
        return answers[0] if len(answers) == 1 else torch.cat(answers)

    def _answer(self, call: AttentionCall, queries: Tensor, how: Attend) -> Tensor:
        """The answers of the rows of one call: (last - first, heads * head_dim)."""
        slots = slice(call.slots.start, call.slots.stop)
        positions = slice(call.positions.start, call.positions.stop)

        # Each is (slots, kv_heads, positions, head_dim).
        all_keys, all_values = self._kv.layers[how.layer]
        keys = all_keys[slots, :, positions]
        values = all_values[slots, :, positions]

        if call.num_queries > 1:
            # (1, heads, queries, head_dim)
            heads = queries[call.first : call.last].transpose(0, 1)[None]
            return _attend(heads, keys, values, call, how)[0].transpose(0, 1).flatten(1)

        if call.queries is None:
            rows = queries[call.first : call.last]
        else:
            rows = queries.index_select(0, call.queries)

        # (slots, kv_heads, queries of a key head, head_dim)
        groups = rows.unflatten(1, (self._kv.num_heads, -1))
        num_queries = groups.shape[2]
        if num_queries % 2 and num_queries > 1:
            # torch is up to twice as fast with an even number.
            groups = functional.pad(groups, (0, 0, 0, 1))

        answers = _attend(groups, keys, values, call, how)[:, :, :num_queries].flatten(1)
        return answers if call.answers is None else answers.index_select(0, call.answers)

    def _plan_calls(self, window: int | None, is_wanted: bool) -> Iterator[AttentionCall]:
        """The calls of a layer, in the order of rows.

        With `is_wanted` only the last tokens of a chunk are rows.
        """
        decodes = [chunk for chunk in self._plan.decodes if chunk.num_logits or not is_wanted]
        for first, last in self._split(decodes):
            yield self._call(decodes[first:last], 1, first, window)

        row = len(decodes)
        for chunk in self._plan.prefills:
            num_queries = chunk.num_logits if is_wanted else len(chunk.token_ids)
            if num_queries:
                yield self._call([chunk], num_queries, row, window)

            row += num_queries

    def _split(self, decodes: Sequence[Chunk]) -> list[tuple[int, int]]:
        """Cut the decodes where padding them together would cost more than one more call."""
        spare_keys = _SPLIT_BYTES // self._kv.bytes_per_key
        cuts: list[int] = []
        first_slot = last_slot = longest = 0
        for index, chunk in enumerate(decodes):
            together = (chunk.slot + 1 - first_slot) * max(longest, chunk.end)
            if not cuts or together > (last_slot - first_slot) * longest + chunk.end + spare_keys:
                cuts.append(index)
                first_slot = chunk.slot
                longest = 0

            last_slot = chunk.slot + 1
            longest = max(longest, chunk.end)

        return list(pairwise([*cuts, len(decodes)]))

    def _call(
        self, chunks: Sequence[Chunk], num_queries: int, first: int, window: int | None
    ) -> AttentionCall:
        """The call for the last tokens of each chunk, whose rows begin at `first`."""
        ends = {chunk.slot: chunk.end for chunk in chunks}
        least_end = min(ends.values())
        end = max(ends.values())
        start = 0
        if window is not None:
            start = max(0, least_end - num_queries + 1 - window)

        is_whole_prompt = start == 0 and num_queries == end
        # A causal call of a whole prompt needs no mask.
        is_causal = is_whole_prompt and num_queries > 1 and end <= (window or end)

        slots = range(chunks[0].slot, chunks[-1].slot + 1)
        last = first + len(chunks) * num_queries
        call = AttentionCall(slots, range(start, end), first, last, num_queries, is_causal)
        if not is_causal and (num_queries > 1 or least_end < end):
            call.mask = self._mask(call, ends, window)

        if len(slots) > len(chunks):
            rows = {slot: first + index for index, slot in enumerate(ends)}
            call.queries = self._indices(rows.get(slot, first) for slot in slots)
            call.answers = self._indices(slot - slots.start for slot in ends)

        return call

    def _mask(self, call: AttentionCall, ends: dict[int, int], window: int | None) -> Tensor:
        """The mask of the last queries of each slot: (slots, 1, queries, positions)."""
        device = self._kv.device
        visible = call.positions
        last = self._indices(ends.get(slot, visible.stop) for slot in call.slots)
        distances = torch.arange(-call.num_queries, 0, device=device)
        queries = (last[:, None] + distances)[:, None, :, None]
        positions = torch.arange(visible.start, visible.stop, device=device)

        is_hidden = positions > queries
        if window is not None:
            is_hidden |= positions <= queries - window

        mask = torch.zeros(is_hidden.shape, dtype=self._kv.dtype, device=device)
        return mask.masked_fill_(is_hidden, -math.inf)

    def _indices(self, numbers: Iterator[int]) -> Tensor:
        return torch.tensor(list(numbers), device=self._kv.device)


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    adapter: int
    rows: Tensor  # (num_rows,)
    # (num_wanted,): places among the wanted rows
    wanted: Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The rows of one step are the tokens of all its chunks."""

    token_ids: Tensor  # (rows,)
    positions: Tensor  # (rows,)
    # (num_wanted,): rows whose logits are wanted
    wanted: Tensor
    attention: Attention
    adapted: tuple[AdaptedRows, ...] = ()


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, call: AttentionCall, how: Attend
) -> Tensor:
    """Attend with (slots, heads, queries, head_dim) tensors, of which keys and values may have
    fewer heads.
    """
    softcap = how.softcap
    if softcap is None:
        return functional.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=call.mask,
            is_causal=call.is_causal,
            scale=how.scale,
            enable_gqa=True,
        )

    # The queries of a key head are in one product.
    folded = query.reshape(*keys.shape[:2], -1, query.shape[3])
    scores = torch.matmul(folded, keys.mT).mul_(how.scale / softcap).tanh_().mul_(softcap)
    mask = call.mask
    if call.is_causal:
        shape = (call.num_queries, call.num_queries)
        mask = torch.full(shape, -math.inf, device=scores.device).triu_(1)

    if mask is not None:
        scores = (scores.unflatten(2, (-1, call.num_queries)) + mask.unsqueeze(-3)).flatten(2, 3)

    weights = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights, values).view(query.shape)
