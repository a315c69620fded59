"""What comes into an engine and leaves it: requests with plain values, and Responses for those who
wait.

msgspec checks no type when Python builds a request, and a value of a wrong type would fail a step
of all that run in it, or end the engine. So a request is read anew. An integer, a number or a list
of another library, such as numpy, becomes one of Python.
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
    """A request has a value of a wrong type. To a program that uses the library it is a TypeError
    too.
    """


def checked(request: Request) -> Request:
    """Return the request with plain values. Raises WrongType."""
    try:
        return _DECODER.decode(_ENCODER.encode(request))
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise WrongType(f"the request has a value of a wrong type: {error}") from None


def _plain(value: Any) -> object:
    """Return what msgspec can write of a value that it does not know. Raises TypeError."""
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
        # The Responses that wait, by the id of their request.
        self._ready: dict[int, list[Response]] = {}
        # Ids of requests whose final Response was not handed out yet.
        self._unanswered: set[int] = set()
        self._last_id = 0
        # Whether nobody need wait any more, since nothing more is posted.
        self._is_silent = False

        # Who takes all Responses. None: they wait here.
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
                return self._await_any(deadline)

            if isinstance(request_id, int):
                self._check_ids([request_id])
                return self._await_request(request_id, deadline)

            self._check_ids(request_id)
            return [self._await_request(awaited_id, deadline) for awaited_id in request_id]

    def _check_ids(self, request_ids: Sequence[int]) -> None:
        """Raise ValueError for an id that no request has got."""
        for request_id in request_ids:
            if not 1 <= request_id <= self._last_id:
                raise ValueError(
                    f"request_id must be one that enqueue_request gave out, given {request_id}"
                )

    def _await_any(self, deadline: float | None) -> list[Response]:
        self._wait(lambda: self._ready, deadline)
        responses: list[Response] = []
        for request_id in list(self._ready):
            responses += self._hand_out(request_id)

        return responses

    def _await_request(self, request_id: int, deadline: float | None) -> list[Response]:
        def is_ready() -> bool:
            return request_id in self._ready or request_id not in self._unanswered

        self._wait(is_ready, deadline)
        if request_id in self._ready:
            return self._hand_out(request_id)

        if request_id in self._unanswered:
            return []

        message = f"request {request_id} is already finished: its final response was handed out"
        return [Response(request_id, error=ResponseError(message, ErrorKind.INVALID))]

    def _wait(self, is_ready: Callable[[], object], deadline: float | None) -> None:
        time_left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        self._posted.wait_for(lambda: is_ready() or self._is_silent, time_left_s)

    def _hand_out(self, request_id: int) -> list[Response]:
        responses = self._ready.pop(request_id)
        if responses[-1].is_final:
            self._unanswered.discard(request_id)

        return responses

    # For the engine.

    def _new_id(self) -> int:
        """Return the id of a new request, from which on Responses may be awaited."""
        with self._posted:
            self._last_id += 1
            self._unanswered.add(self._last_id)
            return self._last_id

    def _post(self, responses: list[Response]) -> None:
        """Pass Responses on, or let them wait here if nobody takes them."""
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
