"""Routes that register LoRA adapters while the server runs: `/adapters`,
`/models/{model}/adapters`, and vLLM's pair.

Parameters are in the query or in a JSON body. `description` has all for /openapi.json. Source:
LMI's adapter management and AWS's inference components, with the differences that docs/apis.md
lists.
"""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace
from starlette.exceptions import HTTPException

from lmi import errors
from lmi.adapters.choice import ALIAS, alias
from lmi.adapters.files import NOT_RUN, SCRIPT, Adapter, is_enabled
from lmi.adapters.registry import (
    AdapterRegistry,
    AdapterUnusable,
    NameTaken,
    NotRegistered,
    check_free,
)
from lmi.apis.base.body import read_object
from lmi.apis.base.readers import Reader, boolean, json_schema_of, refused, text
from lmi.apis.openai.api import OPENAI_CHAT
from lmi.description.operations import ApiDescription
from lmi.description.schemas import (
    STRING,
    Schema,
    answer_object,
    content,
    parameter,
    request_object,
)
from lmi.errors import (
    InvalidParameter,
    InvalidRequest,
    UserCodeFailed,
    shorten,
    without_paths,
)
from lmi.http.exchange import Exchange
from lmi.models.pages import PAGE, page
from lmi.server.service import Service
from lmi.settings.config import Config
from lmi.shared.desired_state import NAME_PATTERN, State, check_name
from lmi.user_code.calls import AdapterCode

TEXT = "text/plain; charset=utf-8"
WORDS = {"true": True, "false": False}
Handler = Callable[[Exchange, Service], Awaitable[None]]


class AdapterName(NamedTuple):
    name: str
    # In messages.
    label: str


def flag(name: str, value: object) -> bool:
    """Read a boolean, which is a word in the query."""
    if isinstance(value, str):
        value = WORDS.get(value.lower(), value)

    return bool(boolean(name, value))


PARAMETERS: dict[str, Reader] = {"name": text, "src": text, "preload": flag, "pin": flag}
LORA_PARAMETERS: dict[str, Reader] = {
    "lora_name": text,
    "lora_path": text,
    "load_inplace": refused("unload the adapter first", False),
    "is_3d_lora_weight": refused("the files say what form the weights have", False),
}


async def register(exchange: Exchange, service: Service) -> None:
    """Load an adapter on every engine, or on none."""
    registry, values = await _read_parameters(exchange, service, PARAMETERS)
    label = await _load(exchange, service, registry, values, "name", "src")
    await exchange.send_json({"status": f"Adapter {label} registered"})


async def load_lora(exchange: Exchange, service: Service) -> None:
    """Load an adapter, asked with vLLM's body and answered with its sentence."""
    registry, values = await _read_parameters(exchange, service, LORA_PARAMETERS)
    try:
        label = await _load(exchange, service, registry, values, "lora_name", "lora_path")
    except InvalidParameter as error:
        raise InvalidRequest(error.spelled({"name": "lora_name", "src": "lora_path"})) from None

    sentence = f"Success: LoRA adapter '{label}' added successfully."
    await exchange.send_whole(200, TEXT, sentence.encode())


async def unload_lora(exchange: Exchange, service: Service) -> None:
    registry, values = await _read_parameters(exchange, service, LORA_PARAMETERS)
    name = _required(values, "lora_name")
    await registry.unregister(name, _label(exchange, name))
    sentence = f"Success: LoRA adapter '{name}' removed successfully."
    await exchange.send_whole(200, TEXT, sentence.encode())


async def _load(
    exchange: Exchange,
    service: Service,
    registry: AdapterRegistry,
    values: Mapping[str, Any],
    name_key: str,
    src_key: str,
) -> str:
    """Load an adapter, whose name and source have these keys. Returns its name in messages."""
    from lmi.adapters.source import fetch_adapter

    name = _required(values, name_key)
    src = _required(values, src_key)
    check_name(name)
    if name in service.config.model.names:
        raise NameTaken(f"name {name} belongs to the model")

    preload = values.get("preload", True)
    pin = values.get("pin", False)
    _check_pin(preload, pin)
    label = alias(exchange) or name
    # Already before a fetch; `register` decides.
    check_free(registry.folder.read(name), label)
    folder = await fetch_adapter(src, service.config, service.front_end)
    entry = Adapter(
        name=name, path=str(folder), src=src, preload=preload, is_pinned=pin, state=State.PENDING
    )
    await _load_code(service, name, folder)
    await registry.register(entry, label)
    return label


