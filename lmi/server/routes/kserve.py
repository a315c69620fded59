"""Routes that KServe v2 clients use before they send a prompt: metadata, readiness, statistics.

The server has no model configuration to serve, and its statistics are only counts. Health is that
of `/ping`. Sources: Triton's HTTP protocol extensions, KServe's open inference protocol.
"""

from collections import Counter

from starlette.exceptions import HTTPException

from lmi import __version__
from lmi.apis.triton.api import MODELS, OUTPUTS
from lmi.apis.triton.inputs import INPUTS, tensor
from lmi.http.exchange import Exchange
from lmi.server.routes.health import Health, health, liveness, service_health
from lmi.server.routes.invocations import named_model
from lmi.server.service import Models, Service
from lmi.settings.config import ModelConfig

# The ends of an answer that count as success.
SUCCESSES = ("length", "eos_token", "stop_sequence")


async def server(exchange: Exchange, models: Models) -> None:
    """Answer who the server is."""
    await exchange.send_json(
        {"name": "lmi", "version": __version__, "extensions": ["generate", "statistics"]}
    )


async def live(exchange: Exchange, models: Models) -> None:
    """Answer that the server is alive, unless it has failed finally."""
    await _tell_health(exchange, liveness(models))


async def ready(exchange: Exchange, models: Models) -> None:
    """Answer whether requests are served."""
    await _tell_health(exchange, health(models))


async def model_ready(exchange: Exchange, service: Service) -> None:
    """Answer whether requests to this model are served."""
    named_model(exchange, service)
    await _tell_health(exchange, service_health(service))


async def _tell_health(exchange: Exchange, state: Health) -> None:
    """Answer an empty 200, which clients compare with, else `/ping`'s status and state."""
    if state.status < 300:
        await exchange.send_whole(200, "text/plain", b"")
    else:
        await exchange.send_json({"error": f"not ready: {state.body['status']}"}, state.status)


async def model_metadata(exchange: Exchange, service: Service) -> None:
    """Answer what the model takes and gives, as tensors."""
    model = named_model(exchange, service)
    output_types = {"text_output": "BYTES", **OUTPUTS}
    outputs = []
    for name, datatype in output_types.items():
        outputs.append({"name": name, "datatype": datatype, "shape": [-1]})

    metadata = {
        "name": model.name,
        "versions": [model.version],
        "platform": service.config.engine.handler,
        "inputs": [tensor(name, row) for name, row in INPUTS.items()],
        "outputs": outputs,
    }
    await exchange.send_json(metadata)


async def stats(exchange: Exchange, service: Service) -> None:
    """Answer the counts of one model."""
    model = named_model(exchange, service)
    await exchange.send_json({"model_stats": [counts(model, service)]})


async def all_stats(exchange: Exchange, models: Models) -> None:
    """Answer the counts of every model."""
    services = await models.listed_for_engines()
    model_stats = [counts(service.config.model, service) for service in services]
    await exchange.send_json({"model_stats": model_stats})


def counts(model: ModelConfig, service: Service) -> dict[str, object]:
    """Return counts of the model's generations through every API since the start."""
    ends = Counter[str]()
    for frontend in service.block.frontends:
        ends.update(dict(frontend.num_finished.items()))

    num_successes = sum(ends[reason] for reason in SUCCESSES)
    return {
        "name": model.name,
        "version": model.version,
        "inference_count": num_successes,
        "execution_count": sum(engine.step for engine in service.block.engines),
        "inference_stats": {
            "success": {"count": num_successes},
            "fail": {"count": ends["error"] + ends["other"]},
            "cancel": {"count": ends["cancelled"]},
        },
    }


async def index(exchange: Exchange, models: Models) -> None:
    """List the models. The body, which may ask for only ready models, is ignored."""
    services = await models.listed_for_engines()
    await exchange.send_json([_entry(service) for service in services])


def _entry(service: Service) -> dict[str, object]:
    """Return the entry of a model in the index."""
    state = service_health(service)
    entry: dict[str, object] = {
        "name": service.config.model.name,
        "version": service.config.model.version,
    }
    if state.status < 400:
        entry["state"] = "READY"
    else:
        entry["state"] = "UNAVAILABLE"
        entry["reason"] = str(state.body["status"])

    return entry


async def not_served(exchange: Exchange, service: Service) -> None:
    """Answer 404, and name the routes that there are."""
    named_model(exchange, service)
    action = exchange.path.rpartition("/")[2]
    raise HTTPException(404, f"{action} is not served here, generate and generate_stream are")


SERVER_ROUTES = [
    ("/v2", ["GET"], server),
    ("/v2/", ["GET"], server),
    ("/v2/health/live", ["GET"], live),
    ("/v2/health/ready", ["GET"], ready),
    ("/v2/repository/index", ["POST"], index),
    ("/v2/models/stats", ["GET"], all_stats),
]
ROUTES = [
    (f"{path}{name}", methods, handler)
    for path in MODELS
    for name, methods, handler in (
        ("", ["GET"], model_metadata),
        ("/ready", ["GET"], model_ready),
        ("/stats", ["GET"], stats),
        ("/infer", ["POST"], not_served),
        ("/config", ["GET"], not_served),
    )
]
