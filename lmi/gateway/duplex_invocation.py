"""One stream in both directions: what a client sends goes to the WebSocket of a container, and what
comes from there to the client, part by part.
"""

import asyncio
import logging

import orjson
from websockets.frames import CloseCode

from lmi.errors import ClientGone, LmiError
from lmi.gateway import eventstream
from lmi.gateway.container import ContainerFault
from lmi.gateway.container_socket import ContainerSocket
from lmi.gateway.errors import aws_error, cut
from lmi.gateway.exchange import AwsExchange
from lmi.gateway.payload_part import PayloadPart
from lmi.gateway.request_parts import RequestParts

# The longest stream on the platform.
LIMIT_S = 1800.0
# How long a container may take to end after its client.
CLOSE_S = 10.0
# After them a stream is complete.
ENDS = (CloseCode.NORMAL_CLOSURE, CloseCode.NO_STATUS_RCVD)
# With a text that begins so a container tells of an error.
ERROR = b'{"ModelStreamError":'
GATEWAY_ENDS = "The gateway ends. Open another stream."
TOO_LONG = "The stream has lasted for the {:g} s that one may last. Open another."

log = logging.getLogger(__name__)


class StreamFailure(Exception):
    """The container has ended a stream with an error."""

    def __init__(self, error_code: str, message: str) -> None:
        super().__init__(message)
        self.error_code = error_code


class DuplexInvocation:
    """One stream, whose answer has begun."""

    def __init__(
        self,
        exchange: AwsExchange,
        parts: RequestParts,
        socket: ContainerSocket,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._exchange = exchange
        self._parts = parts
        self._socket = socket
        self._limit_s = limit_s

    async def run(self) -> None:
        """Pass on what comes until either side ends, and send the end of the answer, which tells of
        an error, also where the gateway ends first. Raises ClientGone.
        """
        try:
            async with asyncio.timeout(self._limit_s):
                await self._converse()
        except ClientGone:
            raise
        except asyncio.CancelledError:
            await self._fail(eventstream.internal_failure(GATEWAY_ENDS))
            await self._exchange.end()
            raise
        except TimeoutError:
            text = TOO_LONG.format(self._limit_s)
            await self._fail(eventstream.failure("ModelInvocationTimeExceeded", text))
        except StreamFailure as failure:
            await self._fail(eventstream.failure(failure.error_code, str(failure)))
        except ContainerFault as fault:
            await self._fail(eventstream.failure("StreamBroken", str(fault)))
        except LmiError as error:
            # It is the client's.
            kind = self._exchange.kind_of(aws_error(error))
            await self._fail(eventstream.refusal(kind, cut(str(error))))
        except Exception:
            request_id = self._exchange.request_id
            log.exception("request %s failed in the gateway", request_id)
            await self._fail(eventstream.internal_failure(f"internal error, request {request_id}"))

        await self._exchange.end()

    async def _fail(self, event: bytes) -> None:
        await self._exchange.write(event)

    async def _converse(self) -> None:
        sending = asyncio.create_task(self._pass_to_container())
        receiving = asyncio.create_task(self._pass_to_client())
        both = (sending, receiving)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()
                return

            sending.result()
            await self._socket.close()
            # What the container has sent before its end still reaches the client.
            await asyncio.wait((receiving,), timeout=CLOSE_S)
            if receiving.done():
                receiving.result()
        finally:
            for task in both:
                task.cancel()

            await asyncio.gather(*both, return_exceptions=True)

    async def _pass_to_container(self) -> None:
        while (part := await self._parts.receive()) is not None:
            self._exchange.log_fields["num_parts"] += 1
            await self._socket.send(part)

    async def _pass_to_client(self) -> None:
        while (part := await self._socket.receive()) is not None:
            if part.is_text and part.is_last and part.data.startswith(ERROR):
                raise _failure_of(part.data)

            for piece in _pieces(part):
                await self._exchange.write(eventstream.part_of_message(piece))

        code = self._socket.close_code
        if code not in ENDS:
            reason = self._socket.close_reason or f"The container has closed with {code:d}."
            raise StreamFailure(f"{code:d}", reason)


def _pieces(part: PayloadPart) -> list[PayloadPart]:
    """Return parts that are not too long for an event, of which the last may end the message."""
    max_bytes = eventstream.MAX_PART_BYTES
    if len(part.data) <= max_bytes:
        return [part]

    pieces = []
    for begin in range(0, len(part.data), max_bytes):
        data = part.data[begin : begin + max_bytes]
        is_end = begin + max_bytes >= len(part.data)
        pieces.append(PayloadPart(data, part.is_text, part.is_last and is_end))

    return pieces


def _failure_of(text: bytes) -> StreamFailure:
    """Return the error that a container tells of."""
    try:
        error = orjson.loads(text)["ModelStreamError"]
        return StreamFailure(str(error["ErrorCode"]), str(error["Message"]))
    except (ValueError, LookupError, TypeError):
        return StreamFailure("ModelStreamError", text.decode(errors="replace"))
