"""How many adapters the embedded engine has, and the options that only it reads, with vLLM's names.

This module imports none of the engine's libraries.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from lmi.errors import BadConfiguration
from lmi.settings.kinds import BOOLEAN, Kind, integer

LORA_KINDS: dict[str, Kind] = {
    "enable_lora": BOOLEAN,
    "max_loras": integer(1, 1024),
    "max_lora_rank": integer(1, 1024),
    "max_cpu_loras": integer(1),
}
# The last is vLLM's name for JSON without spaces.
OWN_KINDS = LORA_KINDS | {"disable_any_whitespace": BOOLEAN}
OWN_KEYS = frozenset(f"option.{name}" for name in OWN_KINDS)


def own_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of OWN_KINDS that are given.

    Raises BadConfiguration with a line for each fault.
    """
    values = {}
    faults = []
    for name in OWN_KINDS.keys() & options.keys():
        try:
            values[name] = OWN_KINDS[name].parse(options[name])
        except ValueError:
            faults.append(f"option.{name}={options[name]}: allowed is {OWN_KINDS[name].allowed}")

    if faults:
        raise BadConfiguration("\n".join(sorted(faults)))

    return values


MAX_IN_BATCH = 4
MAX_RANK = 16


class LoraLimits(Struct, frozen=True):
    """How many adapters there may be, and how large."""

    # Adapters that the running sequences use together.
    max_in_batch: int = MAX_IN_BATCH
    max_rank: int = MAX_RANK
    # Adapters whose weights stay. None: all that are loaded.
    max_in_memory: int | None = None

    @staticmethod
    def of(options: Mapping[str, str]) -> "LoraLimits | None":
        """Return the limits that an engine's options give, or None if they enable no adapters."""
        values = own_options(options)
        if not values.get("enable_lora"):
            return None

        max_in_memory = values.get("max_cpu_loras")
        max_in_batch = MAX_IN_BATCH
        if "max_loras" in values:
            max_in_batch = values["max_loras"]
        elif max_in_memory is not None:
            # A default gives way to an option.
            max_in_batch = min(max_in_batch, max_in_memory)

        if max_in_memory is not None and max_in_memory < max_in_batch:
            raise BadConfiguration(
                f"option.max_cpu_loras={max_in_memory}: "
                f"allowed is at least option.max_loras, {max_in_batch}"
            )

        max_rank = values.get("max_lora_rank", MAX_RANK)
        return LoraLimits(max_in_batch, max_rank, max_in_memory)
