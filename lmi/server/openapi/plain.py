"""The routes outside the inference APIs: health, metrics, parameters of batch transforms, and this document."""

from __future__ import annotations

from lmi.apis.base.openapi import (
    INTEGER,
    JSON,
    NUMBER,
    STRING,
    ApiDescription,
    Operation,
    answers,
    content,
    operation,
    ref,
    struct,
)
from lmi.server.metrics import MEDIA_TYPE
from lmi.settings.config import Config

NAME = "server"
STATES = ["Healthy", "Draining", "Failed", "Loading", "Restarting", "Unresponsive"]
HEALTH = struct(
    {
        "status": {"enum": STATES},
        "reason": STRING,
        "stage": STRING,
        "progress": NUMBER,
        "start": INTEGER,
        "lost_for_s": NUMBER,
        "silent_s": NUMBER,
        "engines": INTEGER,
        "engines_ready": INTEGER,
    },
    *("reason", "stage", "progress", "start", "lost_for_s", "silent_s", "engines", "engines_ready"),
)

EXECUTION_PARAMETERS = struct(
    {
        "MaxConcurrentTransforms": {**INTEGER, "minimum": 1},
        "BatchStrategy": {"enum": ["SINGLE_RECORD", "MULTI_RECORD"]},
        "MaxPayloadInMB": {**INTEGER, "minimum": 0},
    }
)


def describe(config: Config) -> ApiDescription:
    paths = {
        "/ping": {"get": _ping(), "post": _ping()},
        "/metrics": {"get": _page("Metrics for Prometheus", MEDIA_TYPE)},
        "/openapi.json": {"get": _page("This description", JSON)},
        "/execution-parameters": {"get": _execution_parameters()},
        "/docs": {"get": _page("This description, to read", "text/html; charset=utf-8")},
    }
    schemas = {"Health": HEALTH, "ExecutionParameters": EXECUTION_PARAMETERS}
    return ApiDescription(NAME, "How the server is, and what it can be asked.", paths, schemas)


def _ping() -> Operation:
    healthy = {"description": "requests are served", "content": content(ref("Health"))}
    partly = {**healthy, "description": "some engines serve (allow_multi_status)"}
    unready = {"description": "not now: the body says why", "content": content(ref("Health"))}
    failed = {"description": "given up, or a fault of the server", "content": content(ref("Health"))}
    described = answers({}, content(ref("Error")))
    return operation(
        NAME, "Whether requests are served", described | {"200": healthy, "207": partly, "500": failed, "503": unready}
    )


def _execution_parameters() -> Operation:
    parameters = content(ref("ExecutionParameters"))
    return operation(NAME, "How a batch transform should send its records", answers(parameters, content(ref("Error"))))


def _page(summary: str, media_type: str) -> Operation:
    schema = {"type": "object"} if media_type == JSON else STRING
    return operation(NAME, summary, answers({media_type: {"schema": schema}}, content(ref("Error"))))
