"""Which adapter answers a request: that of a header, else of the query, else of the body.

An empty name and the model's own names mean the model without an adapter. At `/invocations` its own
names are also `lmi`, under which the reference serves a model, and the name of the endpoint, which
litellm sends, as far as the gateway tells it. A name that is not registered is refused, and never
answered by the model in its place.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from lmi.adapters.files import OPTION, is_enabled
from lmi.adapters.registry import NotRegistered
from lmi.apis.base.readers import Parsed
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.capabilities import unknown_adapter
from lmi.errors import UnknownModel, Unsupported, shorten
from lmi.http.exchange import ENDPOINT_NAME, Exchange
from lmi.models.choice import OPENAI_PATHS
from lmi.server.service import Service

HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
QUERY = "adapter"
ALIAS = "X-Amzn-SageMaker-Adapter-Alias"
OF_THE_REFERENCE = "lmi"
SAFE_ALIAS = re.compile(r"[ -~]{1,256}")


class Naming(NamedTuple):
    """The name of an adapter outside the body, and where it stands."""

    place: str
    name: str


async def choose_adapter(exchange: Exchange, service: Service, parsed: Parsed[Any]) -> Parsed[Any]:
    """Return the requests, each with its adapter.

    Raises UnknownAdapter or UnknownModel for a name that is not registered, Unavailable if no
    engine is ready that may have the adapter, and why it cannot be loaded if no engine can.
    """
    outside = list(_names_outside(exchange))
    in_body = tuple(request.adapter for request in parsed.requests)
    if not outside and not any(in_body):
        return parsed

    model = service.config.model
    format = parsed.format
    names_of_model = ["", *model.names]
    names = in_body
    is_model = False
    if outside:
        names = (outside[0].name,) * len(in_body)
        _report_ignored(exchange, service, outside, in_body)
    elif isinstance(format, OpenAIFormat) and not format.is_adapter_named:
        is_model = True
        names_of_model += _further_names(exchange, service)

    adapters = list[str | None]()
    for name in names:
        is_adapter = name is not None and name not in names_of_model and not model.answers_to(name)
        adapters.append(name if is_adapter else None)

    for name in dict.fromkeys(name for name in adapters if name is not None):
        await _find(service, name, alias(exchange) or name, is_model=is_model)

    if isinstance(format, OpenAIFormat):
        format = replace(format, model=adapters[0] or model.name, adapter=adapters[0])
        if format.is_adapter_named:
            field_names = {**format.field_names, "lora_config": "adapters"}
            format = replace(format, field_names=field_names)

    requests = tuple(
        replace(request, adapter=name)
        for request, name in zip(parsed.requests, adapters, strict=True)
    )
    return replace(parsed, requests=requests, format=format)


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
    outside: list[Naming],
    in_body: tuple[str | None, ...],
) -> None:
    """Report the first name without effect, because a name outside the body goes before it."""
    first = outside[0]
    names = [*(naming.name for naming in outside[1:]), *filter(None, in_body)]
    lines = list[str]()
    for name in names:
        if name != first.name:
            lines.append(f"the adapter {shorten(name)} has no effect beside {first.place}")
            break

    service.front_end.report_ignored(lines, exchange.request_id)


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


async def _find(service: Service, name: str, label: str, *, is_model: bool) -> None:
    """Make sure that this front end's engines know a registered adapter. Raises an error for any
    other name. `label` is its name in messages.
    """
    engines = service.engines
    registry = service.adapters
    if engines is None or registry is None or name in engines.adapters:
        return

    try:
        entry = registry.find(name)
    except NotRegistered:
        if is_model:
            raise UnknownModel(
                f"the model {shorten(name)} does not exist, only {service.served_names}"
            ) from None

        if (await engines.ready()).capabilities.lora:
            raise unknown_adapter(label) from None

        if not is_enabled(service.config.engine.options):
            raise Unsupported("lora_config", f"adapters are switched on by {OPTION}=true") from None

        # The pipeline says that this engine has no adapters.
        return

    await engines.wait_for(lambda: name in engines.adapters or registry.failure(name))
    if name not in engines.adapters:
        raise registry.why_unusable(entry, label)
