"""The LMI door: `/invocations`, and the same under a model's name."""

from __future__ import annotations

from lmi.dialects import LMI
from lmi.server.exchange import Exchange
from lmi.server.respond import answer
from lmi.server.service import Service


async def invocations(exchange: Exchange, service: Service) -> None:
    await answer(exchange, service, LMI)


async def invoke_model(exchange: Exchange, service: Service) -> None:
    """`/predictions/{model}[/{version}]` and `/models/{model}/invoke`."""
    named = exchange.scope["path_params"]
    service.check_model(named["model"], named.get("version"))
    await answer(exchange, service, LMI)


ROUTES = [
    ("/invocations", ["POST"], invocations),
    ("/predictions/{model}", ["POST"], invoke_model),
    ("/predictions/{model}/{version}", ["POST"], invoke_model),
    ("/models/{model}/invoke", ["POST"], invoke_model),
]
