"""The contract of an engine: enqueue, await, cancel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from lmi.errors import Unsupported
from lmi.executor.info import Capabilities, EngineInfo
from lmi.executor.request import Request
from lmi.executor.response import Response
from lmi.executor.statistics import IterationStats, RequestStatsPerIteration


class Executor(ABC):
    """An engine with one model replica. Every method may be called from any thread.

    Ids are unique and grow. Every accepted request ends with exactly one final Response, be it output, error or
    cancellation. Source: Executor API of TensorRT-LLM.
    """

    @property
    @abstractmethod
    def info(self) -> EngineInfo: ...

    @property
    def capabilities(self) -> Capabilities:
        return self.info.capabilities

    @abstractmethod
    def enqueue_request(self, request: Request) -> int:
        """Accept a request and return its id.

        Raises InvalidParameter or Unsupported for what this engine cannot do, TypeError for a value of a wrong type,
        Overloaded when its queue is full, RuntimeError after shutdown.
        """

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        return [self.enqueue_request(request) for request in requests]

    @abstractmethod
    def await_responses(
        self, request_id: int | Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Response] | list[list[Response]]:
        """Wait until Responses are ready, then take all of them.

        Without an id, it returns Responses of all requests, in order for each. Those of one step become ready together.

        With an id, it returns only Responses of that request. After the final one it returns one error Response that
        says so. An id that was never given out raises ValueError (upstream blocks without end).

        With several ids, it returns one list for each, in their order. `timeout_s` is one limit for all of them.

        After `timeout_s` the list is empty. When the executor shuts down, it returns at once, perhaps an empty list.
        """

    def pass_responses_to(self, take: Callable[[list[Response]], None]) -> bool:
        """Call `take` with the Responses of each step, on the thread that makes them. Use it before the first request.

        Returns False if this engine cannot do it. If it returns True, `take` gets the Responses in the order of
        `await_responses`, which gets no more of them. So no waiting thread takes the interpreter from the thread that
        runs the next step. `take` must neither block nor raise.
        """
        return False

    @abstractmethod
    def get_num_responses_ready(self, request_id: int | None = None) -> int: ...

    @abstractmethod
    def cancel_request(self, request_id: int) -> None:
        """End a request at the next step boundary with a final CANCELLED Result. Ignores unknown and finished ids.

        Raises TypeError for what is no integer.
        """

    @property
    def is_loading_adapter(self) -> bool:
        """Whether the weights of an adapter are read now, while the running requests make no step."""
        return False

    @property
    def is_waiting_for_guides(self) -> bool:
        """Whether every request waits until its guide is compiled, which has a limit, and the engine has no step."""
        return False

    def load_adapter(self, name: str, path: str, *, pinned: bool = False, preload: bool = True) -> None:
        """Let requests use the LoRA adapter in folder `path` as `name`. `info.adapters` then lists it.

        A pinned adapter is never evicted. Without `preload` only its files and rank are checked, and its weights are
        read for its first request. A name that is loaded from this folder is pinned or preloaded if it was not.

        Raises Unsupported if `capabilities.lora` is false, InvalidParameter for a name that is loaded from another
        folder, ModelUnusable with the engine's reason, and OutOfMemory if memory has no room.
        """
        raise Unsupported("lora_config", f"{self.info.name} has no adapters")

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter and free it. Requests that run with it finish.

        Raises Unsupported if `capabilities.lora` is false, UnknownAdapter for a name that is not loaded.
        """
        raise Unsupported("lora_config", f"{self.info.name} has no adapters")

    @abstractmethod
    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Return and remove the statistics of the steps since the last call, oldest first, at most 1000."""

    @abstractmethod
    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]: ...

    @abstractmethod
    def can_enqueue_requests(self) -> bool: ...

    @abstractmethod
    def shutdown(self) -> None:
        """Cancel the remaining requests, end the loop and free the device. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
