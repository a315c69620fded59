"""The client's half of a stream in both directions: events, signed or not, become parts of
messages.
"""

from lmi.errors import shorten
from lmi.gateway.errors import invalid
from lmi.gateway.event_message import EventMessage, MessageReader, read_message
from lmi.gateway.event_signatures import SIGNATURE, SignatureChain
from lmi.gateway.exchange import AwsExchange
from lmi.gateway.payload_part import PayloadPart

# The values of headers, those first that count where a client has none. Source: AWS's model of
# RequestPayloadPart.
DATA_TYPES = ("BINARY", "UTF8")
COMPLETION_STATES = ("COMPLETE", "PARTIAL")


class RequestParts:
    """The parts that one client sends. `chain` checks its signatures, None where none are asked
    for.
    """

    def __init__(
        self, exchange: AwsExchange, max_message_bytes: int, chain: SignatureChain | None
    ) -> None:
        self._exchange = exchange
        self._messages = MessageReader(max_message_bytes)
        self._chain = chain
        # The last part, until its message is complete.
        self._open_part: PayloadPart | None = None

    async def receive(self) -> PayloadPart | None:
        """Return the next part, or None when the client has ended its half.

        Raises AwsError for what is no part, Overloaded where there is no room for it, and
        ClientGone.
        """
        while (message := self._messages.take()) is None:
            self._exchange.hold(self._messages.num_unread_bytes)
            piece = await self._exchange.piece()
            if not piece:
                self._check_whole()
                return None

            self._messages.feed(piece)
            self._exchange.hold(self._messages.num_unread_bytes)

        event = self._unwrapped(message)
        if event is None:
            return None

        part = _part_of(event)
        if self._open_part is not None and self._open_part.is_text != part.is_text:
            raise invalid("All parts of a message must have one DataType.")

        self._open_part = None if part.is_last else part
        return part

    def _check_whole(self) -> None:
        """Raise AwsError if a message has come in part."""
        if self._messages.num_unread_bytes:
            raise invalid("The request ends in the middle of a message.")

    def _unwrapped(self, message: EventMessage) -> EventMessage | None:
        """Return the event that a signed message has as its payload, None for that of the end."""
        if self._chain is not None:
            self._chain.check(message)
        elif SIGNATURE not in message.headers:
            return message

        return read_message(message.payload) if message.payload else None


def _part_of(event: EventMessage) -> PayloadPart:
    """Return what an event carries. Raises AwsError."""
    kind = event.text(":event-type") or event.text(":exception-type")
    if event.text(":message-type") != "event" or kind != "PayloadPart":
        raise invalid(f"An event of the request must be a PayloadPart, given {shorten(kind)}.")

    return PayloadPart(
        data=event.payload,
        is_text=_choice(event, "DataType", DATA_TYPES) == "UTF8",
        is_last=_choice(event, "CompletionState", COMPLETION_STATES) == "COMPLETE",
    )


def _choice(event: EventMessage, name: str, values: tuple[str, ...]) -> str:
    """Return a header that has one of these values. Raises AwsError."""
    value = event.text(name, values[0])
    if value not in values:
        raise invalid(f"{name} must be one of {', '.join(values)}, given {shorten(value)}.")

    return value
