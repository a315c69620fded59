"""`/models`: the models of the server and, where there are several, how they are loaded and
unloaded, in SageMaker's form.

A server with one model describes that one as the reference does, and loads and unloads nothing.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from starlette.exceptions import HTTPException

from lmi.apis.base.body import read_object
from lmi.errors import InvalidParameter, InvalidRequest, UnknownModel, shorten
from lmi.http.exchange import Exchange
from lmi.models.choice import SeveralModels
from lmi.models.folder import Model
from lmi.models.pages import page
from lmi.server.front_end import FrontEnd
from lmi.server.routes.health import service_health
from lmi.server.service import Models, Service
from lmi.shared.desired_state import State
from lmi.shared.state import Phase

if TYPE_CHECKING:
    from lmi.models.registry import ModelRegistry

ONLY_ONE_MODEL = (
    "this server has one model: multi_model=true or SAGEMAKER_MULTI_MODEL=true lets models come "
    "and go"
)
# What a client gives of a model to load, in the body or the query.
FIELDS = ("model_name", "url")
# What a list tells of each model.
FIELDS_IN_LIST = ("modelName", "modelUrl", "status")


class NewModel(NamedTuple):
    name: str
    url: str


async def collection(exchange: Exchange, models: Models) -> None:
    """Answer `/models`: GET lists the models, POST loads one."""
    if exchange.method != "POST":
        models_of_page, more = page(_descriptions(models), exchange.query)
        rows = [{key: model[key] for key in FIELDS_IN_LIST} for model in models_of_page]
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
        entries_by_name = {entry.name: entry for entry in models.folder.entries()}
        if name not in entries_by_name:
            raise UnknownModel(f"no model {shorten(name)} is loaded here")

        await exchange.send_json(_description(models, entries_by_name[name]))


def _descriptions(models: Models) -> list[dict[str, str]]:
    """Return every model as `/models` describes it."""
    if isinstance(models, SeveralModels):
        return [_description(models, entry) for entry in models.folder.entries()]

    service = models.require_only()
    model = service.config.model
    return [{"modelName": model.name, "modelUrl": model.name, "status": state_of(service).upper()}]


def _description(models: SeveralModels, entry: Model) -> dict[str, str]:
    status = models.status(entry)
    model = {"modelName": entry.name, "modelUrl": entry.url, "status": status.state.upper()}
    if status.reason:
        model["reason"] = status.reason

    return model


def state_of(service: Service) -> State:
    """Return the state of a model by the status that its health check has now."""
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
        raise HTTPException(404, ONLY_ONE_MODEL)

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
        value = values.get(name)
        if not isinstance(value, str) or not value:
            raise InvalidParameter(name, "a text that is not empty", value)

    return NewModel(values["model_name"], values["url"])


SERVER_ROUTES = [
    ("/models", ["GET", "POST"], collection),
    ("/models/{model}", ["GET", "DELETE"], member),
]
