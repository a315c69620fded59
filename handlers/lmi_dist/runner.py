"""The interface of a runner, which has a model on its device and computes steps."""

from __future__ import annotations

from typing import Protocol

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.lora_loader import AnyLoader
from handlers.lmi_dist.plan import Plan


class Runner(Protocol):
    """Not safe to call from two threads at once."""

    vocab_size: int
    context_length: int
    dtype: str  # of the weights
    device: str
    kernels: str  # what computes: "torch", or "native" and the kind of CPU that the library is for
    is_batch_invariant: bool  # a token gets the same bits in every batch, and however its prompt was cut
    tokens_per_block: int
    shares_blocks: bool  # keys and values lie in the blocks of a chunk's table; otherwise in its slot
    adapters: AnyLoader | None  # None: the runner was made without adapters

    def forward(self, plan: Plan) -> Array:
        """Logits in the host's memory, float32 (num_logits, vocab), valid until the next call.

        They are in the order of the chunks and of the wanted positions of each chunk.
        """

    def output(self, name: str) -> Array | None:
        """The rows of a declared output in the last step, (num_logits, …), for the same positions as the logits.

        They are valid until the next step. None if the model gave no row for each token.
        """

    def copy(self, slot: int, to_slots: list[int], num_tokens: int) -> None:
        """Give other slots the keys and values of the first `num_tokens` of a slot; not called with shared blocks."""

    def release(self, slot: int) -> None:
        """Free a slot whose keys and values are not needed any more."""
