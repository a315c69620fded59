"""`/models` in /openapi.json."""

from lmi import errors
from lmi.description.operations import ApiDescription
from lmi.description.schemas import Form, answer_object, content, request_object
from lmi.errors import InvalidRequest
from lmi.models.pages import PAGE
from lmi.settings.config import Config
from lmi.shared.desired_state import NAME_PATTERN

ABOUT = (
    "The models of the server. With multi_model=true they are loaded and unloaded here, as "
    "SageMaker does it."
)
NOT_HERE = "which this server does not: multi_model is off"
# What the load of a model may be refused for.
ERRORS_OF_LOADING = (
    InvalidRequest,
    errors.Conflict,
    errors.Overloaded,
    errors.DeadlineExceeded,
    errors.OutOfMemory,
)
STATUSES = ("READY", "PENDING", "FAILED")
# The processes of a model in the reference's words.
WORKER_GROUP = answer_object(
    {
        "device": answer_object({"deviceType": str, "deviceId": int}),
        "minWorkers": int,
        "maxWorkers": int,
        "workers": [answer_object({"id": int, "startTime": str | None, "status": str})],
    }
)
SCHEMAS = {
    "Model": answer_object(
        {"modelName": str, "modelUrl": str, "status": STATUSES, "reason": str}, optional=("reason",)
    ),
    "ModelPage": answer_object(
        {"models": ["Model"], "nextPageToken": str}, optional=("nextPageToken",)
    ),
    "Workflow": answer_object(
        {
            "workflowName": str,
            "version": str,
            "models": [
                answer_object(
                    {
                        "modelName": str,
                        "modelUrl": str,
                        "status": STATUSES,
                        "workerGroups": [WORKER_GROUP],
                    }
                )
            ],
        }
    ),
    "NewModel": request_object(
        {"model_name": {"type": "string", "pattern": f"^{NAME_PATTERN}$"}, "url": str},
        required=("model_name", "url"),
    ),
    "ModelStatus": answer_object({"status": str}),
    "ModelError": request_object(
        {"error": str, "code": int},
        required=("error", "code"),
    ),
}


def description(config: Config) -> ApiDescription:
    """Return the routes as a server with these settings has them."""
    is_several = config.server.multi_model
    unused = ("Workflow",) if is_several else ("NewModel", "ModelStatus")
    schemas = {name: schema for name, schema in SCHEMAS.items() if name not in unused}
    api = ApiDescription(
        name="models",
        about=ABOUT,
        model=config.model,
        schemas=schemas,
        error=content("ModelError"),
    )
    member_form: Form = "Model" if is_several else ["Workflow"]
    api.add(
        "get",
        "/models",
        "The models, by name, in pages",
        "ModelPage",
        [InvalidRequest],
        parameters=PAGE,
    )
    api.add("get", "/models/{model}", "One model", member_form)
    if is_several:
        api.add(
            "post", "/models", "Load a model", "ModelStatus", ERRORS_OF_LOADING, body="NewModel"
        )
        api.add(
            "delete", "/models/{model}", "Unload a model", "ModelStatus", [errors.DeadlineExceeded]
        )
    else:
        api.add("post", "/models", f"Load a model, {NOT_HERE}", None)
        api.add("delete", "/models/{model}", f"Unload a model, {NOT_HERE}", None)

    return api
