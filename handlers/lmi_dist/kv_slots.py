"""The slots of memory that hold each sequence's keys and values, for a model that torch runs."""

import mmap

import torch
from torch import Tensor

from handlers.lmi_dist.facts import ModelFacts
from handlers.lmi_dist.placement import Placement

# Linux: slots may be longer in sum than the memory. Python 3.11 has no name for it.
_MAP_NORESERVE = 0x4000


class KvSlots:
    """The keys and values of sequences, each in a slot of `max_length` positions.

    The storage is (slot, layer, keys of all heads then values of all heads, position, channel). A
    cell is the key or value of one head at one position: the channels that lie together.
    """

    def __init__(
        self, facts: ModelFacts, placement: Placement, num_slots: int, max_length: int
    ) -> None:
        self.dtype = placement.dtype
        self.device = placement.device
        self.num_kv_heads = facts.num_kv_heads
        self.head_dim = facts.head_dim
        # Of one position in one layer.
        self.bytes_per_key = 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        self._slot_bytes = facts.num_layers * max_length * self.bytes_per_key

        shape = (num_slots, facts.num_layers, 2 * self.num_kv_heads, max_length, self.head_dim)
        self._mapping: mmap.mmap | None = None
        if self.device.type == "cpu":
            # This is zeroed memory that costs nothing until it is written.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._mapping = mmap.mmap(-1, num_slots * self._slot_bytes, flags=flags)
            # Huge pages would commit 2 MB at the first token.
            self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
            self._storage = torch.frombuffer(self._mapping, dtype=self.dtype).view(shape)
        else:
            # An accelerator has no lazy mapping. Masked positions must hold finite numbers, as
            # 0 x NaN is NaN.
            self._storage = torch.zeros(shape, dtype=self.dtype, device=self.device)

        # Keys and values of each layer: (slots, heads, positions, channels).
        self.layers: list[tuple[Tensor, Tensor]] = []
        for slots in self._storage.unbind(1):
            keys = slots[:, : self.num_kv_heads]
            values = slots[:, self.num_kv_heads :]
            self.layers.append((keys, values))

        # The cells of each layer and of those behind it: (cells, channels).
        cells_of_layer = 2 * self.num_kv_heads * max_length
        all_cells = self._storage.view(-1, self.head_dim)
        self.flat = [all_cells[layer * cells_of_layer :] for layer in range(facts.num_layers)]

        # The first cell of each head in a layer, and how far the cells of two slots are apart.
        self._heads = torch.arange(2 * self.num_kv_heads, device=self.device) * max_length
        self._slot_stride = facts.num_layers * cells_of_layer

    def cell_indices(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the indices in `flat` of the cells of each token, which are the same in every
        layer.

        (num_tokens,) and (num_tokens,) to (num_tokens * 2 * num_kv_heads,).
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
        """Give the pages of a free slot back to the system, but for those that it shares with its
        neighbours.

        On an accelerator the slot is cleared: it may hold numbers that are not finite, and its next
        owner reads past its end.
        """
        if self._mapping is None:
            self._storage[slot].zero_()
            return

        start = -(-slot * self._slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (slot + 1) * self._slot_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._mapping.madvise(mmap.MADV_DONTNEED, start, end - start)
