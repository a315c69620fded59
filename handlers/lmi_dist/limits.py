"""How many sequences run at once, how long each may be, and how many tokens the KV cache holds."""

import logging

from msgspec import Struct

from handlers.base.cache_budget import default_budget
from handlers.lmi_dist.defaults import MAX_NUM_SEQUENCES
from lmi.settings.config import EngineConfig
from lmi.shared import machine

log = logging.getLogger(__name__)

SLOTS_PER_EXPRESS_PLACE = 16


class Limits(Struct, frozen=True):
    """The limits of one engine, which it keeps until it ends."""

    # The sequences that run at once.
    num_slots: int
    # The tokens of a sequence, prompt and answer together.
    max_length: int
    # The tokens that the KV cache holds.
    num_cache_tokens: int
    # The sequences of express requests that run beside those of `num_slots`.
    num_express: int = 0
    # Why there are so many slots, where no option says so.
    batch_reason: str = ""

    @property
    def num_all_slots(self) -> int:
        """The slots of all requests, express ones among them."""
        return self.num_slots + self.num_express


def choose_limits(
    config: EngineConfig,
    context_length: int,
    tokens_per_block: int,
    token_bytes: int,
    device_bytes: int | None = None,
    room_bytes: int | None = None,
) -> Limits:
    """Return the limits of the configuration, lowered to what the model and the memory allow.

    `token_bytes` is the size of the keys and values of one token. `device_bytes` is the memory of
    an accelerator, which gives each slot its memory at the load. The memory of the machine is taken
    only as keys and values are written, and `room_bytes` is what the model leaves of it.
    """
    max_length = _max_length(config, context_length)
    num_slots = config.max_num_sequences or MAX_NUM_SEQUENCES
    num_tokens = config.max_kv_cache_tokens
    if not num_tokens:
        memory_bytes = device_bytes or machine.memory_bytes()
        num_tokens = default_budget(num_slots, max_length, token_bytes, memory_bytes)

    if room_bytes is not None:
        num_tokens = _within_room(config, num_tokens, room_bytes // token_bytes)

    num_cache_tokens = max(num_tokens // tokens_per_block, 1) * tokens_per_block
    if num_cache_tokens < max_length:
        # A longer sequence could wait for room without end.
        log.warning(
            "prompt and answer may have %d tokens together, not the model's %d: the KV cache holds "
            "no more",
            num_cache_tokens,
            max_length,
        )
        max_length = num_cache_tokens

    if device_bytes is None:
        return Limits(
            num_slots,
            max_length,
            num_cache_tokens,
            num_express=num_slots // SLOTS_PER_EXPRESS_PLACE,
        )

    # All slots together take at most a quarter of the accelerator, or what the cache takes.
    num_slot_tokens = max(num_cache_tokens, device_bytes // 4 // token_bytes)
    num_slots = max(1, min(num_slots, num_slot_tokens // max_length))
    return Limits(num_slots, max_length, num_cache_tokens)


def _max_length(config: EngineConfig, context_length: int) -> int:
    """Return the length that the configuration gives a sequence, within the model's context."""
    max_length = config.max_sequence_length or context_length
    if max_length <= context_length:
        return max_length

    log.warning(
        "option.max_model_len=%d is over the model's context: prompt and answer may have %d "
        "tokens together",
        max_length,
        context_length,
    )
    return context_length


def _within_room(config: EngineConfig, num_tokens: int, num_fitting: int) -> int:
    """Return the tokens of a cache for whose memory there is room.

    One that an operator wants larger stays so: its memory is not taken at once.
    """
    if num_tokens <= num_fitting:
        return num_tokens

    if config.max_kv_cache_tokens is None:
        return num_fitting

    log.warning(
        "option.max_kv_cache_tokens=%d is more than fits into memory now, %d: "
        "who finds no memory gets 507",
        num_tokens,
        num_fitting,
    )
    return num_tokens
