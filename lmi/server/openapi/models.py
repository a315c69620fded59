"""`/models`: the models of the server."""

from __future__ import annotations

from lmi.apis.base.openapi import (
    INTEGER,
    JSON,
    PAGE,
    STRING,
    ApiDescription,
    Causes,
    Operation,
    Schema,
    answers,
    array,
    asked,
    content,
    names,
    operation,
    or_null,
    ref,
    struct,
)
from lmi.errors import Conflict, DeadlineExceeded, InvalidRequest, OutOfMemory, UnknownModel
from lmi.settings.config import Config
from lmi.shared.desired_state import NAME_PATTERN

NAME = "models"
ABOUT = "The models of the server. With multi_model=true they are loaded and unloaded here, as SageMaker does it."
LOADING = (InvalidRequest, Conflict, DeadlineExceeded, OutOfMemory)
STATUS: Schema = {"enum": ["READY", "PENDING", "FAILED"]}
WORKER = struct({"id": INTEGER, "startTime": or_null(STRING), "status": STRING})
GROUP = struct(
    {
        "device": struct({"deviceType": STRING, "deviceId": INTEGER}),
        "minWorkers": INTEGER,
        "maxWorkers": INTEGER,
        "workers": array(WORKER),
    }
)
SCHEMAS: dict[str, Schema] = {
    "Model": struct({"modelName": STRING, "modelUrl": STRING, "status": STATUS, "reason": STRING}, "reason"),
    "ModelPage": struct({"models": array(ref("Model")), "nextPageToken": STRING}, "nextPageToken"),
    "Workflow": struct(
        {
            "workflowName": STRING,
            "version": STRING,
            "models": array(
                struct({"modelName": STRING, "modelUrl": STRING, "status": STATUS, "workerGroups": array(GROUP)})
            ),
        }
    ),
    "NewModel": asked({"model_name": {**STRING, "pattern": f"^{NAME_PATTERN}$"}, "url": STRING}, "model_name", "url"),
    "ModelStatus": struct({"status": STRING}),
    "ModelError": asked({"error": STRING, "code": INTEGER}, "error", "code"),
}


def describe(config: Config) -> ApiDescription:
    is_several = config.server.multi_model
    name = names(config.model, "/models/{model}")
    pages = _operation("The models, by name, in pages", ref("ModelPage"), [InvalidRequest], names=PAGE)
    one = _operation("One model", ref("Model") if is_several else array(ref("Workflow")), names=name)
    load = _operation("Load a model", ref("ModelStatus"), LOADING, content(ref("NewModel"), JSON))
    unload = _operation("Unload a model", ref("ModelStatus"), [UnknownModel, DeadlineExceeded], names=name)
    if not is_several:
        load, unload = _switched_off("Load a model"), _switched_off("Unload a model", name)
    paths = {"/models": {"get": pages, "post": load}, "/models/{model}": {"get": one, "delete": unload}}
    unused = ("Workflow",) if is_several else ("NewModel", "ModelStatus")
    schemas = {name: schema for name, schema in SCHEMAS.items() if name not in unused}
    return ApiDescription(NAME, ABOUT, paths, schemas)


def _operation(
    summary: str,
    answer: Schema,
    causes: Causes = (UnknownModel,),
    body: dict[str, Schema] | None = None,
    names: list[Schema] | None = None,
) -> Operation:
    described = answers(content(answer), content(ref("ModelError")), causes)
    return operation(NAME, summary, described, body, names or [])


def _switched_off(summary: str, names: list[Schema] | None = None) -> Operation:
    described = answers({}, content(ref("ModelError")))
    del described["200"]
    return operation(NAME, f"{summary}, which this server does not: multi_model is off", described, names=names or [])
