"""What serves an endpoint: the groups of instances of one deployment, by variant."""

import asyncio
import random
from collections.abc import Iterable

from lmi.gateway.control.definition import Definitions
from lmi.gateway.control.group import STARTUP_TIMEOUT_S, Capacity, InstanceGroup
from lmi.gateway.control.instance import InstanceFailed
from lmi.gateway.control.resources import Deployment, VariantSize
from lmi.gateway.control.service_model import Members
from lmi.gateway.errors import cut

MAX_REASON_CHARS = 1024


class Fleet:
    """The instances of a deployment. Raises AwsError if the gateway has no room for them."""

    def __init__(
        self, endpoint: str, deployment: Deployment, definitions: Definitions, capacity: Capacity
    ) -> None:
        self.sizes = dict(deployment.sizes)
        self.variants: dict[str, Members] = {}
        for variant in deployment.config["ProductionVariants"]:
            self.variants[variant["VariantName"]] = variant

        num_instances = 0
        for name in deployment.containers:
            num_instances += self.sizes[name].num_instances

        capacity.check(num_instances)
        self.groups: dict[str, InstanceGroup] = {}
        for name, container in deployment.containers.items():
            self.groups[name] = InstanceGroup(
                definitions,
                capacity,
                container,
                self.sizes[name].num_instances,
                f"{endpoint}/{name}",
                startup_timeout_s(self.variants[name]),
            )

    async def start(self) -> None:
        """Return when all instances serve. Raises InstanceFailed, and none is left then."""
        try:
            await self._settle()
        except BaseException:
            await self.stop()
            raise

    async def resize(self, sizes: dict[str, VariantSize]) -> None:
        """Start or end instances until the variants have their sizes. Raises InstanceFailed."""
        await self._settle()
        self.sizes = sizes

    def reserve(self, sizes: dict[str, VariantSize]) -> None:
        """Reserve room for sizes, or for none. Raises AwsError."""
        done: list[str] = []
        try:
            for name, group in self.groups.items():
                group.reserve(sizes[name].num_instances)
                done.append(name)
        except BaseException:
            for name in done:
                self.groups[name].reserve(self.sizes[name].num_instances)

            raise

    def release(self) -> None:
        """Give back the room of a fleet that was never started."""
        for group in self.groups.values():
            group.reserve(0)

    async def stop(self) -> None:
        """End all instances, after their requests."""
        await asyncio.gather(*(group.stop() for group in self.groups.values()))

    def choose(self) -> str | None:
        """Return a variant by chance, by their weights, or None where none has traffic."""
        names = list(self.groups)
        weights = [self.sizes[name].weight for name in names]
        if sum(weights) <= 0:
            return None

        return random.choices(names, weights)[0]

    async def _settle(self) -> None:
        names = list(self.groups)
        results = await asyncio.gather(
            *(group.settle() for group in self.groups.values()), return_exceptions=True
        )
        for name, result in zip(names, results, strict=True):
            if isinstance(result, InstanceFailed):
                raise InstanceFailed(not_healthy(f"production variant {name}", str(result)))

            if isinstance(result, BaseException):
                raise result


def startup_timeout_s(settings: Members) -> float:
    """Return how long a container may take until it serves, its files included."""
    total_s = settings.get("ContainerStartupHealthCheckTimeoutInSeconds", STARTUP_TIMEOUT_S)
    return float(total_s)


def not_healthy(whose: str, reason: str) -> str:
    """Return AWS's reason of a failure, with what the container said."""
    return cut(
        f"The primary container for {whose} did not pass the ping health check. {reason}",
        MAX_REASON_CHARS,
    )


def sizes_of(variants: Iterable[Members]) -> dict[str, VariantSize]:
    """Return the sizes that a configuration gives to its variants."""
    sizes = {}
    for variant in variants:
        weight = variant.get("InitialVariantWeight", 1.0)
        sizes[variant["VariantName"]] = VariantSize(
            float(weight), variant.get("InitialInstanceCount", 1)
        )

    return sizes
