"""Keys and values of all running sequences, in one slot of contiguous memory for each sequence.

Slots are read through views and never gathered: reading scattered blocks would copy the whole cache in every layer of
every step. On a CPU the slots are one private anonymous mapping, so the system commits a page when it is first
written. A released slot gives its pages back and reads as zeros. The scheduler decides which sequence owns which slot,
and the cache budget limits the number of tokens.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

import torch
from torch import Tensor

_MAP_NORESERVE = 0x4000  # Linux: slots may be longer in sum than the memory; Python 3.11 has no name for it


class Span(NamedTuple):
    """Slots [first_slot, last_slot) and, in each of them, positions [start, end)."""

    first_slot: int
    last_slot: int
    start: int
    end: int


class KvSlots:
    """The storage is (slot, layer, keys of all heads then values of all heads, position, channel)."""

    def __init__(
        self,
        *,
        num_slots: int,
        num_layers: int,
        num_heads: int,
        max_length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_slots, num_layers, 2 * num_heads, max_length, head_dim)
        self.num_heads, self.head_dim, self.max_length = num_heads, head_dim, max_length
        self.dtype, self.device = dtype, device
        self.bytes_per_key = 2 * num_heads * head_dim * dtype.itemsize  # of one position in one layer
        self._slot_bytes = num_layers * 2 * num_heads * max_length * head_dim * dtype.itemsize
        self._mapping = _map_lazily(num_slots * self._slot_bytes) if device.type == "cpu" else None
        if self._mapping is None:
            # An accelerator has no lazy mapping. Masked positions must hold finite numbers: 0 x NaN is NaN.
            self._storage = torch.zeros(shape, dtype=dtype, device=device)
        else:
            self._storage = torch.frombuffer(self._mapping, dtype=dtype).view(shape)
        heads_of_layer = 2 * num_heads * max_length
        flat = self._storage.view(-1, head_dim)
        self._flat = [flat[layer * heads_of_layer :] for layer in range(num_layers)]
        self._heads = torch.arange(2 * num_heads, device=device) * max_length
        self._slot_stride = num_layers * heads_of_layer
        self._layers = [(slots[:, :num_heads], slots[:, num_heads:]) for slots in self._storage.unbind(1)]

    def cell_indices(self, slots: Tensor, positions: Tensor) -> Tensor:
        """The cells of each token, which are the same in every layer. A cell is one head's key or value.

        (num_tokens,) and (num_tokens,) to (num_tokens * 2 * num_heads,).
        """
        first = slots * self._slot_stride + positions
        return (first[:, None] + self._heads).view(-1)

    def write(self, layer: int, cells: Tensor, keys_values: Tensor) -> None:
        """Store (num_tokens * 2 * num_heads, head_dim) at the indices `cells`."""
        self._flat[layer].index_copy_(0, cells, keys_values)

    def read(self, layer: int, span: Span) -> tuple[Tensor, Tensor]:
        """Views of keys and values, each (slots, num_heads, positions, head_dim)."""
        keys, values = self._layers[layer]
        part = (slice(span.first_slot, span.last_slot), slice(None), slice(span.start, span.end))
        return keys[part], values[part]

    def copy(self, slot: int, to_slots: list[int], length: int) -> None:
        """Copy the first `length` positions of a slot, in every layer, to other slots, without a buffer."""
        source = self._storage[slot, :, :, :length]
        for to_slot in to_slots:
            self._storage[to_slot, :, :, :length] = source

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        """Give the pages of a free slot back to the system. Pages shared with a neighbouring slot stay.

        On an accelerator the slot is cleared: it may hold numbers that are not finite, and its next owner reads past
        its end.
        """
        if self._mapping is None:
            self._storage[slot].zero_()
            return
        first = -(-slot * self._slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (slot + 1) * self._slot_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


def _map_lazily(num_bytes: int) -> mmap.mmap:
    """Zeroed memory that costs nothing until it is written. Huge pages would commit 2 MB at the first token."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return mapping
