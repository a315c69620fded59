"""The state of a response while it is written, which the formatter and a failure share."""

import time
from typing import Any

from msgspec import Struct, field

from lmi.apis.openai.block_formatter import named_event

# The format of a text that is bound to nothing.
PLAIN_TEXT = {"type": "text"}
# The settings of a request that names none.
DEFAULT_SETTINGS: dict[str, Any] = {
    "background": False,
    "store": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_logprobs": 0,
    "temperature": 1,
    "top_p": 1,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "service_tier": "default",
    "text": {"format": PLAIN_TEXT},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}


class ResponseState(Struct):
    """One response: the settings that it repeats, the items that have ended, and how many events
    told of it.
    """

    settings: dict[str, Any]
    output: list[dict[str, Any]] = field(default_factory=list)
    id: str = ""
    created_s: int = 0
    model: str = ""
    num_events: int = 0

    def response(self, status: str, **last_fields: Any) -> dict[str, Any]:
        """Return the response as it is now. `last_fields` are null until its end."""
        completed_at_s = None
        if status == "completed":
            completed_at_s = int(time.time())

        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "completed_at": completed_at_s,
            "status": status,
            "model": self.model,
            "output": self.output,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **DEFAULT_SETTINGS,
            **self.settings,
            **last_fields,
        }

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return the next event, which has the next number."""
        data = {"type": kind, "sequence_number": self.num_events, **fields}
        self.num_events += 1
        return named_event(kind, data)