async def _load_code(service: Service, name: str, folder: Path) -> None:
    """Import the adapter's own code, if it has any. Raises AdapterUnusable where it does not run,
    because without it the answers are others, and with what it raises.
    """
    code = AdapterCode.of(name, folder / SCRIPT)
    if code is None:
        return

    configured_code = service.config.user_code
    if configured_code is None or not configured_code.runs_adapters:
        raise AdapterUnusable(NOT_RUN)

    assert service.user_code is not None
    try:
        await service.user_code.formatters_of(code)
    except UserCodeFailed as error:
        raise AdapterUnusable(f"{SCRIPT} of the adapter cannot be used: {error}") from None


async def update(exchange: Exchange, service: Service) -> None:
    """Pin or preload a registered adapter on every engine, or on none."""
    registry, values = await _read_parameters(exchange, service, PARAMETERS)
    name, label = _adapter_of(exchange)
    old = registry.find(name, label)
    if values.get("src", old.src) != old.src:
        raise InvalidParameter(
            "src", "that of the registered adapter; delete it and register it again", values["src"]
        )

    if old.is_pinned and not values.get("pin", True):
        raise InvalidParameter(
            "pin", "true for a pinned adapter; delete it and register it again", False
        )

    pin = values.get("pin", old.is_pinned)
    preload = values.get("preload", old.preload or pin)
    _check_pin(preload, pin)
    await registry.update(replace(old, preload=preload, is_pinned=pin), label)
    await exchange.send_json({"status": f"Adapter {label} updated"})


async def unregister(exchange: Exchange, service: Service) -> None:
    """Unload an adapter from every engine. Requests that run with it finish."""
    registry = await _registry(exchange, service)
    name, label = _adapter_of(exchange)
    await registry.unregister(name, label)
    await exchange.send_json({"status": f"Adapter {label} unregistered"})


async def describe(exchange: Exchange, service: Service) -> None:
    registry = await _registry(exchange, service)
    name, label = _adapter_of(exchange)
    await exchange.send_json(_as_json(registry.find(name, label), registry))


async def list_all(exchange: Exchange, service: Service) -> None:
    registry = await _registry(exchange, service)
    entries, more = page(registry.entries(), exchange.query)
    adapters = [_as_json(entry, registry) for entry in entries]
    await exchange.send_json({"adapters": adapters, **more})


async def _registry(exchange: Exchange, service: Service) -> AdapterRegistry:
    """Return the registry. Raises HTTPException, UnknownModel, Unavailable, or InvalidRequest if
    there is no LoRA.
    """
    if not service.config.server.management:
        raise HTTPException(404, "adapters cannot be changed here (management=false)")

    service.front_end.check_serves()
    model = exchange.scope["path_params"].get("model")
    if model is not None:
        service.check_model(model)

    if service.config.is_user_code or service.engines is None or service.adapters is None:
        raise InvalidRequest("the model is user code, which has no adapters")

    if not is_enabled(service.config.engine.options):
        raise InvalidRequest("LoRA is not enabled.")

    engine = await service.engines.ready()
    if not engine.capabilities.lora:
        raise InvalidRequest(f"the engine {engine.name} has no adapters")

    return service.adapters


async def _read_parameters(
    exchange: Exchange, service: Service, readers: Mapping[str, Reader]
) -> tuple[AdapterRegistry, dict[str, Any]]:
    """Return the registry, and the values in the query and the body. Raises InvalidParameter for a
    value that differs in the two.
    """
    registry = await _registry(exchange, service)
    body = await exchange.body(
        service.config.server.max_request_size, service.front_end.body_memory
    )
    fields = read_object(body) if body.strip() else {}
    values: dict[str, Any] = {}
    for parameters in (exchange.query, fields):
        for name, read_value in readers.items():
            if parameters.get(name) is None:
                continue

            value = read_value(name, parameters[name])
            if values.setdefault(name, value) != value:
                raise InvalidParameter(name, "the same in the query and the body", value)

    return registry, values


def _required(values: Mapping[str, Any], name: str) -> str:
    if not values.get(name):
        raise InvalidRequest(f"{name} is missing")

    return str(values[name])


def _check_pin(preload: bool, pin: bool) -> None:
    if pin and not preload:
        raise InvalidParameter("preload", "true with pin=true", preload)


def _adapter_of(exchange: Exchange) -> AdapterName:
    """Return the name of the adapter in the path."""
    name = str(exchange.scope["path_params"]["adapter"])
    return AdapterName(name, _label(exchange, name))


def _label(exchange: Exchange, name: str) -> str:
    """Return the name of an adapter in messages."""
    return alias(exchange) or shorten(name, 258)[1:-1]


