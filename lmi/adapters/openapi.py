"""The routes that register LoRA adapters. Parameters of a POST are in the query or in the body."""

from __future__ import annotations

from dataclasses import replace

from lmi.adapters import routes
from lmi.adapters.choice import ALIAS
from lmi.adapters.registry import AdapterUnusable, NameTaken, NotRegistered
from lmi.apis.base.readers import JSON_SCHEMAS, boolean, text
from lmi.apis.openai.api import OPENAI_CHAT
from lmi.description.parts import STRING, ApiDescription, Schema, asked, content, parameter, struct
from lmi.errors import DeadlineExceeded, InvalidRequest, OutOfMemory, Overloaded
from lmi.models.openapi import PAGE
from lmi.settings.config import Config
from lmi.shared.desired_state import NAME_PATTERN

READING = (InvalidRequest, NotRegistered)
CHANGING = (*READING, NameTaken, AdapterUnusable, Overloaded, DeadlineExceeded, OutOfMemory)
TEXT, FLAG = JSON_SCHEMAS[text], JSON_SCHEMAS[boolean]
SETTINGS: dict[str, Schema] = {"preload": {**FLAG, "default": True}, "pin": {**FLAG, "default": False}}
SRC = {
    **TEXT,
    "description": "a LoRA adapter: a folder below the model's, /opt/ml, download_dir or adapter_roots; "
    "owner/name of a hub; s3://bucket/prefix; s3://bucket/key.tar.gz",
}
NEW: dict[str, Schema] = {"name": {**TEXT, "pattern": f"^{NAME_PATTERN}$"}, "src": SRC, **SETTINGS}
SAID = parameter("header", ALIAS, str, "replaces the adapter's name in messages")
SCHEMAS = {
    "Adapter": struct("reason", name=str, src=str, preload=bool, pin=bool, reason=str),
    "Adapters": struct("nextPageToken", adapters=["Adapter"], nextPageToken=str),
    "AdapterChange": struct("warning", status=str, warning=str),
}


def describe(config: Config) -> ApiDescription:
    about = "LoRA adapters of the model, changed while the server runs."
    api = ApiDescription("adapters", about, config.model, SCHEMAS)

    def change(method: str, path: str, summary: str, settings: dict[str, Schema] | None = None) -> None:
        """Describe a change. Each of its settings may stand in the query or in the body."""
        in_query = [parameter("query", name, schema) for name, schema in (settings or {}).items()]
        changed = api.add(method, path, summary, "AdapterChange", CHANGING, parameters=(*in_query, SAID))
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
        openai = replace(api, error=content("OpenAIError"), rules=[OPENAI_CHAT.errors])
        ok, name = {routes.TEXT: {"schema": STRING}}, {"lora_name": NEW["name"]}
        new, old = asked(name | {"lora_path": SRC}, "lora_name", "lora_path"), asked(name, "lora_name")
        openai.add("post", "/v1/load_lora_adapter", "Register an adapter by lora_name", ok, CHANGING, body=content(new))
        openai.add(
            "post", "/v1/unload_lora_adapter", "Unregister an adapter by lora_name", ok, CHANGING, body=content(old)
        )
    return api
