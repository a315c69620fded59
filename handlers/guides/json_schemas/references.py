"""The references of a client's schema, each with its name among the `$defs` that are written."""

from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

from handlers.guides.json_schemas.fault import SchemaFault
from lmi.errors import shorten


class Reference(NamedTuple):
    """A schema that is referred to. Read in two ways, it has two names."""

    pointer: str
    is_alone: bool


class References:
    def __init__(self, root: object) -> None:
        self._root = root
        self._names: dict[Reference, str] = {}
        self._unread: list[Reference] = []

    def name_of(self, pointer: object, *, is_alone: bool) -> str:
        """The name in `$defs` of what `$ref` points at. It will be among `unread`."""
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise SchemaFault(f"$ref {shorten(pointer)}, which the schema does not resolve,")

        reference = Reference(pointer, is_alone)
        if reference not in self._names:
            self.resolve(pointer)
            self._names[reference] = str(len(self._names))
            self._unread.append(reference)

        return self._names[reference]

    def unread(self) -> Iterator[tuple[str, Reference]]:
        """Each reference once, with its name. To read one may bring others."""
        while self._unread:
            reference = self._unread.pop()
            yield self._names[reference], reference

    def resolve(self, pointer: str) -> object:
        """The schema that a pointer such as `#/$defs/a` stands for. Raises ValueError if there is
        none.
        """
        target: Any = self._root
        try:
            for part in pointer.split("/")[1:]:
                name = unquote(part).replace("~1", "/").replace("~0", "~")
                target = target[int(name) if isinstance(target, list) else name]
        except (KeyError, IndexError, TypeError):
            target = None

        if not isinstance(target, dict | bool):
            raise ValueError(
                f"$ref {shorten(pointer)}, which points at no schema, cannot be followed"
            )

        return target
