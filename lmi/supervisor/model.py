"""The processes of one model while the supervisor runs them."""

from __future__ import annotations

from lmi.runtime import Runtime
from lmi.shared import linux
from lmi.shared.cores import Cores
from lmi.shared.desired_state import Model, State
from lmi.shared.report import LoadReport, read_report
from lmi.shared.state import Phase
from lmi.supervisor import kinds
from lmi.supervisor.stages import Stage


class ModelProcesses:
    """The engines of a model, or its user code, and the processes of its formatters."""

    def __init__(self, runtime: Runtime, cores: Cores | None = None) -> None:
        self.runtime = runtime
        self.config = runtime.config
        self.block = runtime.attach()
        self.children = kinds.of_model(runtime, self.block, cores)

    def install_first(self, stage: Stage | None) -> None:
        """Let the other processes wait for a stage, if there is one."""
        if stage is not None:
            for child in self.children:
                child.waits_for = stage.child
            self.children.insert(0, stage.child)

    @property
    def ends_server(self) -> bool:
        """Whether the server was started for this model: it stays, and its failure ends the server."""
        return not self.config.server.multi_model

    @property
    def is_ready(self) -> bool:
        """Whether the model can give its first answer."""
        formatters = all(record.phase == Phase.READY for record in self.block.formatters)
        return formatters and any(record.phase == Phase.READY for record in self.block.engines)

    @property
    def has_front_end(self) -> bool:
        """Whether a front end has loaded the model's tokenizer."""
        return any(record.pid for record in self.block.frontends)

    @property
    def has_ready_process(self) -> bool:
        return any(child.record is not None and child.record.phase == Phase.READY for child in self.children)

    def num_requests(self) -> int:
        """Return how many requests of living front ends use this model."""
        records = [record for record in self.block.frontends if record.pid and linux.is_alive(record.pid)]
        return sum(record.num_in_flight for record in records)

    def name_children(self) -> None:
        """Add the model's name to the names of its processes, for logs of a server with several models."""
        for child in self.children:
            child.name = f"{child.name} of {self.config.model.name}"

    def report(self) -> LoadReport:
        """Return the report of an engine that is ready."""
        slot = next(slot for slot, record in enumerate(self.block.engines) if record.phase == Phase.READY)
        return read_report(self.runtime.engine_report(slot))

    def entry(self) -> Model:
        """Return the entry that says to the front ends that this model is here."""
        return Model(name=self.config.model.name, state=State.READY, folder=self.runtime.path.name)
