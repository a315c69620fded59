"""What comes into an engine and leaves it: requests with plain values, and Responses for those who
wait.

msgspec checks no type when Python builds a request, and a value of a wrong type would fail a step
of all that run in it, or end the engine. What counts as an integer, a number or a list, as numpy's
do, becomes a plain one.
"""

import operator
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lmi.errors import InvalidRequest
from lmi.executor import ErrorKind, Executor, Request, Response, ResponseError


class WrongType(InvalidRequest, TypeError):
    """A request has a value of a wrong type. For a program that uses the library it is a TypeError
    too.
    """


def checked(request: Request) -> Request:
    """The request with plain values. Raises WrongType."""
    try:
        return _DECODER.decode(_ENCODER.encode(request))
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise WrongType(f"the request has a value of a wrong type: {error}") from None


def _plain(value: Any) -> object:
    """What msgspec can write of a value that it does not know. Raises TypeError."""
    if hasattr(value, "__iter__"):
        return list(value)

    if hasattr(value, "__index__"):
        return operator.index(value)

    return float(value)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_DECODER = msgspec.msgpack.Decoder(Request)


class Mailbox(Executor):
    """The part of an Executor from a Response to those who wait for it."""

    def __init__(self) -> None:
        # It guards the next four fields.
        self._posted = threading.Condition()
        self._ready: dict[int, list[Response]] = {}
        # Ids of requests whose final Response was not handed out yet.
        self._unanswered: set[int] = set()
        self._last_id = 0
        self._is_silent = False
        self._pass_on: Callable[[list[Response]], None] | None = None

    def pass_responses_to(self, take: Callable[[list[Response]], None]) -> None:
        """Hand all further Responses to `take`: see `Executor`."""
        self._pass_on = take

    def get_num_responses_ready(self, request_id: int | None = None) -> int:
        """Return how many Responses wait, of one request or of all."""
        with self._posted:
            if request_id is None:
                return sum(map(len, self._ready.values()))

            return len(self._ready.get(request_id, ()))

    def await_responses(
        self, request_id: int | Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Response] | list[list[Response]]:
        """Return the Responses that are ready, and wait for the first: see `Executor`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._posted:
            if request_id is None:
                self._wait(lambda: self._ready, deadline)
                responses: list[Response] = []
                for ready_id in list(self._ready):
                    responses += self._hand_out(ready_id)

                return responses

            is_single = isinstance(request_id, int)
            ids = [request_id] if isinstance(request_id, int) else request_id
            for id in ids:
                if not 1 <= id <= self._last_id:
                    raise ValueError(
                        f"request_id must be one that enqueue_request gave out, given {id}"
                    )

            batches = [self._await_one(id, deadline) for id in ids]
            return batches[0] if is_single else batches

    def _await_one(self, request_id: int, deadline: float | None) -> list[Response]:
        self._wait(
            lambda: request_id in self._ready or request_id not in self._unanswered, deadline
        )
        if request_id in self._ready:
            return self._hand_out(request_id)

        if request_id in self._unanswered:
            return []

        message = f"request {request_id} is already finished: its final response was handed out"
        return [Response(request_id, error=ResponseError(message, ErrorKind.INVALID))]

    def _wait(self, is_ready: Callable[[], object], deadline: float | None) -> None:
        time_left = None if deadline is None else max(0.0, deadline - time.monotonic())
        self._posted.wait_for(lambda: is_ready() or self._is_silent, time_left)

    def _hand_out(self, request_id: int) -> list[Response]:
        batch = self._ready.pop(request_id)
        if batch[-1].is_final:
            self._unanswered.discard(request_id)

        return batch

    # For the engine.

    def _new_id(self) -> int:
        with self._posted:
            self._last_id += 1
            self._unanswered.add(self._last_id)
            return self._last_id

    def _post(self, responses: list[Response]) -> None:
        with self._posted:
            if self._pass_on is None:
                for response in responses:
                    self._ready.setdefault(response.request_id, []).append(response)

                self._posted.notify_all()
                return

            for response in responses:
                if response.is_final:
                    self._unanswered.discard(response.request_id)

        self._pass_on(responses)

    def _end_waiting(self) -> None:
        """Let each `await_responses`, under way or later, return the Responses that are ready."""
        with self._posted:
            self._is_silent = True
            self._posted.notify_all()
