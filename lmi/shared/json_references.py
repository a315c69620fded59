"""References of a JSON schema, written as pointers from its root, so that no reader needs to know
`$id` and `$anchor`.

Source: JSON Schema 2020-12, Core, sections 8.2 and 9; draft 4 for `id`; RFC 3986, section 5.2; RFC
6901.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urljoin

# The keywords, names and numbers that lead from the root to a schema in it.
Path = tuple[str, ...]

# Keywords whose values are data, not schemas.
DATA = frozenset({"const", "enum", "default", "examples"})
# Keywords whose values are schemas by name, lists of schemas, and one schema.
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
# They lead to the outermost schema that has the name. In a schema without embedded ones, they are
# like $ref.
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


class _Anchor(NamedTuple):
    """The name of a schema inside a resource."""

    uri: str
    name: str


class _Document:
    """A schema with all that it names.

    A `base` is the URI against which references count, an `$id` that of a resource: a schema that
    may be embedded in another one.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        draft = str(root.get("$schema", ""))
        self._has_draft = bool(draft)
        self._is_old = bool(OLD_DRAFT.search(draft))
        self._id_key = "id" if DRAFT_OF_ID.search(draft) else "$id"

        # Where the schemas with a name are. None: two places have the name.
        self._resources: dict[str, Path | None] = {}
        self._anchors: dict[_Anchor, Path | None] = {}

        self._base = self._base_of(root, "")
        self._resources[self._base] = ()
        self._note_names(root, (), self._base)
        self._is_whole = len(self._resources) == 1
        # Whether `rewritten` is another schema than the root.
        self.has_changed = not self._is_whole or bool(self._anchors)

    def rewritten(self) -> dict[str, Any]:
        """Return the schema with pointers as its references, and set `has_changed`."""
        return self._rewritten_schema(self._root, self._base)

    def _base_of(self, schema: Mapping[str, Any], base: str) -> str:
        """Return the base of a schema, from that of the schema around it."""
        schema_id = schema.get(self._id_key)
        is_ignored = self._is_old and "$ref" in schema
        if not isinstance(schema_id, str) or schema_id.startswith("#") or is_ignored:
            return base

        return _joined(base, schema_id).partition("#")[0]

    def _note_names(self, schema: object, path: Path, base: str) -> None:
        """Note the names of a schema and of those below it."""
        if not isinstance(schema, dict):
            return

        inner_base = self._base_of(schema, base)
        if inner_base != base:
            self._resources[inner_base] = None if inner_base in self._resources else path

        for name in self._anchor_names(schema):
            anchor = _Anchor(inner_base, name)
            self._anchors[anchor] = None if anchor in self._anchors else path

        for inner_path, inner in inner_schemas(schema):
            self._note_names(inner, path + inner_path, inner_base)

    def _anchor_names(self, schema: Mapping[str, Any]) -> set[str]:
        """Return the names that a schema gives itself inside its resource."""
        names = {schema[key] for key in ANCHORS if isinstance(schema.get(key), str)}

        # Older drafts write an anchor as an id.
        schema_id = schema.get(self._id_key)
        if isinstance(schema_id, str) and schema_id.startswith("#") and schema_id != "#":
            names.add(schema_id[1:])

        return names

    def _rewritten(self, value: Any, base: str) -> Any:
        """Return a schema, or the schemas in a list, with pointers as references."""
        if isinstance(value, list):
            return [self._rewritten(part, base) for part in value]

        if isinstance(value, dict):
            return self._rewritten_schema(value, base)

        return value

    def _rewritten_schema(self, schema: Mapping[str, Any], outer_base: str) -> dict[str, Any]:
        base = self._base_of(schema, outer_base)
        rewritten: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword == "$ref" and isinstance(value, str):
                reference = self._reference(schema, base, outer_base)
                rewritten["$ref"] = reference
                self.has_changed = self.has_changed or reference != value
            elif keyword in TO_OUTER and isinstance(value, str) and "$ref" not in schema:
                pointer = self._pointer(value, base)
                if self._is_whole and _is_pointer(pointer):
                    rewritten["$ref"] = pointer
                    self.has_changed = True
                else:
                    rewritten[keyword] = value
            elif keyword in DATA:
                rewritten[keyword] = value
            elif keyword in OF_NAMES and isinstance(value, dict):
                rewritten[keyword] = {
                    name: self._rewritten(inner, base) for name, inner in value.items()
                }
            elif not self._is_name(keyword, value):
                rewritten[keyword] = self._rewritten(value, base)

        return rewritten

    def _is_name(self, keyword: str, value: object) -> bool:
        """Return whether a member only names its schema: pointers need no names."""
        return keyword in (self._id_key, *ANCHORS) and isinstance(value, str)

    def _reference(self, schema: Mapping[str, Any], base: str, outer_base: str) -> str:
        """Return the `$ref` of a schema as a pointer, or absolute where drafts differ on the `$id`
        beside it.
        """
        reference: str = schema["$ref"]
        pointer = self._pointer(reference, base)
        may_differ = schema is not self._root and not self._has_draft
        if may_differ and self._pointer(reference, outer_base) != pointer:
            return _joined(base, reference)

        return pointer

    def _pointer(self, reference: str, base: str) -> str:
        """Return a reference as a pointer from the root. One that leads nowhere is returned so that
        it is not taken for one from the root.
        """
        if base == self._base and _is_pointer(reference):
            return reference

        uri, _, fragment = _joined(base, reference).partition("#")
        path_inside: Path = ()
        if fragment and not fragment.startswith("/"):
            path = self._anchors.get(_Anchor(uri, unquote(fragment)))
        else:
            path = self._resources.get(uri)
            path_inside = tuple(unquote(part) for part in fragment.split("/")[1:])

        if path is None:
            return reference if base == self._base else _joined(base, reference)

        # What a pointer had is escaped already.
        parts = [*map(_escaped, path), *path_inside]
        return "#" + "".join(f"/{quote(part, safe=SAFE)}" for part in parts)


def inner_schemas(schema: Mapping[str, Any]) -> Iterator[tuple[Path, object]]:
    """Yield the schemas in a schema, each with the path that leads to it from there."""
    for keyword, value in schema.items():
        if keyword in OF_NAMES and isinstance(value, dict):
            for name, inner in value.items():
                yield (keyword, name), inner

        elif (keyword in OF_LISTS or keyword == "items") and isinstance(value, list):
            for number, inner in enumerate(value):
                yield (keyword, str(number)), inner

        elif keyword in OF_ONE:
            yield (keyword,), value


def resolve_pointer(root: Mapping[str, Any], reference: str) -> Any:
    """Return what a pointer such as #/$defs/a points at from the root, None for nothing and for a
    reference that is no pointer. Source: RFC 6901.
    """
    if not _is_pointer(reference):
        return None

    value: Any = root
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and re.fullmatch("[0-9]{1,9}", key) and int(key) < len(value):
            value = value[int(key)]
        else:
            value = None

    return value


def _is_pointer(reference: str) -> bool:
    """Return whether a reference leads from the root of its document downwards."""
    return reference == "#" or reference.startswith("#/")


def _joined(base: str, reference: str) -> str:
    """Return a reference as an absolute one, against the URI of what holds it."""
    if reference.startswith("#"):
        return base + reference

    try:
        return urljoin(base, reference)
    except ValueError:
        # It is no address.
        return reference


def _escaped(name: str) -> str:
    """Return a name as a part of a pointer."""
    return name.replace("~", "~0").replace("/", "~1")
