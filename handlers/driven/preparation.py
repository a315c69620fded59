"""What a sequence needs before a foreign engine gets it, made beside the steps."""

from abc import abstractmethod
from concurrent.futures import Future
from typing import ClassVar, TypeVar

from handlers.base.sequence import Sequence
from handlers.base.waiting import Waiting

T = TypeVar("T")


class Preparation(Waiting[Sequence, T]):
    """What a sequence needs before it is its turn, and what another thread makes."""

    is_of_guides: ClassVar[bool] = False

    @abstractmethod
    def begin(self, sequence: Sequence) -> Future[T] | None:
        """What becomes of it, or None if the sequence needs nothing."""

    @abstractmethod
    def equip(self, sequence: Sequence, product: T) -> None:
        """Give a sequence what was made for it. May raise an LmiError, which ends its request."""

    @abstractmethod
    def close(self) -> None:
        """End what makes it."""
