"""The life of an inference router: created, updated, deleted, and brought back after the gateway
was killed.
"""

import asyncio

import msgspec

from lmi.gateway.control.life import ResourceLife
from lmi.gateway.control.resources import (
    CREATING,
    IN_SERVICE,
    UNDER_WAY,
    UPDATING,
    RouterResource,
)
from lmi.gateway.control.service_model import Members

# How long a change is under way. AWS's takes up to minutes, and clients must wait for it there too.
CHANGE_S = 1.0


class RouterLife(ResourceLife[RouterResource]):
    """One router. Each change returns at once and goes on for a moment."""

    def create(self, resource: RouterResource) -> None:
        """Begin to create the router. Raises AwsError, and nothing is kept then."""
        self._table.add(msgspec.structs.replace(resource, status=CREATING))
        self._begin(self._settle())

    def update(self, targets: list[Members]) -> None:
        """Begin to put other targets in the place of the present ones, which serve until then.
        Raises AwsError.
        """
        self._check_may_change()
        self._accept(UPDATING, next_targets=targets)
        self._begin(self._settle())

    def _resume(self, status: str) -> None:
        if status in UNDER_WAY:
            self._begin(self._settle())

    async def _settle(self) -> None:
        await asyncio.sleep(CHANGE_S)
        resource = self.resource
        targets = resource.next_targets or resource.targets
        self._note(IN_SERVICE, targets=targets, next_targets=None)

    async def _end(self) -> None:
        await asyncio.sleep(CHANGE_S)
