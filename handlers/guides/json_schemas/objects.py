"""The rules of objects."""

from dataclasses import replace
from typing import Any

from handlers.guides.json_schemas.disjoint import Resolve
from handlers.guides.json_schemas.fault import SchemaFault
from handlers.guides.json_schemas.keywords import COMBINED
from handlers.guides.json_schemas.patterns import pattern_of
from handlers.guides.json_schemas.property_names import ObjectProperties, with_property_names
from handlers.guides.json_schemas.subschema import ReadSchema, Schema, Subschema
from handlers.guides.json_schemas.unevaluated import schema_of_others
from handlers.guides.json_schemas.values import check_value, names_in

MAX_OPTIONAL = 1_000
MAX_PATTERN_PROPERTIES = 64
# The keywords by which an object may have more properties than a schema names.
ALLOWS_MORE_NAMES = frozenset(
    {
        *COMBINED,
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
    }
)


class ObjectReader:
    def __init__(self, read: ReadSchema, resolve: Resolve) -> None:
        self._read = read
        self._resolve = resolve

    def add_rules(self, subschema: Subschema, followed: Schema) -> None:
        """Add the rules of objects to `followed`, which has those of sizes."""
        required = names_in(subschema.keywords.get("required", []), "required")
        properties = self._properties_of(subschema.keywords)
        _check_properties(properties, required)

        is_closed = subschema.is_alone and has_all_names(subschema.keywords)
        if is_closed and properties.others is None:
            named = dict(properties.named)
            for name in required:
                named.setdefault(name, True)

            properties = replace(properties, named=named, others=False)

        _follow_min_properties(followed, properties, required)
        if required:
            followed["required"] = required

        self._add_properties(properties, followed, subschema.pointer)

    def _properties_of(self, keywords: Schema) -> ObjectProperties:
        explicit = keywords.get("additionalProperties")
        properties = ObjectProperties(
            named=keywords.get("properties", {}),
            by_pattern=keywords.get("patternProperties", {}),
            others=schema_of_others(keywords, explicit, "unevaluatedProperties"),
        )
        if "propertyNames" in keywords:
            properties = with_property_names(properties, keywords, self._resolve)

        return properties

    def _add_properties(self, properties: ObjectProperties, followed: Schema, pointer: str) -> None:
        if properties.named:
            followed["properties"] = {
                name: self._read(schema, f"{pointer}/properties/{name}", is_alone=True)
                for name, schema in properties.named.items()
            }

        if properties.by_pattern:
            followed["patternProperties"] = {
                pattern_of(name): self._read(
                    schema, f"{pointer}/patternProperties/{name}", is_alone=True
                )
                for name, schema in properties.by_pattern.items()
            }

        if properties.others is not None:
            followed["additionalProperties"] = self._read(
                properties.others, f"{pointer}/additionalProperties", is_alone=True
            )


def has_all_names(schema: Any) -> bool:
    """Whether an object has only the properties that a schema names, if no other schema says
    something of it.
    """
    if not isinstance(schema, dict) or "properties" not in schema:
        return False

    return not schema.keys() & ALLOWS_MORE_NAMES


def closed(schema: Schema) -> Schema:
    """A schema of objects that have only the properties that it names."""
    names = schema.get("required", [])
    required: Schema = {}
    if isinstance(names, list):
        required = dict.fromkeys(names, True)

    return {
        **schema,
        "properties": {**required, **schema.get("properties", {})},
        "additionalProperties": False,
    }


def _check_properties(properties: ObjectProperties, required: list[str]) -> None:
    for name in (*required, *properties.named):
        check_value(name)

    if len(properties.named.keys() - set(required)) > MAX_OPTIONAL:
        raise SchemaFault(f"more than {MAX_OPTIONAL} properties that are not required")

    if len(properties.by_pattern) > MAX_PATTERN_PROPERTIES:
        raise SchemaFault(f"patternProperties with more than {MAX_PATTERN_PROPERTIES} names")


def _follow_min_properties(
    followed: Schema, properties: ObjectProperties, required: list[str]
) -> None:
    """Leave `minProperties` where llguidance follows it, and say it in other words elsewhere."""
    least = followed.get("minProperties", 0)
    if least <= len(required):
        followed.pop("minProperties", None)
    elif least == 1 and properties.named:
        del followed["minProperties"]
        followed["anyOf"] = [{"required": [name]} for name in properties.named]
    elif least > 1 and properties.others is not False:
        raise SchemaFault(f"minProperties {least} with properties that have no name of their own")
