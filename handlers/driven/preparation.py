"""What a sequence needs before a foreign engine gets it, made beside the steps: a guide, pixels."""

from abc import abstractmethod
from concurrent.futures import Future
from typing import ClassVar, TypeVar

from handlers.base.sequence import Sequence
from handlers.base.waiting import Waiting

T = TypeVar("T")


class Preparation(Waiting[Sequence, T]):
    """Makes the product that a sequence needs before it is added to the engine, on a thread of its
    own. Until then the sequence waits.
    """

    # Whether the products are guides. An engine whose sequences wait for one makes no step, and is
    # not taken for one that hangs.
    is_of_guides: ClassVar[bool] = False

    @abstractmethod
    def begin(self, sequence: Sequence) -> Future[T] | None:
        """Start to make the product on the other thread, and return its future. Returns None if the
        sequence needs none.
        """

    @abstractmethod
    def equip(self, sequence: Sequence, product: T) -> None:
        """Store the product for a sequence. May raise an LmiError, which ends its request."""

    @abstractmethod
    def close(self) -> None:
        """Stop the thread that makes products."""
