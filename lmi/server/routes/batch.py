"""`/execution-parameters`: how a batch transform of SageMaker should send its records."""

from __future__ import annotations

from lmi.http.exchange import Exchange
from lmi.server.models import Models
from lmi.settings.config import ServerConfig

MAX_TRANSFORM_MB = 100  # of all requests at once, which is SageMaker's limit


async def execution_parameters(exchange: Exchange, models: Models) -> None:
    server, services = models.front_end.config, await models.listed()
    fields = {
        "MaxConcurrentTransforms": num_transforms(server, sum(service.num_running_sequences for service in services)),
        "BatchStrategy": server.batch_strategy,
        "MaxPayloadInMB": server.max_payload_mb,
    }
    await exchange.send_json(fields)


def num_transforms(server: ServerConfig, num_running_sequences: int) -> int:
    """Return the number of requests to send at once: as many as run at once and stay under SageMaker's limit."""
    if server.max_concurrent_transforms is not None:
        return server.max_concurrent_transforms
    if server.max_payload_mb:
        num_running_sequences = min(num_running_sequences, MAX_TRANSFORM_MB // server.max_payload_mb)
    return max(1, num_running_sequences)


SERVER_ROUTES = [("/execution-parameters", ["GET"], execution_parameters)]
