"""A request as it is sent to an engine, and the memory that its frame takes until then."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct


class PromptOwner(NamedTuple):
    """Whose cached prompts a request may use."""

    adapter: str | None = None
    cache_salt: str | None = None


class FrameMemory(Protocol):
    """Where frames are counted that no engine has begun to answer."""

    def check_room(self, num_before: int, num_after: int) -> None:
        """Raise Overloaded if a frame of `num_before` bytes may not grow to `num_after`."""

    def change(self, num_before: int, num_after: int) -> None:
        """Count a frame of `num_before` bytes that has `num_after` bytes now, 0 at its end."""


class UnlimitedMemory:
    """The memory of who counts no frames."""

    def check_room(self, num_before: int, num_after: int) -> None:
        return

    def change(self, num_before: int, num_after: int) -> None:
        return


class Submission(Struct, eq=False):
    """A request on its way to an engine: its frame, which every engine can read, and what decides
    which engine gets it.
    """

    # It is unique in this front end.
    id: int
    frame: bytes
    # Those of the prompt and of the longest possible answer: what the engine's load grows by.
    num_tokens: int
    num_prompt_tokens: int
    memory: FrameMemory
    owner: PromptOwner = PromptOwner()
    # A key for each whole block of the prompt.
    prefix_keys: Sequence[int] = ()
    # What `memory` counts for this request.
    num_held_bytes: int = 0

    @property
    def adapter(self) -> str | None:
        return self.owner.adapter

    def hold(self) -> None:
        """Count the frame from now on. Raises Overloaded if it has no room."""
        if not self.num_held_bytes:
            self.memory.check_room(0, len(self.frame))
            self.memory.change(0, len(self.frame))
            self.num_held_bytes = len(self.frame)

    def release(self) -> None:
        """Forget the frame: its engine has begun to answer, or nobody waits for that any more."""
        self.frame = b""
        if self.num_held_bytes:
            self.memory.change(self.num_held_bytes, 0)
            self.num_held_bytes = 0
