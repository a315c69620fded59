"""`/models`: the models of the server and, where there are several, how they are loaded and
unloaded, in SageMaker's form.

A server with one model describes that one as the reference does, and loads and unloads nothing.
`description` has the routes for /openapi.json.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from starlette.exceptions import HTTPException

from lmi import errors
from lmi.apis.base.readers import read_object
from lmi.description.parts import (
    ApiDescription,
    Form,
    answer_object,
    content,
    parameter,
    request_object,
)
from lmi.errors import InvalidParameter, InvalidRequest, UnknownModel, shorten
from lmi.http.exchange import Exchange
from lmi.models.choice import SeveralModels
from lmi.models.folder import Model
from lmi.server.front_end import FrontEnd
from lmi.server.routes.health import service_health
from lmi.server.service import Models, Service
from lmi.settings.config import Config
from lmi.shared.desired_state import NAME_PATTERN, State
from lmi.shared.state import Phase

if TYPE_CHECKING:
    from lmi.models.registry import ModelRegistry

HOW = (
    "this server has one model: multi_model=true or SAGEMAKER_MULTI_MODEL=true lets models come "
    "and go"
)
FIELDS = ("model_name", "url")
IN_LIST = ("modelName", "modelUrl", "status")
# The longest page.
MAX_ITEMS = 100
LIMIT = "limit"
TOKEN = "next_page_token"
# The parameters of a list in pages.
PAGE = (
    parameter("query", LIMIT, {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS}),
    parameter("query", TOKEN, {"type": "string", "pattern": "^[0-9]{1,9}$"}),
)

T = TypeVar("T")


class NewModel(NamedTuple):
    name: str
    url: str


async def collection(exchange: Exchange, models: Models) -> None:
    """Answer `/models`: GET lists the models, POST loads one."""
    if exchange.method != "POST":
        models_of_page, more = page(_described(models), exchange.query)
        rows = [{key: model[key] for key in IN_LIST} for model in models_of_page]
        await exchange.send_json({"models": rows, **more})
        return

    registry = _registry(models)
    model = await _new_model(exchange, models.front_end)
    await registry.register(model.name, model.url)
    await exchange.send_json({"status": f'Model "{model.name}" registered.'})


async def member(exchange: Exchange, models: Models) -> None:
    """Answer `/models/{model}`: GET describes it, DELETE unloads it."""
    name = exchange.scope["path_params"]["model"]
    if exchange.method == "DELETE":
        await _registry(models).unregister(name)
        await exchange.send_json({"status": f'Model "{name}" unregistered'})
    elif not isinstance(models, SeveralModels):
        service = models.require_only()
        service.check_model(name)
        await exchange.send_json([as_in_reference(service)])
    else:
        entry = next((entry for entry in models.folder.entries() if entry.name == name), None)
        if entry is None:
            raise UnknownModel(f"no model {shorten(name)} is loaded here")

        await exchange.send_json(_describe(models, entry))


def _described(models: Models) -> list[dict[str, str]]:
    if isinstance(models, SeveralModels):
        return [_describe(models, entry) for entry in models.folder.entries()]

    service = models.require_only()
    model = service.config.model
    return [{"modelName": model.name, "modelUrl": model.name, "status": state_of(service).upper()}]


def _describe(models: SeveralModels, entry: Model) -> dict[str, str]:
    state, reason = models.status(entry)
    model = {"modelName": entry.name, "modelUrl": entry.url, "status": state.upper()}
    if reason:
        model["reason"] = reason

    return model


def state_of(service: Service) -> State:
    status, _ = service_health(service)
    if status < 400:
        return State.READY

    return State.FAILED if status == 500 else State.PENDING


def as_in_reference(service: Service) -> dict[str, object]:
    """Describe the only model in the form of the reference's management API."""
    config = service.config
    records = service.block.engines
    device: dict[str, object] = {"deviceType": "cpu", "deviceId": -1}
    if config.engine.device_ids:
        device = {"deviceType": "gpu", "deviceId": 0}

    workers = [
        {"id": number, "startTime": _start_of(record.pid), "status": Phase(record.phase).name}
        for number, record in enumerate(records, start=1)
    ]
    group = {
        "device": device,
        "minWorkers": len(records),
        "maxWorkers": len(records),
        "workers": workers,
    }
    model = {
        "modelName": config.model.name,
        # Its folder is the server's own affair.
        "modelUrl": config.model.name,
        "status": state_of(service).upper(),
        "workerGroups": [group],
    }
    return {"workflowName": config.model.name, "version": config.model.version, "models": [model]}


