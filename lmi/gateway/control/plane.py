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
        self._lives: dict[str, EndpointLife] = {}
        self._components: dict[str, ComponentLife] = {}
        self._routers: dict[str, RouterLife] = {}

    def start(self) -> None:
        """Begin to bring back what a former gateway had."""
        for resource in self.store.endpoints:
            self.life(resource.name).restore()

        for component in self.store.components:
            self.component(component.name).restore()

        for router in self.store.routers:
            self.router(router.name).restore()

    async def close(self) -> None:
        """End all containers."""
        await asyncio.gather(
            *(life.close() for life in self._lives.values()),
            *(life.close() for life in self._components.values()),
            *(life.close() for life in self._routers.values()),
        )

    def life(self, name: str) -> EndpointLife:
        """Return the life of an endpoint, a new one for a name that has none."""
        if name not in self._lives or self.store.endpoints.get(name) is None:
            self._lives[name] = EndpointLife(
                name, self.store.endpoints, self.definitions, self._capacity
            )

        return self._lives[name]

    def component(self, name: str) -> ComponentLife:
        """Return the life of a component, a new one for a name that has none."""
        if name not in self._components or self.store.components.get(name) is None:
            self._components[name] = ComponentLife(
                name, self.store.components, self.definitions, self._capacity, self.component
            )

        return self._components[name]

    def router(self, name: str) -> RouterLife:
        """Return the life of an inference router, a new one for a name that has none."""
        if name not in self._routers or self.store.routers.get(name) is None:
            self._routers[name] = RouterLife(name, self.store.routers, self.definitions)

        return self._routers[name]

    def invoked_component(self, endpoint: str, name: str) -> ComponentLife:
        """Return the life of a component that a request names. Raises AwsError."""
        resource = self.store.components.get(name)
        if resource is None or resource.members["EndpointName"] != endpoint:
            raise invalid_invocation(
                f"Inference Component {name} of endpoint {endpoint} not found."
            )

        return self.component(name)

    def invoked(self, name: str) -> EndpointLife:
        """Return the life of an endpoint that a request names. Raises AwsError if there is none."""
        if self.store.endpoints.get(name) is None:
            raise invalid_invocation(f"Endpoint {name} of account {ACCOUNT} not found.")

        return self.life(name)
