"""The lines of jsonlines as server-sent events: `data: {...}` and an empty line.

No event names, no ids, no `[DONE]`. Source: LMI handlers' inference API schema; the space after the colon is as the
reference writes it.
"""

from __future__ import annotations

from lmi.formatters.jsonlines import LmiStream


class LmiEvents(LmiStream):
    media_type = "text/event-stream"
    opening = b"data: {"
    closing = b"}\n\n"
