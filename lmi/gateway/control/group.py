"""The instances of one container definition: those of a variant, or the copies of a component."""

import asyncio
import uuid
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import orjson

from lmi.gateway.aws_endpoint import EndpointState
from lmi.gateway.container import Container, ContainerFault, Unreachable
from lmi.gateway.control.definition import Definitions, Launch
from lmi.gateway.control.instance import Instance, InstanceFailed
from lmi.gateway.control.service_model import Members
from lmi.gateway.control.strategy import LeastOutstanding, Strategy
from lmi.gateway.errors import AwsError, unavailable
from lmi.gateway.model_store import LoadFailed
from lmi.gateway.request_prefix import RequestPrefix
from lmi.gateway.threads import run_in_thread

# SageMaker's, where a configuration names no other.
STARTUP_TIMEOUT_S = 480
ADAPTER_TIMEOUT_S = 300.0


class Capacity:
    """How many instances may run, and how many are taken."""

    def __init__(self, max_instances: int) -> None:
        self._max_instances = max_instances
        self._num_taken = 0

    def check(self, num: int) -> None:
        """Raise AwsError if so many further ones are too many."""
        if self._num_taken + num > self._max_instances:
            raise AwsError(
                "ResourceLimitExceeded",
                400,
                f"The limit of containers at this gateway is {self._max_instances} "
                f"(--max-containers), with current utilization of {self._num_taken} and a request "
                f"delta of {num}.",
            )

    def take(self, num: int) -> None:
        """Take so many, or give back where it is negative. Raises AwsError if there is no room."""
        if num > 0:
            self.check(num)

        self._num_taken += num


class InstanceGroup:
    """`num` instances of a container. Raises AwsError if the gateway has no room for them."""

    def __init__(
        self,
        definitions: Definitions,
        capacity: Capacity,
        container: Members,
        num: int,
        log_name: str,
        timeout_s: float = STARTUP_TIMEOUT_S,
    ) -> None:
        capacity.take(num)

        self.container = container
        self._definitions = definitions
        self._capacity = capacity
        self._num_reserved = num
        self._timeout_s = timeout_s
        self._log_file = definitions.folder / "logs" / log_name

        self._launch: Launch | None = None
        self._instances: list[Instance] = []
        self._is_changing = asyncio.Lock()
        # The folders of adapters that each container has, by name.
        self._adapters: dict[str, Path] = {}

    @property
    def num_ready(self) -> int:
        return sum(instance.is_ready for instance in self._instances)

    def reserve(self, num: int) -> None:
        """Reserve room for as many instances as `settle` is to start. Raises AwsError."""
        self._capacity.take(num - self._num_reserved)
        self._num_reserved = num

    async def settle(self) -> None:
        """Start or end instances until there are as many as are reserved.

        Raises InstanceFailed if one does not start. Those that it has started have ended then.
        """
        async with self._is_changing:
            num_missing = self._num_reserved - len(self._instances)
            if num_missing < 0:
                surplus = self._instances[num_missing:]
                del self._instances[num_missing:]
                await _stop(surplus)
            elif num_missing:
                await self._start(num_missing)

    async def stop(self) -> None:
        """End all instances, each after its requests."""
        instances = self._instances
        self._instances = []
        try:
            await _stop(instances)
        finally:
            self._capacity.take(-self._num_reserved)
            self._num_reserved = 0

    def pick(self, strategy: Strategy, prefix: RequestPrefix | None) -> Instance:
        """Return the instance that a strategy chooses for a request that begins so. Raises
        Unreachable if none is ready.
        """
        ready = {}
        for number, instance in enumerate(self._instances):
            if instance.is_ready:
                ready[number] = instance

        if not ready:
            raise Unreachable("no container is ready")

        return strategy.choose(ready, prefix)

    async def add_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter in every container, also in later ones. Raises InstanceFailed."""
        async with self._is_changing:
            self._adapters[name] = folder
            try:
                for instance in self._ready():
                    await _load(instance.container, name, folder)
            except InstanceFailed:
                del self._adapters[name]
                raise

    async def remove_adapter(self, name: str) -> None:
        """Unload an adapter in every container. One that is lost has it no more."""
        async with self._is_changing:
            self._adapters.pop(name, None)
            for instance in self._ready():
                with suppress(ContainerFault):
                    call = instance.container.call(
                        "DELETE", f"/adapters/{name}", timeout_s=ADAPTER_TIMEOUT_S
                    )
                    async with call as response:
                        await response.read()

    def _ready(self) -> list[Instance]:
        return [instance for instance in self._instances if instance.is_ready]

    async def _prepare(self, container: Container) -> None:
        """Load what each container of the group has."""
        for name, folder in self._adapters.items():
            await _load(container, name, folder)

    async def _start(self, num: int) -> None:
        if self._launch is None:
            self._launch = await self._bring()

        instances = []
        for _ in range(num):
            log_file = self._log_file.with_name(f"{self._log_file.name}-{uuid.uuid4().hex[:8]}.log")
            instances.append(Instance(self._launch, log_file, self._timeout_s, self._prepare))

        # Those that were ready first must not wait for one that never is.
        starts = [asyncio.create_task(instance.start()) for instance in instances]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()

            await asyncio.gather(*starts, return_exceptions=True)
            await _stop(instances)
            raise

        self._instances += instances

    async def _bring(self) -> Launch:
        """Bring the model's files, and return how the container is started."""
        try:
            return await run_in_thread(self._definitions.launch, self.container)
        except (AwsError, LoadFailed, OSError) as error:
            raise InstanceFailed(str(error)) from error


class GroupContainer:
    """What requests call: the container of a group that is found anew for each, so that one which
    waited meets the instances that are there by then.
    """

    def __init__(
        self, url: str, find: Callable[[], InstanceGroup], status: str, strategy: Strategy
    ) -> None:
        self.url = url
        self._find = find
        self._status = status
        self._strategy = strategy

    async def check_was_ready(self) -> None:
        """Raise AwsError if no instance is ready."""
        try:
            self._find().pick(LeastOutstanding(), None)
        except Unreachable as fault:
            raise unavailable(f"{self.url}: {fault}") from None

    async def state(self) -> EndpointState:
        """Return the state of the endpoint."""
        return EndpointState(self._status)

    def lease(self, prefix: RequestPrefix | None = None) -> AbstractContextManager[Container]:
        """Lease the container of the instance that the strategy chooses. Raises Unreachable if none
        is ready.
        """
        return self._find().pick(self._strategy, prefix).lease()


async def _load(container: Container, name: str, folder: Path) -> None:
    """Load an adapter in one container. Raises InstanceFailed."""
    body = orjson.dumps({"name": name, "src": str(folder)})
    headers = [("Content-Type", "application/json")]
    call = container.call("POST", "/adapters", headers, body, ADAPTER_TIMEOUT_S)
    try:
        async with call as response:
            text = (await response.read()).decode(errors="replace")
    except ContainerFault as fault:
        raise InstanceFailed(str(fault)) from fault

    if response.status != 200:
        raise InstanceFailed(f"The container answered {response.status}: {text.strip()}")


async def _stop(instances: Iterable[Instance]) -> None:
    await asyncio.gather(*(instance.stop() for instance in instances))
