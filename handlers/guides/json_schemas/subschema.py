"""A schema inside of a client's schema, and what reads one."""

from dataclasses import dataclass
from typing import Any, Protocol

from handlers.guides.json_schemas.keywords import APPLIED

Schema = dict[str, Any]


@dataclass(frozen=True)
class Subschema:
    keywords: Schema
    # Where it stands, as `#/$defs/a/items`; a part of the root has no `#`.
    pointer: str
    # Whether no other schema says something of the same value, so that this one may be read
    # narrowly.
    is_alone: bool

    @property
    def context(self) -> Schema:
        """What it says of a value by itself, without the schemas that it applies to it."""
        return {name: rule for name, rule in self.keywords.items() if name not in APPLIED}


class ReadSchema(Protocol):
    """Returns what llguidance follows of a schema. Raises ValueError if it cannot be followed."""

    def __call__(self, schema: object, pointer: str, *, is_alone: bool) -> Schema | bool: ...
