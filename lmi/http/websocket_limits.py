"""What a WebSocket may cost."""

from msgspec import Struct


class WebSocketLimits(Struct, frozen=True):
    """The limits of each WebSocket of this process."""

    max_message_bytes: int
    # What all WebSockets of this process may hold of messages that have come in part.
    max_partial_bytes: int
    # For one message, from its first byte to its last.
    message_timeout_s: float
    stall_timeout_s: float
    # How often the server asks whether the client is there. It waits as long for the answer.
    ping_s: float
