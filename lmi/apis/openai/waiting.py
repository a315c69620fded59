"""What a stream tells of an answer that has no token yet."""

from typing import Any

from lmi.types import WaitStatus


def waiting_fields(status: WaitStatus, waited_s: float) -> dict[str, Any]:
    """Return what is known of an answer that waits, in llama-server's words, and the place in the
    queue in litellm's.

    The time is null while the engine's speed is not known.
    """
    fields: dict[str, Any] = {}
    if status.num_computed_tokens is not None:
        fields["prompt_progress"] = {
            "total": status.num_prompt_tokens,
            "cache": status.num_cached_tokens,
            "processed": status.num_computed_tokens,
            "time_ms": round(waited_s * 1000),
        }

    if status.queue_position is not None:
        wait_s = None if status.wait_s is None else round(status.wait_s, 1)
        fields["queue_status"] = {
            "queue_position": status.queue_position,
            "estimated_wait_seconds": wait_s,
        }

    return fields