def _start_of(pid: int) -> str | None:
    """Return when a process started, as the reference writes a time. Returns None if it does not
    run.
    """
    try:
        seconds = Path(f"/proc/{pid or 'none'}").stat().st_mtime
    except OSError:
        return None

    start = datetime.fromtimestamp(seconds, UTC)
    return start.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _registry(models: Models) -> "ModelRegistry":
    if not isinstance(models, SeveralModels):
        raise HTTPException(404, HOW)

    if not models.front_end.config.management:
        raise HTTPException(404, "models cannot be changed here (management=false)")

    from lmi.models.registry import ModelRegistry

    return ModelRegistry(models)


async def _new_model(exchange: Exchange, front_end: FrontEnd) -> NewModel:
    """Return the FIELDS, each from the body or else the query. Raises an error for two different
    values.
    """
    body = await exchange.body(front_end.config.max_request_size, front_end.body_memory)
    query = exchange.query
    fields = read_object(body) if body.strip() else {}
    for name in FIELDS:
        if name in fields and name in query and fields[name] != query[name]:
            raise InvalidRequest(
                f"{name} is {shorten(fields[name])} in the body and {shorten(query[name])} in the "
                "query"
            )

    values = {**query, **fields}
    for name in FIELDS:
        if not isinstance(values.get(name), str) or not values[name]:
            raise InvalidParameter(name, "a text that is not empty", values.get(name))

    return NewModel(values["model_name"], values["url"])


def page(items: Sequence[T], query: Mapping[str, str]) -> tuple[list[T], dict[str, str]]:
    """Return the items of a page, and `nextPageToken` if there are more. Raises InvalidParameter
    for a bad token.

    A limit that is not a number from 1 to 100 counts as 100. The token is the number of items
    before the page.
    """
    limit = query.get(LIMIT, "")
    token = query.get(TOKEN) or "0"
    if not _is_number(token):
        raise InvalidParameter(TOKEN, "a number that an earlier answer gave", token)

    num_items = MAX_ITEMS
    if _is_number(limit) and 1 <= int(limit) <= MAX_ITEMS:
        num_items = int(limit)

    start = int(token)
    end = start + num_items
    more = {"nextPageToken": str(end)} if end < len(items) else {}
    return list(items[start:end]), more


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


SERVER_ROUTES = [
    ("/models", ["GET", "POST"], collection),
    ("/models/{model}", ["GET", "DELETE"], member),
]
ABOUT = (
    "The models of the server. With multi_model=true they are loaded and unloaded here, as "
    "SageMaker does it."
)
OFF = "which this server does not: multi_model is off"
LOADING = (
    InvalidRequest,
    errors.Conflict,
    errors.Overloaded,
    errors.DeadlineExceeded,
    errors.OutOfMemory,
)
STATUS = ("READY", "PENDING", "FAILED")
GROUP = answer_object(
    device=answer_object(deviceType=str, deviceId=int),
    minWorkers=int,
    maxWorkers=int,
    workers=[answer_object(id=int, startTime=str | None, status=str)],
)
SCHEMAS = {
    "Model": answer_object(
        optional=("reason",), modelName=str, modelUrl=str, status=STATUS, reason=str
    ),
    "ModelPage": answer_object(optional=("nextPageToken",), models=["Model"], nextPageToken=str),
    "Workflow": answer_object(
        workflowName=str,
        version=str,
        models=[answer_object(modelName=str, modelUrl=str, status=STATUS, workerGroups=[GROUP])],
    ),
    "NewModel": request_object(
        {"model_name": {"type": "string", "pattern": f"^{NAME_PATTERN}$"}, "url": str},
        required=("model_name", "url"),
    ),
    "ModelStatus": answer_object(status=str),
    "ModelError": request_object(
        {"error": str, "code": int},
        required=("error", "code"),
    ),
}


def description(config: Config) -> ApiDescription:
    is_several = config.server.multi_model
    unused = ("Workflow",) if is_several else ("NewModel", "ModelStatus")
    schemas = {name: schema for name, schema in SCHEMAS.items() if name not in unused}
    api = ApiDescription("models", ABOUT, config.model, schemas, content("ModelError"))
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
        api.add("post", "/models", "Load a model", "ModelStatus", LOADING, body="NewModel")
        api.add(
            "delete", "/models/{model}", "Unload a model", "ModelStatus", [errors.DeadlineExceeded]
        )
    else:
        api.add("post", "/models", f"Load a model, {OFF}", None)
        api.add("delete", "/models/{model}", f"Unload a model, {OFF}", None)

    return api