def _as_json(entry: Adapter, registry: AdapterRegistry) -> dict[str, object]:
    """Return an adapter as a client sees it, with the reason if an engine could not
    load it again.
    """
    adapter = {
        "name": entry.name,
        "src": entry.src,
        "preload": entry.preload,
        "pin": entry.is_pinned,
    }
    reason = registry.failure(entry.name)
    if reason is not None:
        adapter["reason"] = without_paths(reason, {entry.path: entry.src})

    return adapter


def _routes_below(prefix: str) -> list[tuple[str, list[str], Handler]]:
    return [
        (f"{prefix}/adapters", ["POST"], register),
        (f"{prefix}/adapters", ["GET"], list_all),
        (f"{prefix}/adapters/{{adapter}}", ["GET"], describe),
        (f"{prefix}/adapters/{{adapter}}", ["DELETE"], unregister),
        (f"{prefix}/adapters/{{adapter}}/update", ["POST"], update),
    ]


ROUTES = [*_routes_below(""), *_routes_below("/models/{model}")]
LORA_ROUTES = [
    ("/v1/load_lora_adapter", ["POST"], load_lora),
    ("/v1/unload_lora_adapter", ["POST"], unload_lora),
]
READING = (InvalidRequest, NotRegistered)
CHANGING = (
    *READING,
    NameTaken,
    AdapterUnusable,
    errors.Overloaded,
    errors.DeadlineExceeded,
    errors.OutOfMemory,
)
WORD = json_schema_of(text)
FLAG = json_schema_of(boolean)
SETTINGS: dict[str, Schema] = {
    "preload": {**FLAG, "default": True},
    "pin": {**FLAG, "default": False},
}
SRC = {
    **WORD,
    "description": (
        "a LoRA adapter: a folder below the model's, /opt/ml, download_dir or adapter_roots; "
        "owner/name of a hub; s3://bucket/prefix; s3://bucket/key.tar.gz"
    ),
}
NEW: dict[str, Schema] = {"name": {**WORD, "pattern": f"^{NAME_PATTERN}$"}, "src": SRC, **SETTINGS}
LABEL = parameter("header", ALIAS, str, "replaces the adapter's name in messages")
SCHEMAS = {
    "Adapter": answer_object(
        {"name": str, "src": str, "preload": bool, "pin": bool, "reason": str}, optional=("reason",)
    ),
    "Adapters": answer_object(
        {"adapters": ["Adapter"], "nextPageToken": str}, optional=("nextPageToken",)
    ),
    "AdapterChange": answer_object({"status": str}),
}


def description(config: Config) -> ApiDescription:
    about = "LoRA adapters of the model, changed while the server runs."
    api = ApiDescription(
        name="adapters",
        about=about,
        model=config.model,
        schemas=SCHEMAS,
    )

    def change(
        method: str, path: str, summary: str, settings: dict[str, Schema] | None = None
    ) -> None:
        """Describe a change. Each of its settings may stand in the query or in the body."""
        in_query = [parameter("query", name, schema) for name, schema in (settings or {}).items()]
        changed = api.add(
            method, path, summary, "AdapterChange", CHANGING, parameters=(*in_query, LABEL)
        )
        if settings:
            changed["requestBody"] = {
                "required": False,
                "content": content(request_object(settings)),
            }

    for prefix in ("/adapters", "/models/{model}/adapters"):
        member = f"{prefix}/{{adapter}}"
        api.add("get", prefix, "List the registered adapters", "Adapters", READING, parameters=PAGE)
        api.add("get", member, "Describe a registered adapter", "Adapter", READING)
        change("post", prefix, "Register an adapter", NEW)
        change("delete", member, "Unregister an adapter")
        change("post", f"{member}/update", "Pin or preload an adapter", SETTINGS)

    if not config.is_user_code:
        openai = replace(api, error=content("OpenAIError"), rules=[OPENAI_CHAT.errors])
        answer = {TEXT: {"schema": STRING}}
        name = {"lora_name": NEW["name"]}
        new = request_object(
            name | {"lora_path": SRC},
            required=("lora_name", "lora_path"),
        )
        old = request_object(name, required=("lora_name",))
        openai.add(
            "post",
            "/v1/load_lora_adapter",
            "Register an adapter by lora_name",
            answer,
            CHANGING,
            body=content(new),
        )
        openai.add(
            "post",
            "/v1/unload_lora_adapter",
            "Unregister an adapter by lora_name",
            answer,
            CHANGING,
            body=content(old),
        )

    return api
