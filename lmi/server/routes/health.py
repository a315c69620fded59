"""How the server is. These routes read shared memory and ask no process, so a busy or dead engine
delays none.
"""

import time
from typing import NamedTuple

from lmi.http.exchange import Exchange
from lmi.server.service import Models, Service
from lmi.shared.state import Block, Phase, SupervisorRecord


class Health(NamedTuple):
    """How a server or a model is: the status of HTTP that says so, and the body with the reason."""

    status: int
    body: dict[str, object]


async def ping(exchange: Exchange, models: Models) -> None:
    """Answer 200 if an engine can serve, 503 while none can, and 500 if that is final. The body
    says why.
    """
    state = health(models)
    await exchange.send_json(state.body, state.status)


async def live(exchange: Exchange, models: Models) -> None:
    """Answer 200 unless the server has failed finally, which no restart of an engine mends."""
    state = liveness(models)
    await exchange.send_json(state.body, state.status)


def health(models: Models) -> Health:
    """Return what `/ping` answers."""
    supervisor = models.front_end.block.supervisor
    only = models.only
    if only is not None and models.keeps_only_one:
        return service_health(only)

    ending = end_of(supervisor)
    if ending is not None:
        return ending

    if not models.keeps_only_one:
        # A model that fails is no fault of the server.
        return Health(200, {"status": "Healthy"})

    loading: dict[str, object] = {
        "status": "Loading",
        "stage": supervisor.stage or "start",
        "progress": round(supervisor.progress, 3),
    }
    return Health(503, loading)


def liveness(models: Models) -> Health:
    """Return `health`, but 200 for 503: the server restarts its engines itself, and a new server
    would load longer.
    """
    state = health(models)
    return state._replace(status=200) if state.status == 503 else state


def end_of(supervisor: SupervisorRecord) -> Health | None:
    """Return the health of a server that ends, else None."""
    if supervisor.phase == Phase.FAILED:
        return Health(500, {"status": "Failed", "reason": supervisor.reason})

    # A server with an heir goes on answering: the heir answers the other requests.
    is_leaving = supervisor.phase in (Phase.LEAVING, Phase.DRAINING)
    if is_leaving and not supervisor.heir:
        return Health(503, {"status": "Draining"})

    return None


def service_health(service: Service) -> Health:
    """Return the health of one model."""
    front_end = service.front_end
    block = service.block
    ending = end_of(front_end.block.supervisor)
    if ending is not None:
        return ending

    num_alive = 0
    if has_formatters(block):
        num_alive = sum(engine.is_alive for engine in block.engines)

    if num_alive == len(block.engines):
        return Health(200, {"status": "Healthy"})

    if num_alive:
        status = 207 if front_end.config.allow_multi_status else 200
        numbers = {"engines_ready": num_alive, "engines": len(block.engines)}
        return Health(status, {"status": "Healthy", **numbers})

    return Health(503, unready(block))


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
