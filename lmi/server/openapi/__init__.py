"""/openapi.json: every route of this server with its settings, in OpenAPI 3.1, which generators read.

Each API has a module. The schemas of requests are made from the tables that read them, so the two cannot differ.
tests/server/test_openapi.py compares the rest with the server: the document has exactly the routes of the server, each
example is answered, and schemathesis finds no answer that is not described.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

from lmi.apis.base.openapi import Operation
from lmi.apis.lmi import openapi as lmi
from lmi.apis.openai import openapi as openai
from lmi.apis.tgi import openapi as tgi
from lmi.apis.triton import openapi as triton
from lmi.server.openapi import adapters, models, plain
from lmi.settings.config import Config


def document(config: Config) -> dict[str, Any]:
    """Return the whole document, as JSON's objects."""
    apis = [lmi.describe(config), adapters.describe(config), models.describe(config), plain.describe(config)]
    if not config.is_user_code:
        apis[1:1] = [triton.describe(config), tgi.describe(config), openai.describe(config)]
    paths = {path: methods for api in apis for path, methods in api.paths.items()}
    for path, method, operation in ((path, *each) for path, methods in paths.items() for each in methods.items()):
        operation["operationId"] = _id(method, path)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"lmi: {config.model.name}",
            "version": version("lmi"),
            "description": "One model behind every contract that its clients speak. Tags are contracts.",
        },
        "tags": [{"name": api.name, "description": api.about} for api in apis],
        "components": {
            "schemas": {name: schema for api in apis for name, schema in api.schemas.items()},
            "responses": _share_failures(paths),
        },
        "paths": paths,
    }


def _id(method: str, path: str) -> str:
    """Return the name of an operation, from which generators make the names of functions: post_v1_completions."""
    return re.sub(r"\W+", "_", f"{method} {path}{'slash' if path.endswith('/') else ''}").strip("_")


def _share_failures(paths: dict[str, dict[str, Operation]]) -> dict[str, Any]:
    """Replace repeated error responses by references. Returns the shared responses."""
    shared: dict[str, Any] = {}
    for operation in (operation for methods in paths.values() for operation in methods.values()):
        responses = operation["responses"] = dict(operation["responses"])
        for status, response in responses.items():
            name = f"{operation['tags'][0]}{status}"
            if status != "200" and shared.setdefault(name, response) == response:
                responses[status] = {"$ref": f"#/components/responses/{name}"}
    return shared
