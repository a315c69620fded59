"""Routes that register LoRA adapters while the server runs: `/adapters`,
`/models/{model}/adapters`, and vLLM's pair.

Parameters are in the query or in a JSON body. `description` has all for /openapi.json. Source:
LMI's adapter management and AWS's inference components, with the differences that docs/apis.md
lists.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace
from starlette.exceptions import HTTPException

from lmi import errors
from lmi.adapters.choice import ALIAS, alias
from lmi.adapters.files import Adapter, is_enabled
from lmi.adapters.registry import (
    AdapterRegistry,
    AdapterUnusable,
    NameTaken,
    NotRegistered,
    check_free,
)
from lmi.apis.base.readers import Reader, boolean, json_schema_of, read_object, refused, text
from lmi.apis.openai.api import OPENAI_CHAT
from lmi.description.parts import STRING, ApiDescription, Schema, asked, content, parameter, struct
from lmi.errors import InvalidParameter, InvalidRequest, shorten, without_paths
from lmi.http.exchange import Exchange
from lmi.models.routes import PAGE, page
from lmi.server.service import Service
from lmi.settings.config import Config
from lmi.shared.desired_state import NAME_PATTERN, State, check_name

TEXT = "text/plain; charset=utf-8"
SCRIPT = "model.py"
WORDS = {"true": True, "false": False}


def flag(name: str, value: object) -> bool:
    """Read a boolean, which is a word in the query."""
    meant = WORDS.get(value.lower(), value) if isinstance(value, str) else value
    return bool(boolean(name, meant))


PARAMETERS: dict[str, Reader] = {"name": text, "src": text, "preload": flag, "pin": flag}
LORA_PARAMETERS: dict[str, Reader] = {
    "lora_name": text,
    "lora_path": text,
    "load_inplace": refused("unload the adapter first", False),
    "is_3d_lora_weight": refused("the files say what form the weights have", False),
}


async def register(exchange: Exchange, service: Service) -> None:
    """Load an adapter on every engine, or on none."""
    registry, given = await _asked(exchange, service, PARAMETERS)
    said, warned = await _load(exchange, service, registry, given, "name", "src")
    await exchange.send_json(
        {"status": f"Adapter {said} registered", **({"warning": warned} if warned else {})}
    )


async def load_lora(exchange: Exchange, service: Service) -> None:
    """Load an adapter, asked with vLLM's body and answered with its sentence."""
    registry, given = await _asked(exchange, service, LORA_PARAMETERS)
    try:
        said, _ = await _load(exchange, service, registry, given, "lora_name", "lora_path")
    except InvalidParameter as error:
        raise InvalidRequest(error.spelled({"name": "lora_name", "src": "lora_path"})) from None

    await exchange.send_whole(
        200, TEXT, f"Success: LoRA adapter '{said}' added successfully.".encode()
    )


async def unload_lora(exchange: Exchange, service: Service) -> None:
    registry, given = await _asked(exchange, service, LORA_PARAMETERS)
    name = _given(given, "lora_name")
    await registry.unregister(name, _said(exchange, name))
    await exchange.send_whole(
        200, TEXT, f"Success: LoRA adapter '{name}' removed successfully.".encode()
    )


async def _load(
    exchange: Exchange,
    service: Service,
    registry: AdapterRegistry,
    given: Mapping[str, Any],
    *names: str,
) -> tuple[str, str | None]:
    """Load an adapter, whose name and source have these `names`. Returns its name in messages, and
    a warning.
    """
    from lmi.adapters.source import fetch_adapter

    name, src = (_given(given, each) for each in names)
    check_name(name)
    if name in service.config.model.names:
        raise NameTaken(f"name {name} belongs to the model")

    preload, pin = _checked(given.get("preload", True), given.get("pin", False))
    said = alias(exchange) or name
    check_free(registry.folder.read(name), said)  # before a fetch; `register` decides
    folder = await fetch_adapter(src, service.config, service.front_end)
    entry = Adapter(
        name=name, path=str(folder), src=src, preload=preload, is_pinned=pin, state=State.PENDING
    )
    await registry.register(entry, said)
    return said, f"{SCRIPT} in the adapter's folder is not run" if (
        folder / SCRIPT
    ).exists() else None


async def update(exchange: Exchange, service: Service) -> None:
    """Pin or preload a registered adapter on every engine, or on none."""
    registry, given = await _asked(exchange, service, PARAMETERS)
    name, said = _named(exchange)
    old = registry.find(name, said)
    if given.get("src", old.src) != old.src:
        raise InvalidParameter(
            "src", "that of the registered adapter; delete it and register it again", given["src"]
        )

    if old.is_pinned and not given.get("pin", True):
        raise InvalidParameter(
            "pin", "true for a pinned adapter; delete it and register it again", False
        )

    pin = given.get("pin", old.is_pinned)
    preload, pin = _checked(given.get("preload", old.preload or pin), pin)
    await registry.update(replace(old, preload=preload, is_pinned=pin), said)
    await exchange.send_json({"status": f"Adapter {said} updated"})


async def unregister(exchange: Exchange, service: Service) -> None:
    """Unload an adapter from every engine. Requests that run with it finish."""
    registry = await _registry(exchange, service)
    (name, said) = _named(exchange)
    await registry.unregister(name, said)
    await exchange.send_json({"status": f"Adapter {said} unregistered"})


async def describe(exchange: Exchange, service: Service) -> None:
    registry = await _registry(exchange, service)
    (name, said) = _named(exchange)
    await exchange.send_json(_shown(registry.find(name, said), registry))


async def list_all(exchange: Exchange, service: Service) -> None:
    registry = await _registry(exchange, service)
    entries, more = page(registry.entries(), exchange.query)
    await exchange.send_json({"adapters": [_shown(entry, registry) for entry in entries], **more})


