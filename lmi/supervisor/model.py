"""One model and its processes, from their load to their end. Front ends read in its block what becomes of it.

When its processes have ended, its folder is removed, which shows front ends that it is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterable
from itertools import chain

from lmi.runtime import ENVIRONMENT_NAME, LoadReport, Runtime
from lmi.shared import linux
from lmi.shared.cores import Cores
from lmi.shared.desired_state import Model, State
from lmi.shared.state import Phase
from lmi.supervisor import kinds
from lmi.supervisor.child import Child

UNLOAD_S = 30.0  # for requests that run when their model is unloaded
NOTICE_S = 0.2  # for a request that a front end took just before it saw that the model is gone
KILL_S = 3.0  # for a process that was told to end

log = logging.getLogger(__name__)


class RunningModel:
    """One model, from its load to the end of its processes: its engines or its user code, and its formatters."""

    def __init__(self, runtime: Runtime, cores: Cores | None = None, first: Child | None = None) -> None:
        """Its processes start on `cores`, and after the child `first` is done."""
        self.runtime = runtime
        self.config = runtime.config
        self.block = runtime.attach()
        self.children = kinds.of_model(runtime, self.block, cores)
        self.groups: set[int] = set()  # of its processes that were told to end
        self._strays: set[int] = set()  # that those processes started, also in sessions of their own
        self._started_s = time.monotonic()
        self._unwanted_s: float | None = None  # when its entry was gone
        self._ended_s: float | None = None  # when its processes were told to end
        for child in self.children:
            child.waits_for = first
        if first is not None:
            self.children.insert(0, first)
        for child in () if self.ends_server else self.children:
            child.name = f"{child.name} of {self.config.model.name}"
        self._enter(Phase.LOADING)

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

    def report(self) -> LoadReport:
        slot = next(slot for slot, record in enumerate(self.block.engines) if record.phase == Phase.READY)
        return self.runtime.read_report(slot)

    def entry(self) -> Model:
        """Return the entry that says to the front ends that this model is here."""
        return Model(name=self.config.model.name, state=State.READY, folder=self.runtime.path.name)

    def look(self, now: float, *, is_wanted: bool) -> None:
        if not is_wanted and self._unwanted_s is None:
            self._unwanted_s = now
            self._retire()
        if self._ended_s is not None:
            self._kill_late(now)
        elif self._unwanted_s is not None:
            self._end_when_idle(self._unwanted_s, now)
        elif self._phase == Phase.LOADING and self.is_ready:
            if not self.ends_server:
                log.info("model %s is ready after %.1f s", self.config.model.name, now - self._started_s)
            self._enter(Phase.READY)

    def fail(self, reason: str, now: float) -> None:
        """Give the model up. The others and the server go on."""
        log.error("model %s failed: %s", self.config.model.name, reason)
        self._enter(Phase.FAILED, reason)
        self._end(now)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left of it: no process, no process that one of its processes started, and no entry."""
        is_ended = self._ended_s is not None and not any(child.pid for child in self.children)
        return is_ended and self._unwanted_s is not None and not self.groups and not self._strays

    def close(self) -> None:
        """Remove its folder. Front ends see by this that the model is gone."""
        for child in self.children:
            child.close()
        self.runtime.remove()
        log.info("model %s is unloaded", self.config.model.name)

    @property
    def _phase(self) -> int:
        return self.block.supervisor.phase

    def _enter(self, phase: Phase, reason: str = "") -> None:
        self.block.supervisor.reason = reason
        self.block.supervisor.phase = phase

    def _retire(self) -> None:
        for child in self.children:
            child.is_retired = True

    def _end_when_idle(self, since_s: float, now: float) -> None:
        """End the processes when no front end has a request for them, or after UNLOAD_S."""
        using = [record for record in self.block.frontends if record.pid and linux.is_alive(record.pid)]
        is_idle = now - since_s >= NOTICE_S and not any(record.num_in_flight for record in using)
        if is_idle or self._phase != Phase.READY or now - since_s >= UNLOAD_S:
            self._end(now)

    def _end(self, now: float) -> None:
        self._retire()
        self._ended_s = now
        self.groups = {child.pid for child in self.children if child.pid is not None}
        self._strays = self._find_strays(chain.from_iterable(map(linux.descendants, self.groups)))
        for child in self.children:
            child.send(signal.SIGTERM)

    def _kill_late(self, now: float) -> None:
        assert self._ended_s is not None
        # The system uses the numbers of the others again.
        self.groups = {group for group in self.groups if linux.is_alive(group, is_group=True)}
        self._strays = self._find_strays(self._strays)
        if now - self._ended_s >= KILL_S:
            for child in self.children:
                child.send(signal.SIGKILL)
            for group in self.groups:
                linux.send(group, signal.SIGKILL, to_group=True)
            for pid in self._strays:
                linux.send(pid, signal.SIGKILL)

    def _find_strays(self, known: Iterable[int]) -> set[int]:
        """Return which of the known processes are left, and those whose environment shows that they are the model's."""
        known, variable = set(known), f"{ENVIRONMENT_NAME}={self.runtime.path}"
        ours = linux.descendants(os.getpid())
        return {pid for pid in ours if pid in known or linux.has_variable(pid, variable)}
