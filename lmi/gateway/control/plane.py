"""All that the control plane of one gateway has: its resources, the lives of its endpoints, and
what the operator allows.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmi.gateway.control.component import ComponentLife
from lmi.gateway.control.definition import Definitions
from lmi.gateway.control.endpoint import EndpointLife
from lmi.gateway.control.group import Capacity
from lmi.gateway.control.life import Lives
from lmi.gateway.control.router import RouterLife
from lmi.gateway.control.store import ControlState
from lmi.gateway.errors import ACCOUNT, invalid as invalid_invocation
from lmi.gateway.stores import Answers


class Plane:
    """The resources in `folder`, and what runs of them. Raises BadConfiguration for a folder that
    cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        buckets: Mapping[str, str],
        images: Sequence[str],
        trusts_models: bool,
        max_containers: int,
        answers: Answers,
    ) -> None:
        self.answers = answers
        self.store = ControlState(folder)
        self.definitions = Definitions(
            folder=folder, buckets=buckets, images=images, trusts_models=trusts_models
        )
        self._capacity = Capacity(max_containers)

        self.endpoints = Lives(self.store.endpoints, self._new_endpoint)
        self.components = Lives(self.store.components, self._new_component)
        self.routers = Lives(self.store.routers, self._new_router)

    def start(self) -> None:
        """Begin to bring back what a former gateway had."""
        self.endpoints.restore()
        self.components.restore()
        self.routers.restore()

    async def close(self) -> None:
        """End all containers."""
        await asyncio.gather(self.endpoints.close(), self.components.close(), self.routers.close())

    def _new_endpoint(self, name: str) -> EndpointLife:
        return EndpointLife(name, self.store.endpoints, self.definitions, self._capacity)

    def _new_component(self, name: str) -> ComponentLife:
        return ComponentLife(
            name, self.store.components, self.definitions, self._capacity, self.components.life
        )

    def _new_router(self, name: str) -> RouterLife:
        return RouterLife(name, self.store.routers, self.definitions)

    # What requests ask for.

    def invoked_component(self, endpoint: str, name: str) -> ComponentLife:
        """Return the life of a component that a request names. Raises AwsError."""
        resource = self.store.components.get(name)
        if resource is None or resource.members["EndpointName"] != endpoint:
            raise invalid_invocation(
                f"Inference Component {name} of endpoint {endpoint} not found."
            )

        return self.components.life(name)

    def invoked(self, name: str) -> EndpointLife:
        """Return the life of an endpoint that a request names. Raises AwsError if there is none."""
        if self.store.endpoints.get(name) is None:
            raise invalid_invocation(f"Endpoint {name} of account {ACCOUNT} not found.")

        return self.endpoints.life(name)
