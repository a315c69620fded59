"""What comes into an engine and leaves it: requests with plain values, and Responses for those who wait.

msgspec checks no type when Python builds a request, and a value of a wrong type would fail a step of all that run in
it, or end the engine. What counts as an integer, a number or a list, as numpy's do, becomes a plain one.

A Mailbox gives out request ids, knows which requests still owe a Response, and implements the waiting rules of
`Executor.await_responses` for every engine. Responses posted together become ready together.
"""

import operator
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lmi.errors import InvalidRequest
from lmi.executor import ErrorKind, Request, Response, ResponseError


class WrongType(InvalidRequest, TypeError):
    """A request has a value of a wrong type. For a program that uses the library it is a TypeError too."""


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
    return operator.index(value) if hasattr(value, "__index__") else float(value)


_ENCODER, _DECODER = msgspec.msgpack.Encoder(enc_hook=_plain), msgspec.msgpack.Decoder(Request)


class Mailbox:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: dict[int, list[Response]] = {}
        self._open: set[int] = set()  # ids whose final Response was not handed out yet
        self._last_id = 0
        self._is_closed = False
        self._take: Callable[[list[Response]], None] | None = None

    def open(self) -> int:
        """Give out a new request id."""
        with self._changed:
            self._last_id += 1
            self._open.add(self._last_id)
            return self._last_id

    def pass_on(self, take: Callable[[list[Response]], None]) -> None:
        """Give Responses to `take` from now on, on the thread that posts them. `Mailbox.take` then never sees them."""
        self._take = take

    def post(self, responses: list[Response]) -> None:
        if self._take is not None:
            with self._changed:
                self._open.difference_update(one.request_id for one in responses if one.is_final)
            self._take(responses)
            return
        with self._changed:
            for response in responses:
                self._ready.setdefault(response.request_id, []).append(response)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop waiting: each `take`, under way or later, returns the Responses that are ready."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def num_ready(self, request_id: int | None = None) -> int:
        with self._changed:
            if request_id is not None:
                return len(self._ready.get(request_id, ()))
            return sum(len(responses) for responses in self._ready.values())

    def take(
        self, request_id: int | Sequence[int] | None, timeout_s: float | None
    ) -> list[Response] | list[list[Response]]:
        """See `Executor.await_responses`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            if request_id is None:
                self._wait(lambda: self._ready, deadline)
                return [response for known in list(self._ready) for response in self._hand_out(known)]
            if isinstance(request_id, int):
                return self._take_one(request_id, deadline)
            for one in request_id:
                self._check_known(one)
            return [self._take_one(one, deadline) for one in request_id]

    def _take_one(self, request_id: int, deadline: float | None) -> list[Response]:
        self._check_known(request_id)
        self._wait(lambda: request_id in self._ready or request_id not in self._open, deadline)
        if request_id in self._ready:
            return self._hand_out(request_id)
        if request_id in self._open:
            return []
        message = f"request {request_id} is already finished: its final response was handed out"
        return [Response(request_id, error=ResponseError(message, ErrorKind.INVALID))]

    def _wait(self, is_ready: Callable[[], object], deadline: float | None) -> None:
        time_left = None if deadline is None else max(0.0, deadline - time.monotonic())
        self._changed.wait_for(lambda: is_ready() or self._is_closed, time_left)

    def _hand_out(self, request_id: int) -> list[Response]:
        batch = self._ready.pop(request_id)
        if batch[-1].is_final:
            self._open.discard(request_id)
        return batch

    def _check_known(self, request_id: int) -> None:
        if not 1 <= request_id <= self._last_id:
            raise ValueError(f"request_id must be one that enqueue_request gave out, given {request_id}")
