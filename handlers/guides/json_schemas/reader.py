"""Reads a client's schema, with all schemas in it."""

import json
import re
from typing import Any

from handlers.guides.json_schemas.applicators import ApplicatorReader
from handlers.guides.json_schemas.arrays import ArrayReader
from handlers.guides.json_schemas.bounds import bounds_of
from handlers.guides.json_schemas.fault import SchemaFault
from handlers.guides.json_schemas.keywords import DEPENDENT
from handlers.guides.json_schemas.negations import Negations
from handlers.guides.json_schemas.objects import ObjectReader
from handlers.guides.json_schemas.patterns import pattern_of
from handlers.guides.json_schemas.references import References
from handlers.guides.json_schemas.subschema import Schema, Subschema
from handlers.guides.json_schemas.value_types import types_of
from handlers.guides.json_schemas.values import values_of
from lmi.errors import shorten
from lmi.shared.json_references import with_pointers

MAX_LEVELS = 100
OLD_DRAFT = re.compile(r"draft-0[3-7]\b")
FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "uri",
        "uuid",
    }
)
NOT_FOLLOWED = ("$dynamicRef", "$recursiveRef", "disallow", "extends", "divisibleBy")
LISTS = ("enum", "prefixItems", "anyOf", "oneOf", "allOf")
MAPPINGS = ("properties", "patternProperties", *DEPENDENT)
# The types of keywords. One that is not here may have any.
TYPES_OF_KEYWORDS = {
    "pattern": str,
    **dict.fromkeys(LISTS, list),
    **dict.fromkeys(MAPPINGS, dict),
}


def read_schema(text: str) -> Schema:
    """Raises ValueError for a schema that cannot be followed, with the rule and where it stands."""
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
        if isinstance(schema, dict):
            schema = with_pointers(schema)

        return _SchemaReader(schema).read()
    except RecursionError:
        raise ValueError("so many levels cannot be followed") from None


class _SchemaReader:
    def __init__(self, root: object) -> None:
        self._root = root
        self._references = References(root)

        resolve = self._references.resolve
        negations = Negations(resolve)
        self._objects = ObjectReader(self._read, resolve)
        self._arrays = ArrayReader(
            self._read, resolve, negations, is_old_draft=_is_of_old_draft(root)
        )
        self._applicators = ApplicatorReader(self._read, self._references, negations)

    def read(self) -> Schema:
        root = self._read(self._root, "", is_alone=True)

        defs: Schema = {}
        for name, reference in self._references.unread():
            target = self._references.resolve(reference.pointer)
            defs[name] = self._read(target, reference.pointer, is_alone=reference.is_alone)

        if root is True:
            root = {}
        elif root is False:
            root = {"enum": []}

        return {**root, "$defs": defs} if defs else root

    def _read(self, schema: object, pointer: str, *, is_alone: bool) -> Schema | bool:
        try:
            if isinstance(schema, bool):
                return schema

            if not isinstance(schema, dict):
                raise SchemaFault(f"{shorten(schema)} in place of a schema")

            if pointer.count("/") > 2 * MAX_LEVELS:
                raise ValueError("so many levels cannot be followed")

            return self._followed(Subschema(schema, pointer, is_alone))
        except SchemaFault as fault:
            place = ""
            if pointer.strip("#/"):
                place = f" in {pointer.removeprefix('#').strip('/')}"

            raise ValueError(f"{fault}{place} cannot be followed") from None

    def _followed(self, subschema: Subschema) -> Schema | bool:
        keywords = subschema.keywords
        if keywords.get("not") is True or keywords.get("not") == {}:
            return False

        _check_keywords(keywords)
        followed = types_of(keywords, is_alone=subschema.is_alone)
        followed |= values_of(keywords)
        followed |= bounds_of(keywords)

        if "pattern" in keywords:
            followed["pattern"] = pattern_of(keywords["pattern"])

        if keywords.get("format") in FORMATS:
            followed["format"] = keywords["format"]

        self._objects.add_rules(subschema, followed)
        besides = self._arrays.add_rules(subschema, followed)
        self._applicators.add_rules(subschema, followed, besides)
        return followed


def _is_of_old_draft(root: Any) -> bool:
    if not isinstance(root, dict):
        return False

    return OLD_DRAFT.search(str(root.get("$schema", ""))) is not None


def _check_keywords(keywords: Schema) -> None:
    for name, value in keywords.items():
        if name in NOT_FOLLOWED:
            raise SchemaFault(name)

        if not isinstance(value, TYPES_OF_KEYWORDS.get(name, object)):
            raise SchemaFault(f"{name} of a wrong type")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
