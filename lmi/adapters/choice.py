"""Which adapter answers a request: that of a header, else of the query, else of the body.

An empty name and the model's own names mean the model without an adapter. At `/invocations` its own
names are also `lmi`, under which the reference serves a model, and the name of the endpoint, which
litellm sends, as far as the gateway tells it. A name that is not registered is refused, and never
answered by the model in its place.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from lmi.adapters.files import HEADER, OPTION, QUERY, is_enabled
from lmi.adapters.registry import NotRegistered
from lmi.apis.base.body import Parsed
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.capabilities import unknown_adapter
from lmi.errors import UnknownModel, Unsupported, shorten
from lmi.http.exchange import ENDPOINT_NAME, Exchange
from lmi.models.choice import OPENAI_PATHS
from lmi.server.service import Service
from lmi.settings.config import ModelConfig

ALIAS = "X-Amzn-SageMaker-Adapter-Alias"
OF_THE_REFERENCE = "lmi"
SAFE_ALIAS = re.compile(r"[ -~]{1,256}")
# A front end hears at once of an adapter that an engine has loaded.
TOLD_WITHIN_S = 2.0


class Naming(NamedTuple):
    """The name of an adapter outside the body, and where it stands."""

    place: str
    name: str


async def choose_adapter(exchange: Exchange, service: Service, parsed: Parsed[Any]) -> Parsed[Any]:
    """Return the requests, each with its adapter.

    Raises UnknownAdapter or UnknownModel for a name that is not registered, Unavailable if no
    engine is ready that may have the adapter, and why it cannot be loaded if no engine can.
    """
    names_outside = list(_names_outside(exchange))
    names = [request.adapter for request in parsed.requests]
    if not names_outside and not any(names):
        return parsed

    format = parsed.format
    names_of_model = ["", *service.config.model.names]
    # In OpenAI's API the name of an adapter may stand where that of the model does.
    is_in_model = False
    if names_outside:
        _report_ignored(exchange, service, names_outside, names)
        names = [names_outside[0].name] * len(names)
    elif isinstance(format, OpenAIFormat) and not format.is_adapter_named:
        is_in_model = True
        names_of_model += _further_names(exchange, service)

    adapters = [_adapter_of(name, service.config.model, names_of_model) for name in names]
    for adapter in dict.fromkeys(adapters):
        if adapter is not None:
            label = alias(exchange) or adapter
            await _make_known(service, adapter, label, is_in_model=is_in_model)

    if isinstance(format, OpenAIFormat):
        format = _with_adapter(format, adapters[0], service.config.model)

    requests = tuple(
        replace(request, adapter=adapter)
        for request, adapter in zip(parsed.requests, adapters, strict=True)
    )
    return replace(parsed, requests=requests, format=format)


def _adapter_of(name: str | None, model: ModelConfig, names_of_model: list[str]) -> str | None:
    """Return the adapter of a name. Returns None without a name, and for one of the model."""
    if name is None or name in names_of_model or model.answers_to(name):
        return None

    return name


def _with_adapter(format: OpenAIFormat, adapter: str | None, model: ModelConfig) -> OpenAIFormat:
    """Return the format of an answer that names the adapter as its model, or else the model."""
    format = replace(format, model=adapter or model.name, adapter=adapter)
    if not format.is_adapter_named:
        return format

    return replace(format, field_names={**format.field_names, "lora_config": "adapters"})


def _names_outside(exchange: Exchange) -> Iterator[Naming]:
    """Yield the names of an adapter outside the body. The first counts."""
    header = exchange.headers.get(HEADER)
    if header is not None:
        yield Naming(f"the header {HEADER}", header.strip())

    if exchange.scope.get("query_string"):
        name = exchange.query.get(QUERY)
        if name is not None:
            yield Naming(f"the query's {QUERY}", name)


def _report_ignored(
    exchange: Exchange,
    service: Service,
    names_outside: list[Naming],
    names_in_body: list[str | None],
) -> None:
    """Report the first name without effect, because a name outside the body goes before it."""
    first = names_outside[0]
    later_names = [naming.name for naming in names_outside[1:]]
    names = [*later_names, *filter(None, names_in_body)]
    ignored = next((name for name in names if name != first.name), None)
    if ignored is not None:
        line = f"the adapter {shorten(ignored)} has no effect beside {first.place}"
        service.front_end.report_ignored([line], exchange.request_id)


def _further_names(exchange: Exchange, service: Service) -> list[str]:
    """Return the model's further names at `/invocations`, unless an adapter has them."""
    if exchange.path.startswith(OPENAI_PATHS):
        return []

    names = (OF_THE_REFERENCE, exchange.headers.get(ENDPOINT_NAME, ""))
    registry = service.adapters
    return [name for name in names if registry is None or not registry.has(name)]


def alias(exchange: Exchange) -> str | None:
    """Return the name that messages have for the adapter, if the client sent one that
    can be shown.
    """
    name = exchange.headers.get(ALIAS, "")
    return name if SAFE_ALIAS.fullmatch(name) else None


async def _make_known(service: Service, name: str, label: str, *, is_in_model: bool) -> None:
    """Wait until this front end knows an engine that has a registered adapter. Raises an error for
    any other name.

    `label` is its name in messages. With `is_in_model` it stands where the name of a model does.
    """
    engines = service.engines
    registry = service.adapters
    if engines is None or registry is None or name in engines.adapters:
        return

    try:
        entry = registry.find(name)
    except NotRegistered:
        if is_in_model:
            raise UnknownModel(
                f"the model {shorten(name)} does not exist, only {service.served_names}"
            ) from None

        if (await engines.ready()).capabilities.lora:
            raise unknown_adapter(label) from None

        if not is_enabled(service.config.engine.options):
            raise Unsupported("lora_config", f"adapters are switched on by {OPTION}=true") from None

        # The pipeline says that this engine has no adapters.
        return

    await engines.wait_for(
        lambda: name in engines.adapters or registry.failure(name), TOLD_WITHIN_S
    )
    if name not in engines.adapters:
        raise registry.why_unusable(entry, label)
