"""The front end's side of the sockets to engines: a connection to each engine, and a stream of
Results for each request.

A request is encoded once, into a frame that every engine can read. When an engine is lost, its
requests end with `EngineLost`. A request without a Result may then be sent to another engine, so
its frame is kept until the first Result. A stream that is closed before its end cancels its
request.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import count

from lmi.engine.messages import (
    AdapterOutcome,
    AskStatus,
    Cancel,
    Ready,
    RequestStatus,
    Responses,
    Submit,
    decode_to_front_end,
    encode,
)
from lmi.engine.submission import FrameMemory, PromptOwner, Submission, UnlimitedMemory
from lmi.errors import (
    EngineLost,
    ErrorInfo,
    GenerationFailed,
    LmiError,
    RequestTooLarge,
    Unavailable,
    from_info,
)
from lmi.executor import EngineInfo, FinishReason, Request, Response, Result
from lmi.ipc import Connecting, Connections, FrameTooLarge, frame
from lmi.shared.state import EngineRecord, FrontEndRecord
from lmi.types import Origin, WaitStatus

# Takes a Result. An awaitable that it returns is awaited before it gets the next one.
ResultTaker = Callable[[Result], Awaitable[None] | None]
# The origin of a request that belongs to no client.
ANYBODY = Origin()
# What became of each entry in the folder of adapters, by the adapter's name.
Outcomes = Mapping[str, AdapterOutcome]


class ResponseStream:
    """The Results of one request, in their order, which `forward` passes on. Always close it.

    A token wakes no task: while the task of `forward` sleeps, `put` itself passes a Result on. The
    task wakes only to await what the taker returned, to raise an error, or to end. Results that
    arrive while it is awake wait in an inbox, from which it takes them.
    """

    def __init__(self, connection: "EngineConnection", submission: Submission) -> None:
        # Whether a Result has come.
        self.has_begun = False
        self.connection = connection
        # How far the request is, as the engine said last.
        self.status = WaitStatus()
        self.submission = submission

        # Results that the task of `forward` passes on, and errors that it raises.
        self._inbox: deque[Result | Exception] = deque()
        self._take: ResultTaker | None = None
        # What the task sleeps on. Its result is what the task awaits first when it wakes.
        self._sleep: asyncio.Future[Awaitable[None] | None] | None = None
        # Whether nothing more will arrive.
        self._is_over = False
        # Set when the engine answers an AskStatus.
        self._status_came: asyncio.Event | None = None

    async def forward(self, take: ResultTaker) -> None:
        """Pass each Result to `take`, until the last one or until `close`.

        Raises the LmiError that ended the request, and what `take` raises.
        """
        self._take = take
        while self._inbox or not self._is_over:
            if self._inbox:
                arrival = self._inbox.popleft()
                if isinstance(arrival, Exception):
                    raise arrival

                pause = take(arrival)
            else:
                self._sleep = self.connection.loop.create_future()
                pause = await self._sleep

            if pause is not None:
                await pause

    @property
    def is_waiting(self) -> bool:
        """Whether no Result has come, and the request is not over."""
        return not (self.has_begun or self._is_over)

    async def ask_status(self, timeout_s: float) -> WaitStatus:
        """Ask the engine how far the request is. If it does not answer in time, return what it said
        last.
        """
        self._status_came = asyncio.Event()
        self.connection.write(frame(encode(AskStatus(self.submission.id))))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._status_came.wait(), timeout_s)

        return self.status

    def note_status(self, status: WaitStatus) -> None:
        self.status = status
        if self._status_came is not None:
            self._status_came.set()

    def close(self, *, has_left: bool = False) -> None:
        """Forget the request, and cancel it in the engine unless it has ended. `has_left` says that
        its client has left.
        """
        self._inbox.clear()
        # The taker may refer to this stream.
        self._take = None

        sleep = self._sleep
        if sleep is not None and sleep.done() and not sleep.cancelled():
            # The task was woken, but cancelled before it could await this.
            forget(sleep.result())

        takes_no_memory = True
        if not self._is_over:
            self._is_over = True
            takes_no_memory = self.connection.cancel(self.submission, has_left=has_left)

        if takes_no_memory:
            self.submission.release()

    def put(self, arrival: Result | LmiError) -> None:
        """Pass a Result on, or the error that ends the request, when it arrives from the engine."""
        if isinstance(arrival, LmiError) or arrival.is_final:
            self._is_over = True

        if not self.has_begun and isinstance(arrival, Result):
            self.has_begun = True
            self.submission.release()

        sleep = self._sleep
        if sleep is None or sleep.done():
            # The task is awake, or was cancelled.
            self._inbox.append(arrival)
            return

        pause = self._pass_on(arrival)
        if sleep.done():
            # The taker has cancelled the task.
            forget(pause)
        elif pause is not None or self._inbox or self._is_over:
            sleep.set_result(pause)

    def _pass_on(self, arrival: Result | LmiError) -> Awaitable[None] | None:
        """Pass a Result to the taker, and return what the task has to await.

        An error goes to the inbox, for the task to raise. So does one of the taker, which belongs
        to this request and not to the connection.
        """
        if isinstance(arrival, LmiError):
            self._inbox.append(arrival)
            return None

        try:
            assert self._take is not None
            return self._take(arrival)
        except Exception as error:
            self._inbox.append(error)
            return None


def forget(pause: Awaitable[None] | None) -> None:
    """Close a coroutine that nobody will await. One that has ended stays as it is."""
    if isinstance(pause, Coroutine):
        pause.close()


class EngineConnection(Connecting):
    """The socket to one engine, and the streams of its requests."""

    other_end = "an engine"

    def __init__(self) -> None:
        super().__init__()
        self.info: EngineInfo | None = None
        self.outcomes: Outcomes = {}
        # Set by the engine's next Ready, or when the engine is lost.
        self.news = asyncio.Event()
        # Those of the prompts and of the longest possible answers of all requests here.
        self.num_outstanding_tokens = 0
        # By the id of the request.
        self._streams: dict[int, ResponseStream] = {}
        # Cancelled requests whose frames the transport may still have to send.
        self._cancelled_unsent: list[Submission] = []

    def send(self, submission: Submission) -> ResponseStream:
        """Send a request to this engine. Raises Overloaded if its frame has no room in memory."""
        submission.hold()
        stream = self._streams[submission.id] = ResponseStream(self, submission)
        self.num_outstanding_tokens += submission.num_tokens
        self.write(submission.frame, submission.id)
        return stream

    def cancel(self, submission: Submission, *, has_left: bool = False) -> bool:
        """Forget a request, here and in the engine. Returns whether its frame takes no memory here
        any more.
        """
        stream = self._forget(submission.id)
        if stream is None or self.take_back(submission.id):
            return True

        self.write(frame(encode(Cancel(submission.id, has_left))))
        if not self._is_paused:
            return True

        self._cancelled_unsent.append(submission)
        return False

    def resume_writing(self) -> None:
        self._release_cancelled()
        super().resume_writing()

    def _release_cancelled(self) -> None:
        submissions = self._cancelled_unsent
        self._cancelled_unsent = []
        for submission in submissions:
            submission.release()

    def _forget(self, request_id: int) -> ResponseStream | None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self.num_outstanding_tokens -= stream.submission.num_tokens

        return stream

    def take(self, payload: bytes) -> None:
        message = decode_to_front_end(payload)
        if isinstance(message, Responses):
            for response in message.responses:
                self._put(response)
        elif isinstance(message, Ready):
            self.info = message.info
            self.outcomes = message.outcomes
            self._announce_news()
        elif isinstance(message, RequestStatus):
            stream = self._streams.get(message.request_id)
            if stream is not None:
                stream.note_status(message.status)
        else:
            stream = self._forget(message.request_id)
            if stream is not None:
                stream.put(from_info(message.error))

    def _put(self, response: Response) -> None:
        """Pass a Response to the stream of its request."""
        stream = self._streams.get(response.request_id)
        if stream is None:
            # The request was cancelled a moment ago.
            return

        arrival = result_or_failure(response)
        if response.is_final or isinstance(arrival, LmiError):
            self._forget(response.request_id)

        stream.put(arrival)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._release_cancelled()
        self.info = None
        streams = self._streams
        self._streams = {}
        self.num_outstanding_tokens = 0
        for stream in streams.values():
            stream.put(EngineLost("the engine was lost while it worked on this request"))

        self._announce_news()

    def _announce_news(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


# Connections to engines, by the slots of the engines.
BySlot = Mapping[int, EngineConnection]


class Engines(Connections[EngineConnection]):
    """The connections of one front end to all engines of one model."""

    def __init__(
        self,
        sockets: Sequence[str],
        records: Sequence[EngineRecord],
        record: FrontEndRecord | None = None,
        memory: FrameMemory | None = None,
    ) -> None:
        """`record` is the front end's record, where requests count that move to another engine.
        `memory` counts the frames of requests.
        """
        super().__init__(EngineConnection, sockets, records)
        self._adapters: tuple[str, ...] = ()
        self._record = record
        self._memory = memory or UnlimitedMemory()
        self._ids = count()

    def encoded(self, request: Request, origin: Origin = ANYBODY) -> Submission:
        """Encode a request for whichever engine will get it. Raises RequestTooLarge."""
        request_id = next(self._ids)
        try:
            encoded = frame(encode(Submit(request_id, request, origin)))
        except FrameTooLarge as error:
            raise RequestTooLarge(
                f"the request does not fit on the way to the engine: {error}"
            ) from None

        adapter = request.lora_config
        adapter_name = None if adapter is None else adapter.name
        num_prompt_tokens = len(request.input_token_ids)
        return Submission(
            request_id,
            encoded,
            num_tokens=num_prompt_tokens + request.max_tokens,
            num_prompt_tokens=num_prompt_tokens,
            memory=self._memory,
            owner=PromptOwner(adapter_name, request.cache_salt),
        )

    def submit(
        self,
        request: Request,
        session: str | None = None,
        origin: Origin = ANYBODY,
        prompt_cache_key: str | None = None,
    ) -> ResponseStream:
        """Encode and send a request. Raises RequestTooLarge, and what `send` raises."""
        return self.send(self.encoded(request, origin), session, prompt_cache_key)

    def send(
        self,
        submission: Submission,
        session: str | None = None,
        prompt_cache_key: str | None = None,
    ) -> ResponseStream:
        """Send a request to the engine of its session, or to the best one if it has no session.

        Where as many requests wait at the engine of the session as can run there, the best one gets
        it too. A `prompt_cache_key` is a hint to the engine that has the prompt's beginning, which
        only `PrefixEngines` follow. Raises Unavailable if no engine is ready, and Overloaded if the
        frame has no room.
        """
        candidates: BySlot = self._candidates(submission.adapter)
        if session is not None:
            slot = slot_of(session, candidates)
            record = self.records[slot]
            has_room = record.num_waiting < record.max_num_sequences
            if has_room or not record.max_num_sequences:
                candidates = {slot: candidates[slot]}

        return self._best(candidates, submission, prompt_cache_key).send(submission)

    def send_elsewhere(self, stream: ResponseStream) -> ResponseStream | None:
        """Send the request of a stream that has not begun to another engine, the best one.

        Returns None if no other is ready.
        """
        submission = stream.submission
        engines: BySlot = {
            slot: connection
            for slot, connection in self.serving().items()
            if connection is not stream.connection
        }
        candidates = _with_adapter(engines, submission.adapter)
        if not candidates:
            return None

        if self._record is not None:
            self._record.num_moved += 1

        return self._best(candidates, submission).send(submission)

    def _best(
        self, engines: BySlot, submission: Submission, prompt_cache_key: str | None = None
    ) -> EngineConnection:
        """Return the engine with the least work. `PrefixEngines` also looks at prompts and keys."""
        return min(engines.values(), key=lambda connection: connection.num_outstanding_tokens)

    async def ready(self, adapter: str | None = None) -> EngineInfo:
        """Return what an engine that may get a request for `adapter` says of itself and the model.

        All replicas say the same, but for their `adapters`. Waits a moment for an engine that is
        about to connect. Raises Unavailable if none is ready.
        """
        await self.wait_for(self.serving)
        infos = (engine.info for engine in self._candidates(adapter).values())
        return next(info for info in infos if info is not None)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters that any engine has. While no engine is connected, those of before."""
        infos = [engine.info for engine in self.serving().values() if engine.info is not None]
        if infos:
            names = set[str]()
            for info in infos:
                names.update(info.adapters)

            self._adapters = tuple(sorted(names))

        return self._adapters

    def serving(self) -> BySlot:
        """Return the connected engines whose heartbeat is recent, or all if none is."""
        ready = {
            slot: connection
            for slot, connection in self.open.items()
            if connection.info is not None
        }
        alive = {
            slot: connection for slot, connection in ready.items() if self.records[slot].is_alive
        }
        return alive or ready

    def unavailable(self) -> Unavailable:
        """Return the error of a request for which no engine is ready."""
        return Unavailable("no engine is ready: " + self.describe())

    def _candidates(self, adapter: str | None) -> BySlot:
        """Return the engines that a request may go to: those that have its adapter, if any has it.

        Raises Unavailable if no engine is ready.
        """
        ready = self.serving()
        if not ready:
            raise self.unavailable()

        return _with_adapter(ready, adapter) or ready


def slot_of(name: str, slots: Iterable[int]) -> int:
    """Return the slot of a name, by rendezvous hashing: every front end finds the same one, and it
    stays the same while other engines come and go.
    """

    def weight(slot: int) -> bytes:
        return blake2b(f"{name} {slot}".encode(), digest_size=8).digest()

    return max(slots, key=weight)


def _with_adapter(engines: BySlot, adapter: str | None) -> BySlot:
    """Return the engines that have an adapter, or all of them for a request without one."""
    if adapter is None:
        return engines

    return {
        slot: connection
        for slot, connection in engines.items()
        if connection.info is not None and adapter in connection.info.adapters
    }


def result_or_failure(response: Response) -> Result | LmiError:
    """Return the Result, or the error that ended a request after the engine had accepted it."""
    error = response.error
    result = response.result
    if error is not None:
        return from_info(ErrorInfo(error.kind.error.label, error.message, error.field))

    if result is None:
        return GenerationFailed("the engine sent neither a result nor an error")

    # It was not cancelled by this front end, which has forgotten what it cancels.
    if FinishReason.CANCELLED in result.finish_reasons:
        return EngineLost("the engine gave up this request because it is shutting down")

    return result
