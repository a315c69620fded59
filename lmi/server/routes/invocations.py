"""The LMI door: `/invocations`, and the same under a model's name."""

from __future__ import annotations

from lmi.dialects import LMI
from lmi.errors import LmiError, shorten
from lmi.server.exchange import Exchange
from lmi.server.respond import answer
from lmi.server.service import Service


def check_model(service: Service, name: str, version: str | None = None) -> None:
    """Raise UnknownModel for what is not served here. The name `model` always answers."""
    model = service.config.model
    if name not in (model.name, "model"):
        raise UnknownModel(f"no model {shorten(name)} is served here, only {model.name!r}")
    if version is not None and version != model.version:
        raise UnknownModel(f"no version {shorten(version)} of the model is served here, only {model.version!r}")


class UnknownModel(LmiError):
    """The path names a model or version that is not served here."""

    status = 404
    label = "unknown_model"


async def invocations(exchange: Exchange, service: Service) -> None:
    await answer(exchange, service, LMI)


async def invoke_model(exchange: Exchange, service: Service) -> None:
    """`/predictions/{model}[/{version}]` and `/models/{model}/invoke`."""
    named = exchange.scope["path_params"]
    check_model(service, named["model"], named.get("version"))
    await answer(exchange, service, LMI)


ROUTES = [
    ("/invocations", ["POST"], invocations),
    ("/predictions/{model}", ["POST"], invoke_model),
    ("/predictions/{model}/{version}", ["POST"], invoke_model),
    ("/models/{model}/invoke", ["POST"], invoke_model),
]
