"""What the lives of endpoints, inference components and inference routers have in common: a status
that is kept, and one change at a time.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import msgspec

from lmi.gateway.control.definition import Definitions
from lmi.gateway.control.instance import InstanceFailed
from lmi.gateway.control.resources import DELETING, FAILED, UNDER_WAY, Resource
from lmi.gateway.control.service_model import invalid
from lmi.gateway.control.store import ResourceTable
from lmi.gateway.errors import AwsError

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Resource)
L = TypeVar("L", bound="ResourceLife[Any]")


class ResourceLife(ABC, Generic[R]):
    """The life of the resource that has this name in the table."""

    def __init__(self, name: str, table: ResourceTable[R], definitions: Definitions) -> None:
        self.name = name
        self._table = table
        self._definitions = definitions
        self._task: asyncio.Task[None] | None = None

    @property
    def resource(self) -> R:
        resource = self._table.get(self.name)
        assert resource is not None
        return resource

    def delete(self) -> None:
        """Begin to delete the resource. Raises AwsError while it is changed."""
        self._check_may_change(is_deletion=True)
        self._accept(DELETING)
        self._begin(self._delete())

    def restore(self) -> None:
        """Begin to bring the resource back that a former gateway had."""
        status = self.resource.status
        if status == DELETING:
            self._table.remove_soon(self.name)
        elif status != FAILED:
            self._resume(status)

    async def close(self) -> None:
        """End what runs, and leave the resource as it is."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def wait_settled(self) -> None:
        """Return when no change is under way."""
        if self._task is not None:
            await asyncio.wait([self._task])

    @abstractmethod
    async def _end(self) -> None:
        """End what runs, before the resource is deleted."""

    @abstractmethod
    def _resume(self, status: str) -> None:
        """Begin to bring back what had this status when the former gateway ended."""

    async def _delete(self) -> None:
        await self._end()
        self._table.remove_soon(self.name)

    def _check_may_change(self, *, is_deletion: bool = False) -> None:
        """Raise AwsError while a change is under way, and after a failure, where only a deletion
        is left.
        """
        resource = self.resource
        if resource.status in UNDER_WAY:
            raise self._table.kind.in_progress(resource.arn)

        if resource.status == FAILED and not is_deletion:
            words = self._table.kind.words
            raise invalid(f'Cannot update failed {words} "{resource.arn}": only delete it.')

    def _accept(self, status: str, **changes: Any) -> None:
        """Keep the status with which a client's change begins. Raises AwsError if it cannot be
        written.
        """
        self._table.put(self._changed(status, "", changes))

    def _note(self, status: str, failure_reason: str = "", **changes: Any) -> None:
        """Keep the status that a change has led to, also on a full disk."""
        self._table.put_soon(self._changed(status, failure_reason, changes))

    def _changed(self, status: str, failure_reason: str, changes: dict[str, Any]) -> R:
        """Return the resource with a new status. The reason is without paths of this machine."""
        log.info("%s %s is %s", self._table.kind.words, self.name, status)
        return msgspec.structs.replace(
            self.resource,
            status=status,
            failure_reason=self._definitions.without_paths(failure_reason),
            modified_s=time.time(),
            **changes,
        )

    def _begin(self, change: Coroutine[Any, Any, None]) -> None:
        """Let a change go on by itself. The resource fails if it does."""
        self._task = asyncio.create_task(self._run(change))

    async def _run(self, change: Coroutine[Any, Any, None]) -> None:
        words = self._table.kind.words
        try:
            await change
        except (AwsError, InstanceFailed) as error:
            log.warning("%s %s failed: %s", words, self.name, error)
            self._note(FAILED, str(error))
        except Exception as error:
            log.exception("%s %s failed in the gateway", words, self.name)
            self._note(FAILED, f"The gateway failed: {error}")


class Lives(Generic[L]):
    """The lives of all resources of a table."""

    def __init__(self, table: ResourceTable[Any], new_life: Callable[[str], L]) -> None:
        self._table = table
        self._new_life = new_life
        self._by_name: dict[str, L] = {}

    def life(self, name: str) -> L:
        """Return the life of a resource, a new one for a name that has none."""
        if name not in self._by_name or self._table.get(name) is None:
            self._by_name[name] = self._new_life(name)

        return self._by_name[name]

    def restore(self) -> None:
        """Begin to bring back what a former gateway had."""
        for resource in self._table:
            self.life(resource.name).restore()

    async def close(self) -> None:
        """End what runs."""
        await asyncio.gather(*(life.close() for life in self._by_name.values()))
