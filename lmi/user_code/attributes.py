"""A JSON object whose keys are attributes too, so that user code reads a response like an engine's object."""

from __future__ import annotations

import json
from typing import Any


class Attributes(dict[str, Any]):
    """A dict: `response["model"]` and `response.model` are the same. A name that is not a key raises AttributeError."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the response has no {name}, only {', '.join(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.pop(name)

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return the object as plain dicts. pydantic's models have this method."""
        return json.loads(self.model_dump_json())  # type: ignore[no-any-return]

    def model_dump_json(self, **_: Any) -> str:
        return json.dumps(self, ensure_ascii=False)


def attributes(value: Any) -> Any:
    """Return the value with an Attributes for each dict in it."""
    if isinstance(value, dict):
        return Attributes({name: attributes(item) for name, item in value.items()})
    return [attributes(item) for item in value] if isinstance(value, list) else value
