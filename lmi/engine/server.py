"""The engine's end of the engine sockets: requests of all front ends on one executor.

A `Desk` gives each request that a connection submits to the executor and hands every batch of Responses back in one
frame for each connection. A front end that breaks the protocol or stops reading loses its connection and nothing
else; a connection that closes cancels what it had asked for. Requests come on the event loop of the worker; `deliver`
is called by the thread that makes the Responses.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import threading
import time
from typing import cast

import msgspec

from lmi.engine.adapter_keeper import AdapterKeeper
from lmi.engine.messages import (
    Cancel,
    Done,
    LoadAdapter,
    Output,
    Ready,
    Refused,
    Submit,
    UnloadAdapter,
    decode_to_engine,
    encode,
)
from lmi.errors import InvalidRequest, LmiError, Unavailable
from lmi.executor import ErrorKind, Executor, IterationStats, Response, ResponseError
from lmi.ipc.connection import Connection
from lmi.ipc.frames import FrameTooLarge, frame
from lmi.ipc.writer import Outlet
from lmi.shared.desired_state import Adapter, Folder
from lmi.shared.state import EngineRecord

MAX_UNSENT_BYTES = 64 << 20  # a front end that lets this much pile up is not reading any more

log = logging.getLogger(__name__)


class Desk:
    """Keeps the books between connections and executor, and the engine's record."""

    def __init__(self, executor: Executor, record: EngineRecord, adapters: Folder[Adapter] | None = None) -> None:
        self.ready = Ready(executor.info)
        self.adapters = AdapterKeeper(executor, adapters, self._announce)
        self.connections: set[FrontEnd] = set()
        self._changes: set[asyncio.Task[None]] = set()
        self.is_closing = False
        self._executor = executor
        self._record = record
        self._lock = threading.Lock()  # guards the books: the next one, each connection's ids and the record
        self._owners: dict[int, tuple[FrontEnd, int]] = {}  # executor's id -> whose request, and its id there
        record.max_num_sequences = executor.info.max_num_sequences
        record.step_s = time.monotonic()

    @property
    def num_requests(self) -> int:
        """Those whose end has not been handed out."""
        with self._lock:
            return len(self._owners)

    def submit(self, connection: FrontEnd, message: Submit) -> None:
        try:
            if self.is_closing:
                raise Unavailable("this engine is shutting down")
            with self._lock:  # the first Response may be there before its id is
                self._note_owner(self._executor.enqueue_request(message.request), connection, message.request_id)
        except Exception as error:  # an engine's own fault too is this request's alone
            if not isinstance(error, LmiError | ValueError | RuntimeError):
                log.exception("the engine did not take a request")
            connection.send(Refused(message.request_id, _label(error), str(error)))

    def change_adapters(self, connection: FrontEnd, message: LoadAdapter | UnloadAdapter) -> None:
        task = asyncio.create_task(self._change_adapters(connection, message))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    async def _change_adapters(self, connection: FrontEnd, message: LoadAdapter | UnloadAdapter) -> None:
        try:
            await self.adapters.change(message)
        except Exception as error:
            if not isinstance(error, LmiError | ValueError | RuntimeError):
                log.exception("the engine did not change its adapters")
            connection.send(Refused(message.request_id, _label(error), str(error)))
        else:
            connection.send(Done(message.request_id))

    def _announce(self) -> None:
        """Tell every front end the engine's facts again, before the one that changed them hears that it is done."""
        self.ready = Ready(self._executor.info)
        for connection in self.connections:
            connection.send(self.ready)

    def _note_owner(self, engine_id: int, connection: FrontEnd, request_id: int) -> None:
        if not self._owners:
            self._record.step_s = time.monotonic()  # idleness is no hang
        self._owners[engine_id] = connection, request_id
        connection.engine_ids[request_id] = engine_id
        self._count()

    def cancel(self, engine_id: int) -> None:
        self._executor.cancel_request(engine_id)

    def deliver(self, responses: list[Response]) -> None:
        """Hand out what one or more steps made: one frame for each connection. From any one thread."""
        with self._lock:
            for connection, batch in self._by_connection(responses).items():
                connection.send_output(batch)
            self._observe(has_output=True)

    def _by_connection(self, responses: list[Response]) -> dict[FrontEnd, list[Response]]:
        outputs: dict[FrontEnd, list[Response]] = {}
        for response in responses:
            engine_id = response.request_id
            owner = self._owners.get(engine_id)
            if owner is None:
                continue
            connection, response.request_id = owner
            if response.is_final:
                del self._owners[engine_id]
                connection.engine_ids.pop(response.request_id, None)
            outputs.setdefault(connection, []).append(response)
        return outputs

    def observe(self) -> None:
        """Bring the record up to date with the executor's steps."""
        with self._lock:
            self._observe(has_output=False)

    def _observe(self, *, has_output: bool) -> None:
        """Output is a step even if the executor counts none."""
        steps = self._executor.get_latest_iteration_stats()
        if steps:
            self._note(steps)
        elif has_output:
            self._record.step += 1
            self._record.step_s = time.monotonic()
        self._count(steps[-1].num_active_requests if steps else None)

    def _note(self, steps: list[IterationStats]) -> None:
        record, last = self._record, steps[-1]
        record.step += len(steps)
        record.step_s = time.monotonic()
        record.num_preemptions += sum(step.num_preemptions for step in steps)
        record.num_used_blocks = last.kv_cache_stats.used_num_blocks
        record.max_num_blocks = last.kv_cache_stats.max_num_blocks

    def _count(self, num_active: int | None = None) -> None:
        """Running and waiting together are the requests that have no end yet, whatever the executor says."""
        active = self._record.num_running if num_active is None else num_active
        self._record.num_running = min(active, len(self._owners))
        self._record.num_waiting = len(self._owners) - self._record.num_running


