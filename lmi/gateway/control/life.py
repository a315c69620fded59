"""What the lives of endpoints and of inference components have alike: a status that is kept, and
one change at a time.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

import msgspec

from lmi.gateway.control.definition import Definitions
from lmi.gateway.control.instance import InstanceFailed
from lmi.gateway.control.resources import FAILED, UNDER_WAY, Resource
from lmi.gateway.control.service_model import invalid
from lmi.gateway.control.store import ResourceTable
from lmi.gateway.errors import AwsError

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Resource)


class ResourceLife(Generic[R]):
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

    async def wait_settled(self) -> None:
        """Return when no change is under way."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _end_change(self) -> None:
        """Cancel the change that is under way."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

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
