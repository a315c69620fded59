"""References of a JSON schema, written as pointers from its root, so that no reader needs to know
`$id` and `$anchor`.

Source: JSON Schema 2020-12, Core, sections 8.2 and 9; draft 4 for `id`; RFC 3986, section 5.2; RFC
6901.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urljoin

Path = tuple[str, ...]

DATA = frozenset({"const", "enum", "default", "examples"})
OF_NAMES = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions", "dependencies"}
)
OF_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
OF_ONE = frozenset(
    {
        "items",
        "additionalItems",
        "contains",
        "additionalProperties",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
        "not",
        "if",
        "then",
        "else",
        "contentSchema",
    }
)
ANCHORS = ("$anchor", "$dynamicAnchor")
# In a schema without embedded ones, they are like $ref.
TO_OUTER = ("$dynamicRef", "$recursiveRef")
OLD_DRAFT = re.compile(r"draft-0[3-7]\b")
DRAFT_OF_ID = re.compile(r"draft-0[34]\b")
# What a fragment may hold, but for the slash between two parts.
SAFE = "!$&'()*+,;=:@-._~"


def with_pointers(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of the same meaning in which each reference that it resolves itself is a pointer
    such as `#/$defs/a`.

    It has no `$id` and no anchors then. A schema that needs no change is returned as it is. A
    reference that leads nowhere in it stays; below an `$id`, it becomes absolute. So does one
    beside an `$id` that counts for it in newer drafts alone, if it leads elsewhere without, and the
    schema names no draft.
    """
    document = _Document(schema)
    rewritten = document.rewritten()
    return rewritten if document.has_changed else schema


class _Document:
    def __init__(self, root: dict[str, Any]) -> None:
        self.has_changed = False
        self._root = root
        draft = str(root.get("$schema", ""))
        self._has_draft = bool(draft)
        self._is_old = bool(OLD_DRAFT.search(draft))
        self._id_key = "id" if DRAFT_OF_ID.search(draft) else "$id"

        # By URI without a fragment, or by URI and anchor. None: two places have the name.
        self._resources: dict[str, Path | None] = {}
        self._anchors: dict[tuple[str, str], Path | None] = {}

        self._base = self._base_of(root, "")
        self._resources[self._base] = ()
        self._name(root, (), self._base)
        self._is_whole = len(self._resources) == 1
        self.has_changed = not self._is_whole or bool(self._anchors)

    def rewritten(self) -> dict[str, Any]:
        """Return the schema with pointers as its references."""
        schema: dict[str, Any] = self._rewritten(self._root, self._base)
        return schema

    def _base_of(self, schema: Mapping[str, Any], base: str) -> str:
        """The URI against which the references of a schema count, from that of the schema around
        it.
        """
        schema_id = schema.get(self._id_key)
        is_ignored = self._is_old and "$ref" in schema
        if not isinstance(schema_id, str) or schema_id.startswith("#") or is_ignored:
            return base

        return _joined(base, schema_id).partition("#")[0]

    def _name(self, schema: object, path: Path, base: str) -> None:
        """Note the names of a schema and of those below it."""
        if not isinstance(schema, dict):
            return

        inner_base = self._base_of(schema, base)
        if inner_base != base:
            self._resources[inner_base] = None if inner_base in self._resources else path

        names = [schema.get(key) for key in ANCHORS]
        schema_id = schema.get(self._id_key)
        if isinstance(schema_id, str) and schema_id.startswith("#") and schema_id != "#":
            names.append(schema_id[1:])

        for name in dict.fromkeys(names):
            if isinstance(name, str):
                key = inner_base, name
                self._anchors[key] = None if key in self._anchors else path

        for names_of_inner, inner in inner_schemas(schema):
            self._name(inner, path + names_of_inner, inner_base)

    def _rewritten(self, value: Any, base: str, *, is_schema: bool = True) -> Any:
        if isinstance(value, list):
            return [self._rewritten(part, base) for part in value]

        if not isinstance(value, dict):
            return value

        # These are names, each of a schema.
        if not is_schema:
            return {name: self._rewritten(inner, base) for name, inner in value.items()}

        outer_base = base
        base = self._base_of(value, base)
        rewritten: dict[str, Any] = {}
        for name, inner in value.items():
            is_name = name in (self._id_key, *ANCHORS) and isinstance(inner, str)
            if name == "$ref" and isinstance(inner, str):
                is_below = value is not self._root
                reference = self._reference(inner, base, outer_base, is_below=is_below)
                rewritten["$ref"] = reference
                self.has_changed = self.has_changed or reference != inner
            elif name in TO_OUTER and isinstance(inner, str) and "$ref" not in value:
                pointer = self._pointer(inner, base)
                is_plain = self._is_whole and (pointer == "#" or pointer.startswith("#/"))
                if is_plain:
                    rewritten["$ref"] = pointer
                else:
                    rewritten[name] = inner

                self.has_changed = self.has_changed or is_plain
            elif name in DATA:
                rewritten[name] = inner
            elif not is_name:
                rewritten[name] = self._rewritten(inner, base, is_schema=name not in OF_NAMES)

        return rewritten

    def _reference(self, reference: str, base: str, outer_base: str, *, is_below: bool) -> str:
        """A `$ref` as a pointer, or absolute where drafts differ on the `$id` beside it."""
        pointer = self._pointer(reference, base)
        may_differ = is_below and not self._has_draft
        if may_differ and self._pointer(reference, outer_base) != pointer:
            return _joined(base, reference)

        return pointer

    def _pointer(self, reference: str, base: str) -> str:
        """A reference as a pointer from the root. One that leads nowhere is not taken for one from
        the root.
        """
        if base == self._base and (reference == "#" or reference.startswith("#/")):
            return reference

        uri, _, fragment = _joined(base, reference).partition("#")
        if fragment and not fragment.startswith("/"):
            path = self._anchors.get((uri, unquote(fragment)))
            inner: Path = ()
        else:
            path = self._resources.get(uri)
            inner = tuple(unquote(part) for part in fragment.split("/")[1:])

        if path is None:
            return reference if base == self._base else _joined(base, reference)

        parts = [*(_escaped(part) for part in path), *inner]
        return "#" + "".join(f"/{quote(part, safe=SAFE)}" for part in parts)


def inner_schemas(schema: Mapping[str, Any]) -> Iterator[tuple[Path, object]]:
    """The schemas in a schema, each with the names that lead to it."""
    for keyword, value in schema.items():
        if keyword in OF_NAMES and isinstance(value, dict):
            for name, inner in value.items():
                yield (keyword, name), inner

        elif (keyword in OF_LISTS or keyword == "items") and isinstance(value, list):
            for number, inner in enumerate(value):
                yield (keyword, str(number)), inner

        elif keyword in OF_ONE:
            yield (keyword,), value


def _joined(base: str, reference: str) -> str:
    """A reference against the URI of what holds it."""
    if reference.startswith("#"):
        return base + reference

    try:
        return urljoin(base, reference)
    except ValueError:
        # The address is none.
        return reference


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
