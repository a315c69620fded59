"""The media types of answers."""

JSON = "application/json"
JSONLINES = "application/jsonlines"
SSE = "text/event-stream"
