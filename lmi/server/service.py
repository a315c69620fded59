"""What every route needs: settings, shared state, engines and the pipeline of one front-end worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lmi.config import Config
from lmi.custom.client import CodeWorkers
from lmi.engine.client import Engines
from lmi.errors import Overloaded, Unavailable, UnknownModel, shorten
from lmi.pipeline import Pipeline
from lmi.server.body import BodyMemory
from lmi.state import Block, FrontEndRecord, Phase

log = logging.getLogger(__name__)

MAX_REPORTED = 1000


@dataclass(slots=True)
class Service:
    config: Config
    block: Block
    record: FrontEndRecord  # this worker's own
    engines: Engines
    pipeline: Pipeline
    code: CodeWorkers | None = None  # where the model comes with code of its own
    body_memory: BodyMemory = field(init=False)
    _reported: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.body_memory = BodyMemory(self.record, self.config.server.max_body_memory)

    @property
    def is_draining(self) -> bool:
        return self.block.supervisor.phase == Phase.DRAINING

    @property
    def max_in_flight(self) -> int:
        """Requests that wait or run, of all front ends together."""
        return self.config.server.job_queue_size + sum(engine.max_num_sequences for engine in self.block.engines)

    def check_model(self, name: str, version: str | None = None) -> None:
        """Raise UnknownModel for what is not served here. The name `model` always answers."""
        model = self.config.model
        if name not in (model.name, "model", *model.aliases):
            raise UnknownModel(f"no model {shorten(name)} is served here, only {model.name!r}")
        if version is not None and version != model.version:
            raise UnknownModel(f"no version {shorten(version)} of the model is served here, only {model.version!r}")

    def check_room(self) -> None:
        """Raise Unavailable while draining and Overloaded when the queue is full."""
        if self.is_draining:
            raise Unavailable("the server is shutting down and takes no new requests")
        limit = self.max_in_flight
        if sum(frontend.num_in_flight for frontend in self.block.frontends) >= limit:
            raise Overloaded(f"{limit} requests are in flight already (job_queue_size and the running batch)")

    @contextmanager
    def admitted(self, num_requests: int = 1) -> Iterator[None]:
        """Hold places among the requests in flight, if there is one: those that come together all enter, or none."""
        self.check_room()
        self.record.num_in_flight += num_requests
        try:
            yield
        finally:
            self.record.num_in_flight -= num_requests

    def report_tolerated(self, lines: tuple[str, ...], request_id: str) -> None:
        """Log what had no effect in a request: loudly the first time, so that a busy client does not fill the log."""
        for line in lines:
            is_new = line not in self._reported and len(self._reported) < MAX_REPORTED
            log.log(logging.WARNING if is_new else logging.DEBUG, "%s", line, extra={"request_id": request_id})
            if is_new:
                self._reported.add(line)
