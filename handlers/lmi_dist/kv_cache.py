"""Which blocks of the key-value cache each running sequence holds, in a table for its slot. Plain
Python.

At admission a sequence is promised all blocks that its prompt needs, and takes them as the prompt
is computed. Where a runner reads blocks, one may be in several tables. A block that only the tree
by content has is idle: it counts as free, and is taken when no block is empty. For a runner with
slots a block is only a unit of the budget.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from handlers.lmi_dist.cached_blocks import Match, Parent, PrefixTree, Root, Tokens, num_equal
from handlers.lmi_dist.idle_blocks import IdleBlocks, Retention

if TYPE_CHECKING:
    from handlers.lmi_dist.cache_events import CacheEvents
    from handlers.lmi_dist.stored_prefixes import StoredPrefixes


@dataclass(slots=True)
class Holding:
    """What a slot holds. The first `num_stored` blocks of its table are full and in the tree."""

    # The blocks that the prompt needs.
    num_wanted: int = 0
    # The blocks that it will take.
    num_promised: int = 0
    num_stored: int = 0
    table: list[int] = field(default_factory=list)


class Slots(Protocol):
    """The memory of a runner that keeps the keys and values of each sequence in one piece, its
    slot.
    """

    def copy(self, slot: int, to_slots: list[int], num_tokens: int) -> None:
        """Give other slots the keys and values of the first `num_tokens` of a slot."""

    def release(self, slot: int) -> None:
        """Free a slot whose keys and values are not needed any more."""


class KvCache:
    """The tables of all slots.

    `slots`: of a runner that reads no tables, and so shares no blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        num_slots: int,
        tokens_per_block: int = 16,
        *,
        slots: Slots | None = None,
        reuses_prefixes: bool = False,
        events: CacheEvents | None = None,
        stored: StoredPrefixes | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.shares_blocks = slots is None
        self.reuses_prefixes = reuses_prefixes and self.shares_blocks

        # Blocks that were taken so far.
        self.num_new_blocks = 0
        # Blocks of the tree, or of a fork, that were shared so far.
        self.num_reused_blocks = 0
        # Blocks of prompts that were taken new so far.
        self.num_missed_blocks = 0

        # By slot.
        self._holdings = [Holding() for _ in range(num_slots)]
        # A heap: the lowest slot first keeps the active slots dense.
        self._free_slots = list(range(num_slots))

        # A stack of blocks that have no memory yet.
        self._new = list(range(num_blocks - 1, -1, -1))
        # So many of the new blocks have no memory to take.
        self._num_withheld = 0
        # A stack of blocks that have memory.
        self._empty: list[int] = []
        self._idle = IdleBlocks(now_s)

        # How many tables and copies need each block.
        self._num_references = [0] * num_blocks
        # By slot: the blocks that the next step copies from and to.
        self._copies: dict[int, tuple[int, int]] = {}
        self._tree = PrefixTree(tokens_per_block)
        self._slots = slots
        self._stored = stored
        # They are told of full blocks that come into the tree and leave it.
        self._watchers: list[CacheEvents | StoredPrefixes] = []
        for watcher in (events, stored):
            if watcher is not None:
                self._watchers.append(watcher)

    @property
    def has_free_slot(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free_slots)

    @property
    def num_free_blocks(self) -> int:
        """How many blocks nobody has or was promised. Below 0 where memory was withheld since."""
        num_promised = sum([holding.num_promised for holding in self._holdings])
        num_new = len(self._new) - self._num_withheld
        return len(self._empty) + num_new + len(self._idle) - num_promised

    @property
    def num_used_blocks(self) -> int:
        """How many blocks are in tables or promised."""
        return self.num_blocks - self.num_free_blocks

    @property
    def is_short(self) -> bool:
        """Whether there is memory for fewer blocks than there are."""
        return self._num_withheld > 0

    @property
    def num_new(self) -> int:
        """How many blocks have no memory yet: nothing was ever written to them, or it was given
        back.
        """
        return len(self._new)

    @property
    def copies(self) -> list[tuple[int, int]]:
        """From block, to block: what the next step has to copy first."""
        return list(self._copies.values())

    def table(self, slot: int) -> list[int]:
        """Return the blocks of a slot, in their order."""
        return self._holdings[slot].table

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks so many tokens need."""
        return -(-num_tokens // self.tokens_per_block)

    # Room.

    def can_allocate(
        self,
        num_tokens: int,
        shared: SequenceOf[int] = (),
        *,
        num_later: int = 0,
        num_kept: int = 0,
        num_slots: int = 1,
    ) -> bool:
        """Whether `num_slots` are free, and blocks for `num_tokens` with `num_kept` blocks to
        spare.

        `shared` are blocks with the first of the tokens. Those that are idle count as free before
        and as used after. `num_later` blocks will be shared by `fork`.
        """
        num_used = sum(1 for block in shared if self._num_references[block])
        num_needed = self.num_blocks_for(num_tokens) - num_later - num_used + num_kept
        return len(self._free_slots) >= num_slots and num_needed <= self.num_free_blocks

    def allocate(self, num_tokens: int, shared: SequenceOf[int] = (), *, num_later: int = 0) -> int:
        """Promise the lowest free slot blocks for `num_tokens`, and return it.

        Ask `can_allocate` first.
        """
        assert self.can_allocate(num_tokens, shared, num_later=num_later)
        slot = heapq.heappop(self._free_slots)
        num_wanted = self.num_blocks_for(num_tokens)
        self._holdings[slot] = Holding(num_wanted, num_wanted - num_later)
        self.share(slot, shared)
        return slot

    def cover(self, slot: int, num_tokens: int) -> None:
        """Take promised blocks until the table has room for `num_tokens` in all."""
        holding = self._holdings[slot]
        while len(holding.table) < self.num_blocks_for(num_tokens):
            self.num_missed_blocks += len(holding.table) < holding.num_wanted
            holding.table.append(self._take())
            holding.num_promised -= 1

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Give the table room for `num_tokens` in all.

        Returns False and changes nothing if blocks are too few.
        """
        holding = self._holdings[slot]
        num_more = self.num_blocks_for(num_tokens) - len(holding.table) - holding.num_promised
        if num_more > self.num_free_blocks:
            return False

        holding.num_promised += max(num_more, 0)
        self.cover(slot, num_tokens)
        return True

    def free(self, slot: int) -> None:
        """Free a slot and its blocks."""
        self._drop_copy(slot)
        holding = self._holdings[slot]
        self._holdings[slot] = Holding()
        # The last is the first, so that a block is idle before what it lies below.
        for block in reversed(holding.table):
            self._release(block)

        if self._slots is not None:
            self._slots.release(slot)

        heapq.heappush(self._free_slots, slot)

    # Memory.

    def withhold(self, num_blocks: int) -> None:
        """Let so many of the new blocks not be taken for now.

        More than are free may then be promised.
        """
        self._num_withheld = min(max(num_blocks, 0), len(self._new))

    def give_back(self, num_blocks: int) -> list[int]:
        """Take the memory of up to `num_blocks` blocks that nobody uses, first of those that hold
        nothing.

        They are new again. Returns them.
        """
        num_unused = len(self._empty) + len(self._idle)
        blocks = [self._unused() for _ in range(min(num_blocks, num_unused))]
        self._new += blocks
        self._num_withheld += len(blocks)
        return blocks

    def give_back_idle(self, since_s: float, *, with_empty: bool) -> list[int]:
        """Take the memory of the blocks that nobody has used since a time, as `now_s` counts it.

        They are new again. `with_empty`: also of those that hold nothing. Returns them.
        """
        blocks: list[int] = []
        if with_empty:
            blocks += self._empty
            self._empty = []

        while self._idle.is_first_older(since_s):
            blocks.append(self._evict())

        self._new += blocks
        return blocks

    # Sharing.

    def find(self, root: Root, token_ids: list[int], end: int) -> Match:
        """Blocks with the longest known beginning of `token_ids[:end]`: see `PrefixTree.find`."""
        if not self.reuses_prefixes:
            return Match([])

        return self._tree.find(root, token_ids, end)

    def restore(
        self, root: Root, token_ids: list[int], end: int, *, may_go_on: Callable[[], bool]
    ) -> bool:
        """Bring the blocks back that the disk has of `token_ids[:end]` behind those of the tree.

        They are idle then. Returns False if more would follow but `may_go_on`, which is asked
        after each block, says no.
        """
        stored = self._stored
        if stored is None or not self.reuses_prefixes:
            return True

        size = self.tokens_per_block
        blocks = self._tree.find(root, token_ids, end).blocks
        # None of them may be evicted for those that follow.
        for block in blocks:
            self._hold(block)

        is_whole = True
        while (len(blocks) + 1) * size <= end and self.num_free_blocks > 0:
            start = len(blocks) * size
            tokens = tuple(token_ids[start : start + size])
            parent = blocks[-1] if blocks else None
            if not stored.has(root, parent, tokens):
                break

            block = self._take()
            if not stored.read(root, parent, tokens, block):
                self._release(block)
                break

            self._tree.insert(root if parent is None else parent, tokens, block)
            self._tell(root, parent, tokens, block)
            blocks.append(block)
            if not may_go_on():
                is_whole = False
                break

        for block in reversed(blocks):
            self._release(block)

        return is_whole

    def share(self, slot: int, blocks: SequenceOf[int]) -> None:
        """Begin the table with these full blocks.

        They replace blocks with the same or fewer tokens.
        """
        if not blocks:
            return

        self._drop_copy(slot)
        holding = self._holdings[slot]
        self._replace(holding.table, blocks)
        if self.reuses_prefixes:
            holding.num_stored = max(holding.num_stored, len(blocks))

        holding.num_promised = min(holding.num_promised, holding.num_wanted - len(holding.table))

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
        """Give other slots the first `num_tokens` of a slot.

        Full blocks are shared, the rest is copied.
        """
        if self._slots is not None:
            return self._slots.copy(slot, to_slots, num_tokens)

        table = self.table(slot)
        num_full = num_tokens // self.tokens_per_block
        for to_slot in to_slots:
            self.share(to_slot, table[:num_full])
            if num_tokens % self.tokens_per_block:
                self.copy(to_slot, table[num_full], num_full)

    def adopt(self, from_slot: int, slot: int, num_tokens: int) -> None:
        """Replace what a slot holds by the full blocks with the first `num_tokens` of another slot.

        If there is a rest, it is copied by `adopt_rest`, once the slot has room for it.
        """
        if self._slots is not None:
            return self._slots.copy(from_slot, [slot], num_tokens)

        self._drop_copy(slot)
        holding = self._holdings[slot]
        source = self._holdings[from_slot]
        self._replace(holding.table, source.table[: num_tokens // self.tokens_per_block])
        holding.num_stored = source.num_stored

    def adopt_rest(self, from_slot: int, slot: int, num_tokens: int) -> None:
        """Copy what `adopt` has left out, before the next step."""
        num_full, num_rest = divmod(num_tokens, self.tokens_per_block)
        if num_rest and self.shares_blocks:
            self.copy(slot, self.table(from_slot)[num_full], num_full)

    def end_copies(self) -> None:
        """Note that the step has copied what `copies` said."""
        for slot in list(self._copies):
            self._drop_copy(slot)

    def store(self, slot: int, root: Root, token_ids: list[int], num_tokens: int) -> int | None:
        """Put the blocks with the first `num_tokens` of a sequence into the tree.

        The last one is put there even if it is not full, with what others may find of it. Where the
        tree has a block with the same tokens, that one takes the place of the slot's if it is full.
        Returns the tree's block with the last of the tokens, or None if none was added.
        """
        # Before the copy is made, nothing is new.
        if not self.reuses_prefixes or slot in self._copies:
            return None

        holding = self._holdings[slot]
        size = self.tokens_per_block
        table = holding.table
        num_full = num_tokens // size
        num_shared = max(num_full * size, root.num_shared(num_tokens))
        block: int | None = None
        for index in range(holding.num_stored, self.num_blocks_for(num_shared)):
            tokens = tuple(token_ids[index * size : min((index + 1) * size, num_shared)])
            previous = table[index - 1] if index else None
            block = self._tree.insert(root if previous is None else previous, tokens, table[index])
            if index >= num_full:
                continue

            if block != table[index]:
                self._hold(block)
                self._release(table[index])
                table[index] = block
            else:
                self._tell(root, previous, tokens, block)

        holding.num_stored = max(holding.num_stored, num_full)
        if self.num_blocks_for(num_shared) < self.num_blocks_for(num_tokens):
            return None

        return block

    def forget(self, slot: int) -> None:
        """Take the slot's blocks out of the tree, up to the first that anybody else has used."""
        holding = self._holdings[slot]
        for block in reversed(holding.table):
            if block in self._tree:
                if self._num_references[block] > 1 or self._tree.has_children(block):
                    return

                self._remove(block)

        holding.num_stored = 0

    def retain(self, slot: int, retentions: SequenceOf[Retention | None], last: int | None) -> None:
        """Set how long blocks are kept when nobody uses them: those of the slot, with `last` in
        place of the last one.

        None leaves what an earlier request said.
        """
        blocks = self.table(slot)[: len(retentions)]
        if last is not None:
            blocks[-1] = last

        for block, retention in zip(blocks, retentions, strict=True):
            if retention is not None and block in self._tree:
                self._idle.retain(block, retention)

    def _replace(self, table: list[int], blocks: SequenceOf[int]) -> None:
        """Make used or idle blocks those of a table, from the first on."""
        start = num_equal(table, blocks)
        shared = blocks[start:]
        for block in shared:
            self._hold(block)

        # In the order of `free`.
        for block in reversed(table[start : len(blocks)]):
            self._release(block)

        table[start : len(blocks)] = shared
        self.num_reused_blocks += len(shared)

    def _drop_copy(self, slot: int) -> None:
        if slot in self._copies:
            self._release(self._copies.pop(slot)[0])

    def _take(self) -> int:
        """An empty block, or else a new one, or else an idle one."""
        is_new = not self._empty and len(self._new) > self._num_withheld
        block = self._new.pop() if is_new else self._unused()
        self._num_references[block] = 1
        self.num_new_blocks += 1
        return block

    def _remove(self, block: int) -> Parent:
        """Take a block out of the tree. Returns what it lay below."""
        for watcher in self._watchers:
            watcher.remove(block)

        return self._tree.remove(block)

    def _tell(self, root: Root, parent: int | None, tokens: Tokens, block: int) -> None:
        """Tell that the tree has a full block below its parent, or as the first one."""
        for watcher in self._watchers:
            watcher.store(root, parent, tokens, block)

    def _unused(self) -> int:
        """A block with memory that nobody uses: one that holds nothing, or else the first to be
        evicted.
        """
        return self._empty.pop() if self._empty else self._evict()

    def _evict(self) -> int:
        """Take the idle block out of the tree that is the first to be evicted."""
        block = self._idle.pop()
        parent = self._remove(block)
        if isinstance(parent, int) and not self._tree.has_children(parent):
            self._idle.allow(parent)

        return block

    def _hold(self, block: int) -> None:
        if not self._num_references[block]:
            self._idle.remove(block)

        self._num_references[block] += 1

    def _release(self, block: int) -> None:
        self._num_references[block] -= 1
        if self._num_references[block]:
            return

        if block in self._tree:
            self._idle.add(block, is_evictable=not self._tree.has_children(block))
        else:
            self._idle.release(block)
            self._empty.append(block)