class FrontEnd(Connection):
    """One socket to one front end."""

    other_end = "a front end"

    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self.engine_ids: dict[int, int] = {}  # the front end's id -> the executor's
        self._desk = desk
        self._outlet: Outlet | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if _peer_uid(transport.get_extra_info("socket")) not in (os.geteuid(), 0):
            log.error("refused a connection of another user")
            self.close()
            return
        self._outlet = Outlet(cast(asyncio.Transport, transport), MAX_UNSENT_BYTES)
        self._desk.connections.add(self)
        self.send(self._desk.ready)

    def resume_writing(self) -> None:
        if self._outlet is not None:
            self._outlet.resume()

    def take(self, payload: bytes) -> None:
        message = decode_to_engine(payload)
        if isinstance(message, Submit):
            if message.request_id in self.engine_ids:
                raise msgspec.ValidationError(f"request id {message.request_id} is in use")
            self._desk.submit(self, message)
        elif not isinstance(message, Cancel):
            self._desk.change_adapters(self, message)
        elif (engine_id := self.engine_ids.get(message.request_id)) is not None:
            self._desk.cancel(engine_id)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._desk.connections.discard(self)
        if self._outlet is not None:
            self._outlet.close()
        for engine_id in list(self.engine_ids.values()):
            self._desk.cancel(engine_id)

    def send_output(self, responses: list[Response]) -> None:
        """One frame, or several where one would be over the limit; a Response that fills a frame alone is an error."""
        try:
            self.send(Output(responses))
        except FrameTooLarge as error:
            if len(responses) > 1:
                middle = len(responses) // 2
                self.send_output(responses[:middle])
                self.send_output(responses[middle:])
                return
            request_id = responses[0].request_id
            if (engine_id := self.engine_ids.get(request_id)) is not None:
                self._desk.cancel(engine_id)
            self.send(Output([Response(request_id, error=ResponseError(str(error), ErrorKind.GENERATION))]))

    def send(self, message: Ready | Output | Refused | Done) -> None:
        """From any thread. A front end that has stopped reading loses its connection."""
        if self._outlet is not None:
            self._outlet.write(frame(encode(message)))


async def listen(desk: Desk, path: str) -> asyncio.Server:
    """Accept front ends of this user alone at `path`."""
    return await asyncio.get_running_loop().create_unix_server(lambda: FrontEnd(desk), sock=bind(path))


def bind(path: str) -> socket.socket:
    """A socket at `path` for this user alone; what a dead predecessor left there goes."""
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(previous)
    return listener


def _peer_uid(peer: socket.socket) -> int:
    """Source of the layout (pid, uid, gid): unix(7), SO_PEERCRED."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


def _label(error: Exception) -> str:
    if isinstance(error, LmiError):
        return error.label
    return InvalidRequest.label if isinstance(error, ValueError) else Unavailable.label
