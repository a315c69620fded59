"""The last lines of a container's log, where SageMaker keeps it."""

from collections.abc import Generator
from typing import Any

from scripts.sagemaker_kit.steps import Call, Step

NUM_LINES = 20
NO_LOG = "ResourceNotFoundException"


def last_lines(group: str, prefix: str = "") -> Generator[Step, Any, list[str]]:
    """Return the last lines of the newest stream of a group, or of the stream whose name begins with `prefix`."""
    newest = {"logStreamNamePrefix": prefix} if prefix else {"orderBy": "LastEventTime", "descending": True}
    found = yield Call("logs", "DescribeLogStreams", {"logGroupName": group, "limit": 1, **newest}, NO_LOG)
    streams = (found or {}).get("logStreams", [])
    if not streams:
        return [f"there is no log in {group}"]
    stream = {"logGroupName": group, "logStreamName": streams[0]["logStreamName"]}
    events = yield Call("logs", "GetLogEvents", {**stream, "limit": NUM_LINES, "startFromHead": False}, NO_LOG)
    return [event["message"].rstrip() for event in (events or {}).get("events", [])]
