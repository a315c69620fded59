"""`/models`: the models of the server."""

from __future__ import annotations

from lmi.description.parts import ApiDescription, Form, asked, content, parameter, struct
from lmi.errors import Conflict, DeadlineExceeded, InvalidRequest, OutOfMemory, Overloaded
from lmi.models.routes import LIMIT, MAX_ITEMS, TOKEN
from lmi.settings.config import Config
from lmi.shared.desired_state import NAME_PATTERN

ABOUT = "The models of the server. With multi_model=true they are loaded and unloaded here, as SageMaker does it."
OFF = "which this server does not: multi_model is off"
LOADING = (InvalidRequest, Conflict, Overloaded, DeadlineExceeded, OutOfMemory)
STATUS = ("READY", "PENDING", "FAILED")
PAGE = (  # the parameters of a list in pages
    parameter("query", LIMIT, {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS}),
    parameter("query", TOKEN, {"type": "string", "pattern": "^[0-9]{1,9}$"}),
)
GROUP = struct(
    device=struct(deviceType=str, deviceId=int),
    minWorkers=int,
    maxWorkers=int,
    workers=[struct(id=int, startTime=str | None, status=str)],
)
SCHEMAS = {
    "Model": struct("reason", modelName=str, modelUrl=str, status=STATUS, reason=str),
    "ModelPage": struct("nextPageToken", models=["Model"], nextPageToken=str),
    "Workflow": struct(
        workflowName=str,
        version=str,
        models=[struct(modelName=str, modelUrl=str, status=STATUS, workerGroups=[GROUP])],
    ),
    "NewModel": asked(
        {"model_name": {"type": "string", "pattern": f"^{NAME_PATTERN}$"}, "url": str}, "model_name", "url"
    ),
    "ModelStatus": struct(status=str),
    "ModelError": asked({"error": str, "code": int}, "error", "code"),
}


def describe(config: Config) -> ApiDescription:
    is_several = config.server.multi_model
    unused = ("Workflow",) if is_several else ("NewModel", "ModelStatus")
    schemas = {name: schema for name, schema in SCHEMAS.items() if name not in unused}
    api = ApiDescription("models", ABOUT, config.model, schemas, content("ModelError"))
    one: Form = "Model" if is_several else ["Workflow"]
    api.add("get", "/models", "The models, by name, in pages", "ModelPage", [InvalidRequest], parameters=PAGE)
    api.add("get", "/models/{model}", "One model", one)
    if is_several:
        api.add("post", "/models", "Load a model", "ModelStatus", LOADING, body="NewModel")
        api.add("delete", "/models/{model}", "Unload a model", "ModelStatus", [DeadlineExceeded])
    else:
        api.add("post", "/models", f"Load a model, {OFF}", None)
        api.add("delete", "/models/{model}", f"Unload a model, {OFF}", None)
    return api
