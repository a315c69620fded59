"""Sends a prompt to the engine that has computed its beginning, whose keys and values it may still cache."""

from collections import OrderedDict
from collections.abc import Sequence

from lmi.engine.client import BySlot, EngineConnection, Engines, slot_of
from lmi.executor import Request
from lmi.shared.state import EngineRecord, FrontEndRecord

BLOCK_SIZE = 64  # tokens
MAX_BLOCKS = 1 << 15  # so that 2 million tokens of prompts are known
MAX_PROMPT_BLOCKS = 256  # what is behind them is not looked at


class PrefixEngines(Engines):
    """Engines of which one counts as having less to do by the tokens of the prompt that it has had.

    That of a `prompt_cache_key` counts as having had them all: other front ends may have sent it similar prompts.
    """

    def __init__(
        self, sockets: Sequence[str], records: Sequence[EngineRecord], record: FrontEndRecord | None = None
    ) -> None:
        super().__init__(sockets, records, record)
        self._had: OrderedDict[int, int] = OrderedDict()  # bits of slots by the key of a block; the oldest first

    def _best(self, engines: BySlot, request: Request, prompt_cache_key: str | None = None) -> EngineConnection:
        keys = keys_of(request)
        num_known = self.num_known(keys)
        if prompt_cache_key is not None:
            num_known[slot_of(prompt_cache_key, engines)] = len(request.input_token_ids)
        slot = min(engines, key=lambda slot: engines[slot].num_outstanding_tokens - num_known[slot])
        for key in reversed(keys):  # so that the ends go first where one is forgotten for room
            self._had[key] = self._had.pop(key, 0) | 1 << slot
        while len(self._had) > MAX_BLOCKS:
            self._had.popitem(last=False)
        return engines[slot]

    def num_known(self, keys: Sequence[int]) -> list[int]:
        """Return how many tokens at the beginning of a prompt the engine in each slot has had."""
        known = [0] * len(self.records)
        slots = -1  # all
        for key in keys:
            if not (slots := slots & self._had.get(key, 0)):
                break
            for slot in range(len(known)):
                known[slot] += BLOCK_SIZE * (slots >> slot & 1)
        return known

    async def _connect(self, slot: int) -> None:
        try:
            await super()._connect(slot)
        finally:  # the engine was lost
            for key in self._had:
                self._had[key] &= ~(1 << slot)


def keys_of(request: Request) -> list[int]:
    """Return the hash of each whole block of a prompt with all before it, the adapter, the `cache_salt` and images."""
    token_ids, adapter = request.input_token_ids, request.lora_config
    keys = [hash((None if adapter is None else adapter.name, request.cache_salt, request.images))]
    for start in range(0, min(len(token_ids) // BLOCK_SIZE, MAX_PROMPT_BLOCKS) * BLOCK_SIZE, BLOCK_SIZE):
        keys.append(hash((keys[-1], tuple(token_ids[start : start + BLOCK_SIZE]))))
    return keys[1:]
