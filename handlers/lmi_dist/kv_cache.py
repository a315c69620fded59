"""Which blocks of the key-value cache each running sequence holds. Plain Python.

Each slot has a table of blocks, in the order of the sequence's tokens. At admission a sequence is
promised all blocks that its prompt needs; it takes them while the prompt is computed.

Sequences with the same beginning share the blocks that hold it: a tree finds blocks by their
tokens. A block that is in the tree and in no table is idle. It counts as free, but it is taken only
when no other block is left.

A runner may instead keep each sequence in one piece of memory. Then nothing is shared, and a block
is only a unit in which memory is counted.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence as SequenceOf
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, field

from handlers.lmi_dist.cached_blocks import Match, Parent, PrefixTree, Root, Tokens, num_equal
from handlers.lmi_dist.idle_blocks import IdleBlocks, Retention
from handlers.lmi_dist.plan import BlockCopy

if TYPE_CHECKING:
    from handlers.lmi_dist.cache_events import CacheEvents
    from handlers.lmi_dist.stored_prefixes import StoredPrefixes


class Holding(Struct):
    """What a slot holds."""

    table: list[int] = field(default_factory=list)
    # How many blocks the prompt needs in all.
    num_for_prompt: int = 0
    # How many more blocks are kept free for this slot.
    num_promised: int = 0
    # How many blocks at the start of the table are full and in the tree.
    num_stored: int = 0


class Slots(Protocol):
    """The memory of a runner that keeps the keys and values of each sequence in one piece, its
    slot.
    """

    def copy(self, slot: int, to_slots: list[int], num_tokens: int) -> None:
        """Give other slots the keys and values of the first `num_tokens` of a slot."""

    def release(self, slot: int) -> None:
        """Free a slot whose keys and values are not needed any more."""


class KvCache:
    """The tables of all slots, and the blocks that are in none."""

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
        """`slots`: the memory of a runner that reads no tables, so that no blocks are shared.

        `events` and `stored` are told of the full blocks that come into the tree and leave it;
        `stored` also has blocks on disk, from which `restore` reads.
        """
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.shares_blocks = slots is None
        self.reuses_prefixes = reuses_prefixes and self.shares_blocks

        # Counts since the start, for statistics: blocks that were taken,
        self.num_new_blocks = 0
        # blocks that were shared instead, and
        self.num_reused_blocks = 0
        # blocks that were taken for a prompt.
        self.num_missed_blocks = 0

        # By slot.
        self._holdings = [Holding() for _ in range(num_slots)]
        # A heap: the lowest slot first keeps the active slots dense.
        self._free_slots = list(range(num_slots))

        # A stack of the blocks that have no memory yet.
        self._new_blocks = list(range(num_blocks - 1, -1, -1))
        # How many of the new blocks must not be taken, since memory is short.
        self._num_withheld = 0
        # A stack of the blocks that have memory and hold nothing.
        self._empty_blocks: list[int] = []
        # The blocks that are in the tree and in no table.
        self._idle_blocks = IdleBlocks(now_s)

        # By block: how many tables and copies need it.
        self._num_references = [0] * num_blocks
        # By slot: what the next step copies first.
        self._copies: dict[int, BlockCopy] = {}

        self._tree = PrefixTree(tokens_per_block)
        self._slots = slots
        self._stored = stored
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
        """How many blocks may be promised or taken.

        Below 0 where memory was withheld after it was promised.
        """
        num_promised = sum([holding.num_promised for holding in self._holdings])
        num_new = len(self._new_blocks) - self._num_withheld
        num_unused = num_new + len(self._empty_blocks) + len(self._idle_blocks)
        return num_unused - num_promised

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
        return len(self._new_blocks)

    @property
    def copies(self) -> list[BlockCopy]:
        """The blocks that the next step copies first."""
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
        """Whether there are slots and blocks for a sequence of `num_tokens`.

        `shared`: blocks that hold its first tokens already. An idle one of them costs a free block,
        a used one costs nothing.
        `num_later`: how many of its blocks `fork` will share with it later, at no cost.
        `num_kept`: how many blocks must stay free beside it.
        """
        if len(self._free_slots) < num_slots:
            return False

        num_used = sum(1 for block in shared if self._num_references[block])
        num_more = self.num_blocks_for(num_tokens) - num_later - num_used
        return num_more + num_kept <= self.num_free_blocks

    def allocate(self, num_tokens: int, shared: SequenceOf[int] = (), *, num_later: int = 0) -> int:
        """Promise the lowest free slot blocks for `num_tokens`, and return it.

        Ask `can_allocate` first.
        """
        assert self.can_allocate(num_tokens, shared, num_later=num_later)
        slot = heapq.heappop(self._free_slots)
        num_blocks = self.num_blocks_for(num_tokens)
        self._holdings[slot] = Holding(
            num_for_prompt=num_blocks, num_promised=num_blocks - num_later
        )
        self.share(slot, shared)
        return slot

    def cover(self, slot: int, num_tokens: int) -> None:
        """Take promised blocks until the table has room for `num_tokens` in all."""
        holding = self._holdings[slot]
        while len(holding.table) < self.num_blocks_for(num_tokens):
            if len(holding.table) < holding.num_for_prompt:
                self.num_missed_blocks += 1

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
        table = self._holdings[slot].table
        self._holdings[slot] = Holding()
        # The last block is idle first, and so is evicted before the one that it follows.
        for block in reversed(table):
            self._release(block)

        if self._slots is not None:
            self._slots.release(slot)

        heapq.heappush(self._free_slots, slot)

    # Memory.

    def withhold(self, num_blocks: int) -> None:
        """Forbid to take so many of the new blocks, until the next call.

        It may leave fewer free blocks than are promised.
        """
        self._num_withheld = min(max(num_blocks, 0), len(self._new_blocks))

    def give_back(self, num_blocks: int) -> list[int]:
        """Make up to `num_blocks` unused blocks new again, empty ones first.

        Returns those whose memory is not needed any more. They are withheld.
        """
        num_unused = len(self._empty_blocks) + len(self._idle_blocks)
        blocks = [self._take_unused() for _ in range(min(num_blocks, num_unused))]
        self._new_blocks += blocks
        self._num_withheld += len(blocks)
        return blocks

    def give_back_idle(self, since_s: float, *, with_empty: bool) -> list[int]:
        """Make the blocks new again that nobody has used since a time, as `now_s` counts it.

        `with_empty`: the empty ones too. Returns those whose memory is not needed any more.
        """
        blocks: list[int] = []
        if with_empty:
            blocks += self._empty_blocks
            self._empty_blocks = []

        while self._idle_blocks.is_first_older(since_s):
            blocks.append(self._evict())

        self._new_blocks += blocks
        return blocks

    # Sharing.

    def find(self, root: Root, token_ids: list[int], end: int) -> Match:
        """Return the blocks of the longest known beginning of `token_ids[:end]`."""
        if not self.reuses_prefixes:
            return Match([])

        return self._tree.find(root, token_ids, end)

    def restore(
        self, root: Root, token_ids: list[int], end: int, *, may_go_on: Callable[[], bool]
    ) -> bool:
        """Read the blocks from the disk that follow those of the tree in `token_ids[:end]`.

        They are idle then. `may_go_on` is asked after each block; False if it said no while blocks
        may follow.
        """
        if self._stored is None or not self.reuses_prefixes:
            return True

        blocks = self._tree.find(root, token_ids, end).blocks
        # None of them may be evicted for those that follow.
        for block in blocks:
            self._hold(block)

        num_full_blocks = end // self.tokens_per_block
        is_done = True
        while len(blocks) < num_full_blocks and self.num_free_blocks > 0:
            next_block = self._read_next(self._stored, root, token_ids, blocks)
            if next_block is None:
                break

            blocks.append(next_block)
            if not may_go_on():
                is_done = False
                break

        for block in reversed(blocks):
            self._release(block)

        return is_done

    def _read_next(
        self, stored: StoredPrefixes, root: Root, token_ids: list[int], blocks: list[int]
    ) -> int | None:
        """Read the block that follows `blocks`, which begin the sequence, and put it into the tree.

        Returns None if the disk does not have it.
        """
        start = len(blocks) * self.tokens_per_block
        tokens = tuple(token_ids[start : start + self.tokens_per_block])
        previous = blocks[-1] if blocks else None
        if not stored.has(root, previous, tokens):
            return None

        block = self._take()
        if not stored.read(root, previous, tokens, block):
            self._release(block)
            return None

        self._tree.insert(root if previous is None else previous, tokens, block)
        self._tell_stored(root, previous, tokens, block)
        return block

    def share(self, slot: int, blocks: SequenceOf[int]) -> None:
        """Make these full blocks the first ones of the table, in place of those that are there."""
        if not blocks:
            return

        self._drop_copy(slot)
        holding = self._holdings[slot]
        self._replace(holding.table, blocks)
        if self.reuses_prefixes:
            holding.num_stored = max(holding.num_stored, len(blocks))

        num_lacking = holding.num_for_prompt - len(holding.table)
        holding.num_promised = min(holding.num_promised, num_lacking)

    def can_copy(self, block: int) -> bool:
        """Whether a block can be held until it is copied: a used one, or one that is free."""
        return self._num_references[block] > 0 or self.num_free_blocks > 0

    def copy(self, slot: int, block: int, index: int) -> None:
        """Copy a block into the table's block `index`, before the next step."""
        self._drop_copy(slot)
        self._hold(block)
        self.cover(slot, (index + 1) * self.tokens_per_block)
        self._copies[slot] = BlockCopy(block, self._holdings[slot].table[index])

    def fork(self, slot: int, to_slots: list[int], num_tokens: int) -> None:
        """Give other slots the first `num_tokens` of a slot.

        Full blocks are shared, and one that is not full is copied.
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
        """Give a slot the first `num_tokens` of another slot, in place of what it holds.

        It shares the full blocks. Tokens behind them are copied by `adopt_rest`, once the slot has
        room for them.
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
        num_full, num_behind = divmod(num_tokens, self.tokens_per_block)
        if num_behind and self.shares_blocks:
            self.copy(slot, self.table(from_slot)[num_full], num_full)

    def end_copies(self) -> None:
        """Note that a step has made the copies."""
        for slot in list(self._copies):
            self._drop_copy(slot)

    def store(self, slot: int, root: Root, token_ids: list[int], num_tokens: int) -> int | None:
        """Put the blocks with the first `num_tokens` of a sequence into the tree.

        A last block that is not full has only the tokens there that others may find. Where the tree
        has a full block with the same tokens, the table gets that one instead of its own.

        Returns the tree's block with the last of the tokens, or None if none was added.
        """
        # Before the copy is made, nothing is new.
        if not self.reuses_prefixes or slot in self._copies:
            return None

        holding = self._holdings[slot]
        size = self.tokens_per_block
        num_full = num_tokens // size
        num_findable_tokens = max(num_full * size, root.num_shared(num_tokens))
        num_blocks = self.num_blocks_for(num_findable_tokens)

        block: int | None = None
        for index in range(holding.num_stored, num_blocks):
            start = index * size
            end = min(start + size, num_findable_tokens)
            tokens = tuple(token_ids[start:end])
            block = self._store_block(holding.table, root, index, tokens)

        holding.num_stored = max(holding.num_stored, num_full)
        if num_blocks < self.num_blocks_for(num_tokens):
            return None

        return block

    def _store_block(self, table: list[int], root: Root, index: int, tokens: Tokens) -> int:
        """Put the block at `index` of a table, with these tokens, into the tree.

        Returns the tree's block with these tokens, which a table gets if it is full.
        """
        previous = table[index - 1] if index else None
        own_block = table[index]
        block = self._tree.insert(root if previous is None else previous, tokens, own_block)
        if len(tokens) < self.tokens_per_block:
            return block

        if block == own_block:
            self._tell_stored(root, previous, tokens, block)
        else:
            self._hold(block)
            self._release(own_block)
            table[index] = block

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
        """Set how long the first blocks of a slot are kept when nobody uses them, each as the
        entry at its place says.

        `last`: a block that takes the place of the last of them. An entry that is None leaves what
        an earlier request said.
        """
        blocks = self.table(slot)[: len(retentions)]
        if last is not None:
            blocks[-1] = last

        for block, retention in zip(blocks, retentions, strict=True):
            if retention is not None and block in self._tree:
                self._idle_blocks.retain(block, retention)

    def _replace(self, table: list[int], blocks: SequenceOf[int]) -> None:
        """Make used or idle blocks the first ones of a table."""
        start = num_equal(table, blocks)
        end = len(blocks)
        new_blocks = blocks[start:]
        for block in new_blocks:
            self._hold(block)

        # In the order of `free`.
        for block in reversed(table[start:end]):
            self._release(block)

        table[start:end] = new_blocks
        self.num_reused_blocks += len(new_blocks)

    def _drop_copy(self, slot: int) -> None:
        copy = self._copies.pop(slot, None)
        if copy is not None:
            self._release(copy.source)

    def _take(self) -> int:
        """Take an empty block, or else a new one, or else an idle one."""
        has_new = len(self._new_blocks) > self._num_withheld
        if has_new and not self._empty_blocks:
            block = self._new_blocks.pop()
        else:
            block = self._take_unused()

        self._num_references[block] = 1
        self.num_new_blocks += 1
        return block

    def _remove(self, block: int) -> Parent:
        """Take a block out of the tree. Returns its parent."""
        for watcher in self._watchers:
            watcher.remove(block)

        return self._tree.remove(block)

    def _tell_stored(self, root: Root, previous: int | None, tokens: Tokens, block: int) -> None:
        """Tell watchers of a full block in the tree that follows `previous`, or begins a prompt."""
        for watcher in self._watchers:
            watcher.store(root, previous, tokens, block)

    def _take_unused(self) -> int:
        """Take an empty block, or else the idle one that is evicted first."""
        if self._empty_blocks:
            return self._empty_blocks.pop()

        return self._evict()

    def _evict(self) -> int:
        """Take the idle block that is first in the order of eviction out of the tree."""
        block = self._idle_blocks.pop()
        parent = self._remove(block)
        if isinstance(parent, int) and not self._tree.has_children(parent):
            self._idle_blocks.allow(parent)

        return block

    def _hold(self, block: int) -> None:
        """Note that one more table or copy needs a used or idle block."""
        if not self._num_references[block]:
            self._idle_blocks.remove(block)

        self._num_references[block] += 1

    def _release(self, block: int) -> None:
        """Note that a table or copy does not need a block any more."""
        self._num_references[block] -= 1
        if self._num_references[block]:
            return

        if block in self._tree:
            self._idle_blocks.add(block, is_evictable=not self._tree.has_children(block))
        else:
            self._idle_blocks.release(block)
            self._empty_blocks.append(block)
