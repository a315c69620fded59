"""How long the keys and values of a request are kept for later ones."""

from __future__ import annotations

import msgspec

from lmi.executor.checks import check_int

DEFAULT_RETENTION_PRIORITY = 35
MAX_RETENTION_PRIORITY = 100


class TokenRangeRetentionConfig(msgspec.Struct, frozen=True):
    """Of the prompt's tokens from `token_start` up to `token_end`, which is not included; None is the prompt's end.

    Blocks of a lower priority are evicted first. After `duration_ms` without use the priority is the default again;
    None means that it stays.
    """

    token_start: int
    token_end: int | None = None
    priority: int = DEFAULT_RETENTION_PRIORITY
    duration_ms: int | None = None

    def __post_init__(self) -> None:
        check_int("token_start", self.token_start, 0)
        check_int("token_end", self.token_end, self.token_start + 1)
        check_int("priority", self.priority, 0, MAX_RETENTION_PRIORITY)
        check_int("duration_ms", self.duration_ms, 1)


class KvCacheRetentionConfig(msgspec.Struct, frozen=True):
    """Ranges of the prompt, and the priority of what is generated. Upstream's durations are timedeltas."""

    token_range_retention_configs: tuple[TokenRangeRetentionConfig, ...] = ()
    decode_retention_priority: int = DEFAULT_RETENTION_PRIORITY
    decode_duration_ms: int | None = None

    def __post_init__(self) -> None:
        check_int("decode_retention_priority", self.decode_retention_priority, 0, MAX_RETENTION_PRIORITY)
        check_int("decode_duration_ms", self.decode_duration_ms, 1)
        ranges = sorted(self.token_range_retention_configs, key=lambda one: one.token_start)
        for one, later in zip(ranges, ranges[1:], strict=False):
            if one.token_end is None or one.token_end > later.token_start:
                raise ValueError(f"token_range_retention_configs must not overlap, given {one} and {later}")
