"""`/info` and `/health`, which clients of TGI read before they send a prompt."""

from lmi import __version__
from lmi.apis.base.parameters import MAX_SEQUENCES
from lmi.apis.base.readers import MAX_STOP_SEQUENCES
from lmi.http.exchange import Exchange
from lmi.server.routes import health
from lmi.server.service import Models, Service


async def info(exchange: Exchange, service: Service) -> None:
    """Answer with TGI's names and this server's values, or with 503 until an engine is ready.

    `kernels` is not a name of TGI: what computes, "" for an engine that has no choice.
    """
    assert service.engines is not None
    engine = await service.engines.ready()
    config = service.config
    max_best_of = 1
    if engine.capabilities.num_return_sequences:
        max_best_of = min(MAX_SEQUENCES, config.server.max_request_sequences)

    fields = {
        "model_id": config.model.name,
        "model_sha": None,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": service.max_in_flight,
        "max_best_of": max_best_of,
        "max_stop_sequences": MAX_STOP_SEQUENCES,
        "max_input_tokens": engine.max_sequence_length - 1,
        "max_total_tokens": engine.max_sequence_length,
        "validation_workers": config.server.frontend_workers,
        "max_client_batch_size": 1,
        "router": "lmi",
        "version": __version__,
        "sha": None,
        "docker_label": None,
        "kernels": engine.kernels,
    }
    await exchange.send_json(fields)


async def check_health(exchange: Exchange, models: Models) -> None:
    """Answer whether requests are served, in TGI's form."""
    state = health.health(models)
    if state.status < 300:
        await exchange.send_whole(200, "text/plain", b"")
    else:
        await exchange.send_json({"error": "unhealthy", "error_type": "healthcheck"}, 503)


ROUTES = [("/info", ["GET"], info)]
SERVER_ROUTES = [("/health", ["GET"], check_health)]
