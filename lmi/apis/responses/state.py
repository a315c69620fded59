"""One response: the settings that it repeats, the items that have ended, and the number of events that told of it."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from lmi.apis.base.formatter import ErrorFields, named_event

SETTINGS: dict[str, Any] = {  # of a request that names none
    **dict.fromkeys(("background", "store"), False),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), 0),
    **dict.fromkeys(("temperature", "top_p"), 1),
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"), None),
    **dict.fromkeys(("prompt_cache_key", "reasoning", "safety_identifier"), None),
    "metadata": {},
    "parallel_tool_calls": True,
    "service_tier": "default",
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}


@dataclass(slots=True)
class ResponseState:
    """`settings` are those of the request. `output` holds the items that have ended."""

    settings: dict[str, Any] = field(default_factory=dict)
    output: list[dict[str, Any]] = field(default_factory=list)
    model: str = ""
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created_s: int = field(default_factory=lambda: int(time.time()))
    num_events: int = 0

    def response(self, status: str, **known: Any) -> dict[str, Any]:
        """Return the response as it is now. `known` are fields that are null until its end."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "model": self.model,
            "output": self.output,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **SETTINGS,
            **self.settings,
            **known,
        }

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return the record of the next event."""
        data = {"type": kind, "sequence_number": self.num_events, **fields}
        self.num_events += 1
        return named_event(kind, data)

    def failed(self, error: ErrorFields) -> bytes:
        """Return the last event of a response that fails after its beginning."""
        said = {"code": error.kind or "server_error", "message": error.message}
        return self.event("response.failed", response=self.response("failed", error=said))
