"""`/ping` and `/metrics`. They read only shared memory, so a busy or dead engine cannot delay them."""

from __future__ import annotations

import time

import orjson

from lmi.http.exchange import Exchange
from lmi.server import metrics
from lmi.server.service import Service
from lmi.shared.state import Phase


async def ping(exchange: Exchange, service: Service) -> None:
    """Answer 200 if an engine can serve, 503 while none can, and 500 if that is final. The body says why."""
    status, body = health(service)
    await exchange.send_whole(status, "application/json", orjson.dumps(body))


async def scrape(exchange: Exchange, service: Service) -> None:
    await exchange.send_whole(200, metrics.MEDIA_TYPE, metrics.render(service.block, service.config))


def health(service: Service) -> tuple[int, dict[str, object]]:
    supervisor, engines = service.block.supervisor, service.block.engines
    num_alive = sum(engine.is_alive for engine in engines) if has_formatters(service) else 0
    if supervisor.phase == Phase.FAILED:
        return 500, {"status": "Failed", "reason": supervisor.reason}
    if supervisor.phase == Phase.DRAINING:
        return 503, {"status": "Draining"}
    if num_alive == len(engines):
        return 200, {"status": "Healthy"}
    if num_alive:
        status = 207 if service.config.server.allow_multi_status else 200
        return status, {"status": "Healthy", "engines_ready": num_alive, "engines": len(engines)}
    return 503, unready(service)


def has_formatters(service: Service) -> bool:
    """Whether a process of user code is alive, if the model has formatters."""
    formatters = service.block.formatters
    return not formatters or any(formatter.is_alive for formatter in formatters)


def unready(service: Service) -> dict[str, object]:
    """Return the reason why no engine can serve. It is that of the engine with the most progress."""
    records = service.block.engines if has_formatters(service) else service.block.formatters
    engine = max(records, key=lambda engine: (engine.phase != Phase.LOST, engine.progress))
    if engine.phase == Phase.READY:
        return {"status": "Unresponsive", "silent_s": round(time.monotonic() - engine.beat_s, 1)}
    loading: dict[str, object] = {"stage": engine.stage or "start", "progress": round(engine.progress, 3)}
    if not engine.reason:
        return {"status": "Loading", **loading}
    restart = {
        "reason": engine.reason,
        "lost_for_s": round(time.monotonic() - engine.lost_s, 1),
        "start": engine.num_starts,
    }
    return {"status": "Restarting", **loading, **restart}


ROUTES = [("/ping", ["GET", "HEAD", "POST"], ping), ("/metrics", ["GET"], scrape)]
