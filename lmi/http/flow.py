"""Lets connections with large bodies read one after the other, so that they do not hold up small
requests.

A connection pauses after each piece of a large body. If all paused connections read on in the same
turn of the event loop, that turn would take longer with each of them, and new connections, of which
the loop accepts one in a turn, would wait. So in each turn only one of them reads on.
"""

import asyncio
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.flow_control import FlowControl

# The connections of each event loop that want to read on, the one that has waited longest first.
_waiting: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[FairFlow, None]]" = WeakKeyDictionary()


class FairFlow(FlowControl):
    """Pauses a connection, and lets it read on when its turn has come."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(transport)
        self._loop = loop
        self._waiting = _waiting.setdefault(loop, {})

    def pause_reading(self) -> None:
        self._waiting.pop(self, None)
        super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            if not self._waiting:
                self._loop.call_soon(self._take_turn)

            self._waiting[self] = None

    def _take_turn(self) -> None:
        """Let the connection that has waited longest read on."""
        flow = next(iter(self._waiting), None)
        if flow is not None:
            del self._waiting[flow]
            if not flow._transport.is_closing():
                super(FairFlow, flow).resume_reading()

        if self._waiting:
            self._loop.call_soon(self._take_turn)
