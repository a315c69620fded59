"""A further node of an engine that spans several machines. Its ranks get their work from node 0."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence

from lmi.errors import Unavailable
from lmi.executor import EngineInfo, Executor, IterationStats, Request, RequestStatsPerIteration, Response


class Follower(Executor):
    """An executor that takes no requests. It serves until `shutdown`, or until its node can do no work any more."""

    def __init__(self, info: EngineInfo, node_rank: int, num_nodes: int, leader: str) -> None:
        self._info = info
        self._is_closing = threading.Event()
        self._refusal = f"this is node {node_rank} of {num_nodes} and takes no requests; node 0, {leader}, does"

    @property
    def info(self) -> EngineInfo:
        return self._info

    def enqueue_request(self, request: Request) -> int:
        raise Unavailable(self._refusal)

    def await_responses(
        self, request_id: int | Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Response] | list[list[Response]]:
        self._is_closing.wait(timeout_s)
        return []

    def get_num_responses_ready(self, request_id: int | None = None) -> int:
        return 0

    def cancel_request(self, request_id: int) -> None:
        return None

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        return []

    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]:
        return []

    @abstractmethod
    def can_enqueue_requests(self) -> bool:
        """Whether this node can do its part. Requests are refused in any case."""