async def _registry(exchange: Exchange, service: Service) -> AdapterRegistry:
    """Return the registry. Raises HTTPException, UnknownModel, Unavailable, or InvalidRequest if
    there is no LoRA.
    """
    if not service.config.server.management:
        raise HTTPException(404, "adapters cannot be changed here (management=false)")

    service.front_end.check_serves()
    if (model := exchange.scope["path_params"].get("model")) is not None:
        service.check_model(model)

    if service.config.is_user_code or service.engines is None or service.adapters is None:
        raise InvalidRequest("the model is user code, which has no adapters")

    if not is_enabled(service.config.engine.options):
        raise InvalidRequest("LoRA is not enabled.")

    engine = await service.engines.ready()
    if not engine.capabilities.lora:
        raise InvalidRequest(f"the engine {engine.name} has no adapters")

    return service.adapters


async def _asked(
    exchange: Exchange, service: Service, readers: Mapping[str, Reader]
) -> tuple[AdapterRegistry, dict[str, Any]]:
    """Return the registry, and the query and the body. Raises InvalidParameter for a value that
    differs in the two.
    """
    registry = await _registry(exchange, service)
    body = await exchange.body(
        service.config.server.max_request_size, service.front_end.body_memory
    )
    given: dict[str, Any] = {}
    for place in (exchange.query, read_object(body) if body.strip() else {}):
        for name, read in readers.items():
            if place.get(name) is not None:
                value = read(name, place[name])
                if given.setdefault(name, value) != value:
                    raise InvalidParameter(name, "the same in the query and the body", value)

    return registry, given


def _given(given: Mapping[str, Any], name: str) -> str:
    if not given.get(name):
        raise InvalidRequest(f"{name} is missing")

    return str(given[name])


def _checked(preload: bool, pin: bool) -> tuple[bool, bool]:
    if pin and not preload:
        raise InvalidParameter("preload", "true with pin=true", preload)

    return preload, pin


def _named(exchange: Exchange) -> tuple[str, str]:
    """Return the adapter's name in the path, and its name in messages."""
    name = str(exchange.scope["path_params"]["adapter"])
    return name, _said(exchange, name)


def _said(exchange: Exchange, name: str) -> str:
    return alias(exchange) or shorten(name, 258)[1:-1]


def _shown(entry: Adapter, registry: AdapterRegistry) -> dict[str, object]:
    """Return an adapter as a client sees it, with the reason if an engine could not
    load it again.
    """
    shown = {"name": entry.name, "src": entry.src, "preload": entry.preload, "pin": entry.is_pinned}
    reason = registry.failure(entry.name)
    return (
        shown
        if reason is None
        else {**shown, "reason": without_paths(reason, {entry.path: entry.src})}
    )


ROUTES = [
    (f"{prefix}/adapters{rest}", [method], handler)
    for prefix in ("", "/models/{model}")
    for rest, method, handler in (
        ("", "POST", register),
        ("", "GET", list_all),
        ("/{adapter}", "GET", describe),
        ("/{adapter}", "DELETE", unregister),
        ("/{adapter}/update", "POST", update),
    )
]
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
    "description": "a LoRA adapter: a folder below the model's, /opt/ml, download_dir or "
    "adapter_roots; "
    "owner/name of a hub; s3://bucket/prefix; s3://bucket/key.tar.gz",
}
NEW: dict[str, Schema] = {"name": {**WORD, "pattern": f"^{NAME_PATTERN}$"}, "src": SRC, **SETTINGS}
SAID = parameter("header", ALIAS, str, "replaces the adapter's name in messages")
SCHEMAS = {
    "Adapter": struct("reason", name=str, src=str, preload=bool, pin=bool, reason=str),
    "Adapters": struct("nextPageToken", adapters=["Adapter"], nextPageToken=str),
    "AdapterChange": struct("warning", status=str, warning=str),
}


def description(config: Config) -> ApiDescription:
    about = "LoRA adapters of the model, changed while the server runs."
    api = ApiDescription("adapters", about, config.model, SCHEMAS)

    def change(
        method: str, path: str, summary: str, settings: dict[str, Schema] | None = None
    ) -> None:
        """Describe a change. Each of its settings may stand in the query or in the body."""
        in_query = [parameter("query", name, schema) for name, schema in (settings or {}).items()]
        changed = api.add(
            method, path, summary, "AdapterChange", CHANGING, parameters=(*in_query, SAID)
        )
        if settings:
            changed["requestBody"] = {"required": False, "content": content(asked(settings))}

    for prefix in ("/adapters", "/models/{model}/adapters"):
        one = f"{prefix}/{{adapter}}"
        api.add("get", prefix, "List the registered adapters", "Adapters", READING, parameters=PAGE)
        api.add("get", one, "Describe a registered adapter", "Adapter", READING)
        change("post", prefix, "Register an adapter", NEW)
        change("delete", one, "Unregister an adapter")
        change("post", f"{one}/update", "Pin or preload an adapter", SETTINGS)

    if not config.is_user_code:
        openai = dataclasses.replace(api, error=content("OpenAIError"), rules=[OPENAI_CHAT.errors])
        ok = {TEXT: {"schema": STRING}}
        name = {"lora_name": NEW["name"]}
        new = asked(name | {"lora_path": SRC}, "lora_name", "lora_path")
        old = asked(name, "lora_name")
        openai.add(
            "post",
            "/v1/load_lora_adapter",
            "Register an adapter by lora_name",
            ok,
            CHANGING,
            body=content(new),
        )
        openai.add(
            "post",
            "/v1/unload_lora_adapter",
            "Unregister an adapter by lora_name",
            ok,
            CHANGING,
            body=content(old),
        )

    return api
