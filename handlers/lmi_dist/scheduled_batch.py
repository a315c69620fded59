"""What the scheduler gives the executor: the plan of one step, and whose it is."""

from collections.abc import Iterator

from msgspec import Struct

from handlers.lmi_dist.plan import Chunk, Plan
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.executor import SpecDecodingStats


class Batch(Struct):
    """The plan of one step, and the sequence of each chunk and its first row of the logits,
    parallel to `plan.chunks`.

    `followers` maps each sequence whose prompt is complete in this step to those that get a copy of
    it and draw from its logits. The decodes of a search are rows of its beams. The `failed` found
    no room in the whole cache, or may not run at all.
    """

    plan: Plan
    sequences: list[EmbeddedSequence]
    rows: list[int]
    followers: dict[EmbeddedSequence, list[EmbeddedSequence]]
    failed: list[EmbeddedSequence]
    num_preemptions: int = 0
    num_reused_tokens: int = 0
    drafts: SpecDecodingStats | None = None

    @property
    def decoding(self) -> list[EmbeddedSequence]:
        """The sequences that decode, parallel to the decodes of the plan."""
        return self.sequences[: len(self.plan.decodes)]

    def prefilling(self) -> Iterator[tuple[Chunk, EmbeddedSequence, int]]:
        """Each chunk of a prompt with its sequence and its first row of the logits."""
        first = len(self.plan.decodes)
        return zip(self.plan.prefills, self.sequences[first:], self.rows[first:], strict=True)
