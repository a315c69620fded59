"""A part of a message of a stream in both directions, on either side of the gateway."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PayloadPart:
    """What one event of a client, or one frame of a container, carries of a message."""

    data: bytes
    is_text: bool
    # Whether the message ends here.
    is_last: bool
