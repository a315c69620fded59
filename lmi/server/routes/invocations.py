"""The LMI door: `/invocations`, and the same under a model's name."""

from __future__ import annotations

from lmi.dialects import LMI
from lmi.errors import LmiError, shorten
from lmi.server.exchange import Exchange
from lmi.server.respond import answer
from lmi.server.service import Service


class UnknownModel(LmiError):
    """The path names a model or version that is not served here."""

    status = 404
    label = "unknown_model"


async def invocations(exchange: Exchange, service: Service) -> None:
    await answer(exchange, service, LMI)


async def invoke_model(exchange: Exchange, service: Service) -> None:
    """`/predictions/{model}[/{version}]` and `/models/{model}/invoke`. The name `model` always answers."""
    named = exchange.scope["path_params"]
    model = service.config.model
    if named["model"] not in (model.name, "model"):
        raise UnknownModel(f"no model {shorten(named['model'])} is served here, only {model.name!r}")
    if named.get("version", model.version) != model.version:
        raise UnknownModel(
            f"no version {shorten(named['version'])} of the model is served here, only {model.version!r}"
        )
    await answer(exchange, service, LMI)
