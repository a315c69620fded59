"""How the server is. These routes read shared memory and ask no process, so a busy or dead engine
delays none.
"""

import time

from lmi.http.exchange import Exchange
from lmi.server.service import Models, Service
from lmi.shared.state import Block, Phase, SupervisorRecord


async def ping(exchange: Exchange, models: Models) -> None:
    """Answer 200 if an engine can serve, 503 while none can, and 500 if that is final. The body
    says why.
    """
    status, body = health(models)
    await exchange.send_json(body, status)


async def live(exchange: Exchange, models: Models) -> None:
    status, body = liveness(models)
    await exchange.send_json(body, status)


def health(models: Models) -> tuple[int, dict[str, object]]:
    """Return the status of `/ping` and its body."""
    supervisor = models.front_end.block.supervisor
    only = models.only
    if only is not None and models.keeps_only_one:
        return service_health(only)

    ending = end_of(supervisor)
    if ending is not None:
        return ending

    if not models.keeps_only_one:
        # A model that fails is no fault of the server.
        return 200, {"status": "Healthy"}

    return 503, {
        "status": "Loading",
        "stage": supervisor.stage or "start",
        "progress": round(supervisor.progress, 3),
    }


def liveness(models: Models) -> tuple[int, dict[str, object]]:
    """Return `health`, but 200 for 503: the server restarts its engines itself, and a new server
    would load longer.
    """
    status, body = health(models)
    if status == 503:
        status = 200

    return status, body


def end_of(supervisor: SupervisorRecord) -> tuple[int, dict[str, object]] | None:
    """Return status and state of a server that ends, else None."""
    if supervisor.phase == Phase.FAILED:
        return 500, {"status": "Failed", "reason": supervisor.reason}

    # A server with an heir goes on answering: the heir answers the other requests.
    is_leaving = supervisor.phase in (Phase.LEAVING, Phase.DRAINING) and not supervisor.heir
    return (503, {"status": "Draining"}) if is_leaving else None


def service_health(service: Service) -> tuple[int, dict[str, object]]:
    """Return the status of one model and its state."""
    front_end = service.front_end
    block = service.block
    ending = end_of(front_end.block.supervisor)
    if ending is not None:
        return ending

    num_alive = 0
    if has_formatters(block):
        num_alive = sum(engine.is_alive for engine in block.engines)

    if num_alive == len(block.engines):
        return 200, {"status": "Healthy"}

    if num_alive:
        status = 207 if front_end.config.allow_multi_status else 200
        return status, {
            "status": "Healthy",
            "engines_ready": num_alive,
            "engines": len(block.engines),
        }

    return 503, unready(block)


def has_formatters(block: Block) -> bool:
    """Whether a process of user code is alive, if the model has formatters."""
    if not block.formatters:
        return True

    return any(formatter.is_alive for formatter in block.formatters)


def unready(block: Block) -> dict[str, object]:
    """Return the reason why no engine can serve. It is that of the engine with the most
    progress.
    """
    records = block.engines if has_formatters(block) else block.formatters
    engine = max(records, key=lambda engine: (engine.phase != Phase.LOST, engine.progress))
    if engine.phase == Phase.READY:
        return {"status": "Unresponsive", "silent_s": round(time.monotonic() - engine.beat_s, 1)}

    loading: dict[str, object] = {
        "stage": engine.stage or "start",
        "progress": round(engine.progress, 3),
    }
    if not engine.reason:
        return {"status": "Loading", **loading}

    restart = {
        "reason": engine.reason,
        "lost_for_s": round(time.monotonic() - engine.lost_s, 1),
        "start": engine.num_starts,
    }
    return {"status": "Restarting", **loading, **restart}


ROUTES = [
    ("/ping", ["GET", "HEAD", "POST"], ping),
    ("/healthz", ["GET"], ping),
    ("/readyz", ["GET"], ping),
    ("/livez", ["GET"], live),
]
