"""Which adapter answers a request: that of a header, else of the query, else of the body.

An empty name and the model's own names mean the model without an adapter. At `/invocations` its own
names are also `lmi`, under which the reference serves a model, and the name of the endpoint, which
litellm sends, as far as the gateway tells it. A name that is not registered is refused, and never
answered by the model in its place.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lmi.adapters.files import OPTION, is_enabled
from lmi.adapters.registry import NotRegistered
from lmi.apis.base.readers import Parsed
from lmi.apis.openai.schema import OpenAIFormat
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


async def choose_adapter(exchange: Exchange, service: Service, parsed: Parsed[Any]) -> Parsed[Any]:
    """Return the requests, each with its adapter.

    Raises UnknownAdapter or UnknownModel for a name that is not registered, Unavailable if no
    engine is ready that may have the adapter, and why it cannot be loaded if no engine can.
    """
    outside = list(_named_outside(exchange))
    in_body = tuple(request.adapter for request in parsed.requests)
    if not outside and not any(in_body):
        return parsed

    is_model = False
    model = service.config.model
    format = parsed.format
    own = ["", *model.names]
    chosen = in_body
    if outside:
        (place, counts), *others = outside
        losers = [
            name
            for name in (*(name for _, name in others), *filter(None, in_body))
            if name != counts
        ]
        lines = [f"the adapter {shorten(name)} has no effect beside {place}" for name in losers[:1]]
        service.front_end.report_ignored(lines, exchange.request_id)
        chosen = (counts,) * len(in_body)
    elif isinstance(format, OpenAIFormat) and not format.is_adapter_named:
        is_model = True
        if not exchange.path.startswith(
            OPENAI_PATHS
        ):  # at `/invocations`, unless an adapter has the name
            further = (OF_THE_REFERENCE, exchange.headers.get(ENDPOINT_NAME, ""))
            own += [
                name
                for name in further
                if service.adapters is None or not service.adapters.has(name)
            ]

    names = [
        None if name is None or name in own or model.answers_to(name) else name for name in chosen
    ]
    for name in dict.fromkeys(name for name in names if name is not None):
        await _find(service, name, alias(exchange) or name, is_model=is_model)

    if isinstance(format, OpenAIFormat):
        format = replace(format, model=names[0] or model.name, adapter=names[0])
        if format.is_adapter_named:
            format = replace(format, field_names={**format.field_names, "lora_config": "adapters"})

    requests = tuple(
        replace(one, adapter=name) for one, name in zip(parsed.requests, names, strict=True)
    )
    return replace(parsed, requests=requests, format=format)


def alias(exchange: Exchange) -> str | None:
    """Return the name that messages have for the adapter, if the client sent one that
    can be shown.
    """
    given = exchange.headers.get(ALIAS, "")
    return given if SAFE_ALIAS.fullmatch(given) else None


def _named_outside(exchange: Exchange) -> Iterator[tuple[str, str]]:
    """Yield where an adapter is named outside the body, and the name. The first counts."""
    if (header := exchange.headers.get(HEADER)) is not None:
        yield f"the header {HEADER}", header.strip()

    if exchange.scope.get("query_string") and (named := exchange.query.get(QUERY)) is not None:
        yield f"the query's {QUERY}", named


async def _find(service: Service, name: str, said: str, *, is_model: bool) -> None:
    """Make sure that this front end's engines know a registered adapter. Raises an error for any
    other name.
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
            raise unknown_adapter(said) from None

        if not is_enabled(service.config.engine.options):
            raise Unsupported("lora_config", f"adapters are switched on by {OPTION}=true") from None

        return  # the pipeline says that this engine has no adapters

    await engines.wait_for(lambda: name in engines.adapters or registry.failure(name))
    if name not in engines.adapters:
        raise registry.why_unusable(entry, said)
