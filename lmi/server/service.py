"""The objects that every route needs: settings, shared state, engines, pipeline and user code of one front end."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lmi.engine.client import Engines
from lmi.engine.registry import AdapterRegistry
from lmi.errors import InvalidParameter, Overloaded, Unavailable, UnknownModel, shorten
from lmi.http.body import BodyMemory
from lmi.ipc.connection import Connections
from lmi.pipeline import Pipeline
from lmi.settings.config import Config, ModelConfig
from lmi.shared.state import Block, FrontEndRecord, Phase
from lmi.types import GenerationRequest
from lmi.user_code.client import UserCodeWorkers

log = logging.getLogger(__name__)

MAX_REPORTED = 1000


@dataclass(slots=True)
class Service:
    config: Config
    block: Block
    record: FrontEndRecord  # of this front end
    engines: Engines | None = None  # engines and pipeline are None if user code answers the requests
    pipeline: Pipeline | None = None
    user_code: UserCodeWorkers | None = None  # if the model has any
    adapters: AdapterRegistry | None = None  # None if the model has no engines
    body_memory: BodyMemory = field(init=False)
    _has_reported_key: bool = False
    _reported: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.body_memory = BodyMemory(self.record, self.config.server.max_body_memory)

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def connections(self) -> list[Connections[Any]]:
        """The connections to the other processes of this server."""
        return [connections for connections in (self.engines, self.user_code) if connections is not None]

    @property
    def is_draining(self) -> bool:
        return self.block.supervisor.phase == Phase.DRAINING

    @property
    def max_in_flight(self) -> int:
        """The most sequences that wait or run, of all front ends together."""
        return self.config.server.job_queue_size + sum(engine.max_num_sequences for engine in self.block.engines)

    def check_model(self, name: str, version: str | None = None) -> None:
        """Raise UnknownModel for a name or version that is not served here. The name `model` is always served."""
        model = self.config.model
        if name not in (model.name, "model", *model.aliases):
            raise UnknownModel(f"no model {shorten(name)} is served here, only {model.name!r}")
        if version is not None and version != model.version:
            raise UnknownModel(f"no version {shorten(version)} of the model is served here, only {model.version!r}")

    def check_room(self, num_sequences: int = 1) -> None:
        """Raise Unavailable while draining, and Overloaded if the queue has no room for `num_sequences` more."""
        if self.is_draining:
            raise Unavailable("the server is shutting down and takes no new requests")
        limit, num_taken = self.max_in_flight, sum(frontend.num_sequences for frontend in self.block.frontends)
        if num_taken + num_sequences > limit:
            what = f"{num_taken} of {limit} sequences are in flight already"
            raise Overloaded(
                f"{what}, there is no room for {num_sequences} more (job_queue_size and the running batch)"
            )

    def check_sequences(self, requests: Sequence[GenerationRequest]) -> None:
        """Raise InvalidParameter if one body asks for more sequences than it may, or than the queue can ever hold."""
        limit, reason = self._max_sequences()
        num_prompts, num_each = len(requests), max(request.num_sequences for request in requests)
        if num_prompts > limit:
            raise InvalidParameter("inputs", f"at most {limit} prompts ({reason})", f"{num_prompts} prompts")
        if num_prompts * num_each > limit:
            each = f" for each of {num_prompts} prompts" if num_prompts > 1 else ""
            rule = f"at most {limit // num_prompts}{each}, as best_of ({limit} sequences, {reason})"
            raise InvalidParameter("num_return_sequences", rule, num_each)

    def _max_sequences(self) -> tuple[int, str]:
        """Return the limit for one body, and the reason. The size of the queue is known when every engine is alive."""
        limit = self.config.server.max_request_sequences
        if self.max_in_flight < limit and all(engine.is_alive for engine in self.block.engines):
            return self.max_in_flight, "job_queue_size and the running batch"
        return limit, "max_request_sequences"

    @contextmanager
    def admitted(self, num_sequences: int = 1) -> Iterator[None]:
        """Hold a place for each sequence of a request. Raises Overloaded or Unavailable if not all find room."""
        self.check_room(num_sequences)
        self.record.num_in_flight += 1
        self.record.num_sequences += num_sequences
        try:
            yield
        finally:
            self.record.num_in_flight -= 1
            self.record.num_sequences -= num_sequences

    def report_key(self) -> None:
        """Log once that a client sent an API key, because its owner may believe that the server checks it."""
        if not self._has_reported_key:
            self._has_reported_key = True
            log.warning("a client sent an API key, but this server has no keys and checks nothing: it serves everyone")

    def report_ignored(self, lines: tuple[str, ...], request_id: str) -> None:
        """Log names without effect: a new one as a warning, then for DEBUG, so that a client does not fill the log."""
        for line in lines:
            is_new = line not in self._reported and len(self._reported) < MAX_REPORTED
            log.log(logging.WARNING if is_new else logging.DEBUG, "%s", line, extra={"request_id": request_id})
            if is_new:
                self._reported.add(line)
