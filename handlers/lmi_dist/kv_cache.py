"""Which blocks of the key-value cache each running sequence holds. Plain Python.

A block has room for the keys and values of `tokens_per_block` tokens. A running sequence has a slot, and in it a table
of blocks. At admission it is promised all blocks that its prompt needs, and takes them as the prompt is computed.

A runner that shares blocks keeps keys and values in them. One block may then be in several tables, and blocks whose
tokens are known lie in a tree by content. A block of the tree that no table holds is idle: it counts as free, and is
taken when no block is empty, the one first that was idle longest. (Priorities of retention would change this order.)

For any other runner a block is only a unit of the budget: what is computed lies in the slot.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from handlers.lmi_dist.prefix_tree import Match, PrefixTree, Root


@dataclass(slots=True)
class Holding:
    """What a slot holds. The first `num_stored` blocks of its table are full and in the tree."""

    num_wanted: int = 0  # blocks for the prompt
    num_promised: int = 0  # blocks that it will take
    num_stored: int = 0
    table: list[int] = field(default_factory=list)


class KvCache:
    """The tables of all slots. `on_free` is called with each freed slot before it can be allocated again."""

    def __init__(
        self,
        num_blocks: int,
        num_slots: int,
        tokens_per_block: int = 16,
        *,
        shares_blocks: bool = False,
        reuses_prefixes: bool = False,
        on_free: Callable[[int], None] = lambda slot: None,
    ) -> None:
        assert shares_blocks or not reuses_prefixes
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.shares_blocks = shares_blocks
        self.reuses_prefixes = reuses_prefixes
        self.num_new_blocks = 0  # taken so far
        self.num_reused_blocks = 0  # of the tree or of a fork, shared so far
        self._holdings = [Holding() for _ in range(num_slots)]  # by slot
        self._free_slots = list(range(num_slots))  # a heap: the lowest slot first keeps the active slots dense
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack: memory that was never used stays so
        self._idle: OrderedDict[int, None] = OrderedDict()  # a block comes after all that are below it in the tree
        self._num_promised = 0  # to all slots
        self._num_references = [0] * num_blocks  # tables and copies that need the block
        self._copies: dict[int, tuple[int, int]] = {}  # slot -> from block, to block: in the next step
        self._tree = PrefixTree(tokens_per_block)
        self._on_free = on_free

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def num_free_blocks(self) -> int:
        return len(self._empty) + len(self._idle) - self._num_promised

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    @property
    def num_idle_blocks(self) -> int:
        return len(self._idle)

    @property
    def copies(self) -> list[tuple[int, int]]:
        """From block, to block: what the next step has to copy first."""
        return list(self._copies.values())

    def table(self, slot: int) -> list[int]:
        return self._holdings[slot].table

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    # Room.

    def can_allocate(
        self, num_tokens: int, shared: SequenceOf[int] = (), *, num_later: int = 0, num_kept: int = 0
    ) -> bool:
        """Whether a slot is free, and blocks for `num_tokens` with `num_kept` blocks to spare.

        `shared` are blocks with the first of the tokens. Those that are idle count as free before and as used after.
        `num_later` blocks will be shared by `fork`.
        """
        num_shared = num_later + sum(1 for block in shared if self._num_references[block])
        num_needed = self.num_blocks_for(num_tokens) - num_shared + num_kept
        return self.has_free_slot and num_needed <= self.num_free_blocks

    def allocate(self, num_tokens: int, shared: SequenceOf[int] = (), *, num_later: int = 0) -> int:
        """Promise the lowest free slot blocks for `num_tokens`, and return it. Ask `can_allocate` first."""
        assert self.can_allocate(num_tokens, shared, num_later=num_later)
        slot = heapq.heappop(self._free_slots)
        num_wanted = self.num_blocks_for(num_tokens)
        self._holdings[slot] = Holding(num_wanted, num_wanted - num_later)
        self._num_promised += num_wanted - num_later
        self.share(slot, shared)
        return slot

    def cover(self, slot: int, num_tokens: int) -> None:
        """Take promised blocks until the table has room for `num_tokens` in all."""
        holding = self._holdings[slot]
        while len(holding.table) < self.num_blocks_for(num_tokens):
            holding.table.append(self._take())
            holding.num_promised -= 1
            self._num_promised -= 1

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Give the table room for `num_tokens` in all. Returns False and changes nothing if blocks are too few."""
        holding = self._holdings[slot]
        num_more = self.num_blocks_for(num_tokens) - len(holding.table) - holding.num_promised
        if num_more > self.num_free_blocks:
            return False
        if num_more > 0:
            holding.num_promised += num_more
            self._num_promised += num_more
        self.cover(slot, num_tokens)
        return True

    def free(self, slot: int) -> None:
        self._drop_copy(slot)
        holding, self._holdings[slot] = self._holdings[slot], Holding()
        self._num_promised -= holding.num_promised
        for block in reversed(holding.table):  # the last first, so that a block is idle before what it lies below
            self._release(block)
        self._on_free(slot)
        heapq.heappush(self._free_slots, slot)

    # Sharing.

    def find(self, root: Root, token_ids: list[int], end: int) -> Match:
        """Blocks with the longest known beginning of `token_ids[:end]`."""
        return self._tree.find(root, token_ids, end) if self.reuses_prefixes else Match([])

    def share(self, slot: int, blocks: SequenceOf[int]) -> None:
        """Begin the table with these full blocks. They replace blocks with the same or fewer tokens."""
        if not blocks:
            return
        self._drop_copy(slot)
        holding = self._holdings[slot]
        for index in range(holding.num_stored, len(blocks)):
            self._put(holding.table, index, blocks[index])
            self.num_reused_blocks += 1
        if self.reuses_prefixes:
            holding.num_stored = max(holding.num_stored, len(blocks))
        num_promised = min(holding.num_promised, holding.num_wanted - len(holding.table))
        self._num_promised -= holding.num_promised - num_promised
        holding.num_promised = num_promised

    def can_copy(self, block: int) -> bool:
        """Whether a block can be kept until it is copied, at nobody's cost."""
        return self._num_references[block] > 0 or self.num_free_blocks > 0

    def copy(self, slot: int, block: int, index: int) -> None:
        """Copy a block into the table's block `index`, before the next step."""
        self._drop_copy(slot)
        self._hold(block)
        self.cover(slot, (index + 1) * self.tokens_per_block)
        self._copies[slot] = block, self._holdings[slot].table[index]

    def fork(self, slot: int, to_slots: list[int], num_tokens: int) -> None:
        """Give other slots the first `num_tokens` of a slot. Full blocks are shared, the rest is copied."""
        table, num_full = self.table(slot), num_tokens // self.tokens_per_block
        for to_slot in to_slots:
            self.share(to_slot, table[:num_full])
            if num_tokens % self.tokens_per_block:
                self.copy(to_slot, table[num_full], num_full)

    def end_copies(self) -> None:
        """Note that the step has copied what `copies` said."""
        for slot in list(self._copies):
            self._drop_copy(slot)

    def store(self, slot: int, root: Root, token_ids: list[int], num_tokens: int) -> None:
        """Put the blocks with the first `num_tokens` of a sequence into the tree, the last one even if it is not full.

        Where the tree has a block with the same tokens, that one takes the place of the slot's.
        """
        if not self.reuses_prefixes or slot in self._copies:  # before the copy is made, nothing is new
            return
        holding, size = self._holdings[slot], self.tokens_per_block
        table, num_full = holding.table, num_tokens // size
        for index in range(holding.num_stored, self.num_blocks_for(num_tokens)):
            tokens = tuple(token_ids[index * size : min((index + 1) * size, num_tokens)])
            kept = self._tree.insert(table[index - 1] if index else root, tokens, table[index])
            if index < num_full and kept != table[index]:
                self._put(table, index, kept)
        holding.num_stored = max(holding.num_stored, num_full)

    def forget(self, slot: int) -> None:
        """Take the slot's blocks out of the tree, up to the first that anybody else has used."""
        holding = self._holdings[slot]
        for block in reversed(holding.table):
            if block in self._tree:
                if self._num_references[block] > 1 or self._tree.has_children(block):
                    return
                self._tree.remove(block)
        holding.num_stored = 0

    def _put(self, table: list[int], index: int, block: int) -> None:
        """Make a used or idle block the table's block `index`."""
        self._hold(block)
        if index == len(table):
            table.append(block)
        else:
            self._release(table[index])
            table[index] = block

    def _drop_copy(self, slot: int) -> None:
        if slot in self._copies:
            self._release(self._copies.pop(slot)[0])

    def _take(self) -> int:
        """An empty block, or else the one that was idle longest."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._tree.remove(block)
        self._num_references[block] = 1
        self.num_new_blocks += 1
        return block

    def _hold(self, block: int) -> None:
        if not self._num_references[block]:
            del self._idle[block]
        self._num_references[block] += 1

    def _release(self, block: int) -> None:
        self._num_references[block] -= 1
        if self._num_references[block]:
            return
        if block in self._tree:
            self._idle[block] = None
        else:
            self._empty.append(block)
