"""A model and its processes. Front ends read in its block what becomes of it."""

from collections.abc import Callable

from lmi.runtime import LoadReport, Runtime
from lmi.shared.state import Block, Phase
from lmi.supervisor import kinds
from lmi.supervisor.child import Child


class RunningModel:
    """The processes of one model: its engines or its user code, and its formatters.

    This one stays as long as the server, which was started for it and ends with it.
    """

    def __init__(self, runtime: Runtime, children: Callable[[Runtime, Block], list[Child]] = kinds.of_model) -> None:
        self.runtime = runtime
        self.config = runtime.config
        self.block = runtime.attach()
        self.children = children(runtime, self.block)
        self._enter(Phase.LOADING)

    @property
    def is_ready(self) -> bool:
        """Whether the model can give its first answer."""
        formatters = all(record.phase == Phase.READY for record in self.block.formatters)
        return formatters and any(record.phase == Phase.READY for record in self.block.engines)

    def report(self) -> LoadReport:
        slot = next(slot for slot, record in enumerate(self.block.engines) if record.phase == Phase.READY)
        return self.runtime.read_report(slot)

    def look(self, now: float) -> None:
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
