"""The options of adapters, which have vLLM's names. This module imports none of the engine's libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmi.errors import BadConfiguration
from lmi.settings.kinds import BOOLEAN, Kind, integer

KINDS: dict[str, Kind] = {
    "enable_lora": BOOLEAN,
    "max_loras": integer(1, 1024),
    "max_lora_rank": integer(1, 1024),
    "max_cpu_loras": integer(1),
}


@dataclass(frozen=True)
class LoraLimits:
    max_in_batch: int = 4  # adapters that the running sequences use together
    max_rank: int = 16
    max_in_memory: int | None = None  # adapters whose weights stay; None: all that are loaded

    @staticmethod
    def of(options: Mapping[str, str]) -> LoraLimits | None:
        """The limits that the options of an engine give, or None if they do not enable adapters.

        Raises BadConfiguration with a line for each fault.
        """
        values: dict[str, Any] = {}
        faults = []
        for name in KINDS.keys() & options.keys():
            try:
                values[name] = KINDS[name].parse(options[name])
            except ValueError:
                faults.append(f"option.{name}={options[name]}: allowed is {KINDS[name].allowed}")
        if faults:
            raise BadConfiguration("\n".join(sorted(faults)))
        return _limits(values) if values.get("enable_lora") else None


def _limits(values: Mapping[str, int]) -> LoraLimits:
    num_each = values.get("max_loras", LoraLimits.max_in_batch)
    num_kept = values.get("max_cpu_loras")
    if num_kept is not None and num_kept < num_each:
        raise BadConfiguration(f"option.max_cpu_loras={num_kept}: allowed is at least option.max_loras, {num_each}")
    return LoraLimits(num_each, values.get("max_lora_rank", LoraLimits.max_rank), num_kept)
