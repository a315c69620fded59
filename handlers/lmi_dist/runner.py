"""The interface of a runner, which computes a step. No torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from handlers.lmi_dist.arrays import Array
    from handlers.lmi_dist.kv_cache import Slots
    from handlers.lmi_dist.lora import AnyLoader
    from handlers.lmi_dist.plan import Plan
    from handlers.lmi_dist.pooling import Pooling


class BlockMemory(Protocol):
    """The memory of a runner that reads blocks: it takes what it writes, when it first
    writes it.
    """

    block_bytes: int

    def step_bytes(self, num_rows: int, num_logits: int) -> int:
        """The bytes of the activations in a step of so many rows, of which so many have logits."""

    def give_back(self, blocks: SequenceOf[int]) -> None:
        """Give the memory of blocks that nobody uses back to the system."""


class Runner(Protocol):
    """Not safe to call from two threads at once."""

    vocab_size: int
    context_length: int
    # The dtype of the weights.
    dtype: str
    device: str
    # What computes: "torch", or "native" and the kind of CPU that the library is for.
    kernels: str
    # Whether a token gets the same bits in every batch, and however its prompt was cut.
    is_batch_invariant: bool
    tokens_per_block: int
    # None if the runner was made without adapters.
    adapters: AnyLoader | None
    # Of an embedding model, which gives hidden states (num_logits, size) in place of logits.
    pooling: Pooling | None

    @property
    def slots(self) -> Slots | None:
        """Where keys and values lie. None: in the blocks of a chunk's table."""

    @property
    def memory(self) -> BlockMemory | None:
        """What the engine must know to keep it within what the machine has.

        None: it is taken at the load.
        """

    @property
    def weight_bytes(self) -> int | None:
        """The memory of the weights, None if it does not know."""

    def forward(self, plan: Plan) -> Array:
        """Logits in the host's memory, float32 (num_logits, vocab), valid until the next call.

        They are in the order of the chunks and of the wanted positions of each chunk.
        """

    def output(self, name: str) -> Array:
        """The rows of a declared output in the last step, float32 (num_logits, …), valid until the
        next step.

        They are of the same positions as the logits.
        """
