"""A model that runs: its processes, and whether it is ready."""

from lmi.runtime import LoadReport, Runtime
from lmi.shared.state import Block, Phase
from lmi.supervisor.child import Child
from lmi.supervisor.code import user_code
from lmi.supervisor.cores import Cores
from lmi.supervisor.kinds import engine


class RunningModel:
    """The processes of a model: engines or user code, and formatters.

    This is the model of a server that has only one: if it fails, the server ends. Where models are
    loaded and unloaded, `models/follower.py` has a subclass.
    """

    def __init__(self, runtime: Runtime, cores: Cores | None = None, held_bytes: int = 0) -> None:
        """`cores` are those that its processes are bound to, `held_bytes` is the memory that front
        ends have already.
        """
        self.runtime = runtime
        self.config = runtime.config
        self.block = runtime.attach()
        self.children = of_model(runtime, self.block, cores, held_bytes)
        self._enter(Phase.LOADING)

    @property
    def is_ready(self) -> bool:
        """Whether the model can give its first answer."""
        has_formatters = all(record.phase == Phase.READY for record in self.block.formatters)
        return has_formatters and any(record.phase == Phase.READY for record in self.block.engines)

    def report(self) -> LoadReport:
        """Return the report that an engine wrote when it had loaded. One must be ready."""
        ready_slots = (
            slot for slot, record in enumerate(self.block.engines) if record.phase == Phase.READY
        )
        return self.runtime.read_report(next(ready_slots))

    def look(self, now: float) -> None:
        """Take the next step of the model's life: note that it is ready, once it is."""
        if self._phase == Phase.LOADING and self.is_ready:
            self._enter(Phase.READY)

    def give_up(self, reason: str, now: float) -> bool:
        """End its processes after a failure. Returns False if the server ends with it."""
        return False

    @property
    def _phase(self) -> int:
        return self.block.supervisor.phase

    def _enter(self, phase: Phase, reason: str = "") -> None:
        self.block.supervisor.reason = reason
        self.block.supervisor.phase = phase


def of_model(
    runtime: Runtime, block: Block, cores: Cores | None = None, held_bytes: int = 0
) -> list[Child]:
    """Return the children of one model, for RunningModel."""
    kind_of_code = user_code(runtime, cores)
    kind_of_replicas = kind_of_code
    if not runtime.config.is_user_code:
        kind_of_replicas = engine(runtime, cores, held_bytes)

    children: list[Child] = []
    for slot, record in enumerate(block.engines):
        replica = Child(kind_of_replicas, slot, record)
        replica.others = [other for other in block.engines if other is not record]
        children.append(replica)

    for slot, record in enumerate(block.formatters):
        children.append(Child(kind_of_code, slot, record))

    return children
