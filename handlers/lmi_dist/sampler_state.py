"""What the sampler keeps of one sequence from step to step."""

from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from handlers.lmi_dist.logits_rules import LogitsRules


class SamplerState(Struct, frozen=True):
    """The parameters of a sequence's rows, the same in every step, and the rules of its request."""

    # The bytes of one record of ROW_PARAMS.
    params: bytes
    # How many of the best tokens its Results list.
    num_top: int
    rules: LogitsRules | None

    def fork(self) -> Self:
        """Return the state of another sequence with the same tokens."""
        return replace(self, rules=self.rules and self.rules.fork())
