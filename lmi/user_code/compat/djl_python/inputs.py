"""A request to `handle`: properties (headers) and content (the body under `data`, and the query).

The first Input, at load, has no content; its properties are the options of the model. Only the
getters that return objects of numpy and PIL import them.
"""

import csv
import io
import json
from collections.abc import Mapping
from typing import Any

from djl_python.pair_list import PairList


class Input:
    def __init__(
        self, properties: Mapping[str, str] | None = None, content: PairList | None = None
    ) -> None:
        self.function_name: str | None = None
        self.properties: dict[str, Any] = dict(properties or {})
        self.content = content or PairList()

    def get_function_name(self) -> str | None:
        return self.function_name

    def get_properties(self) -> dict[str, Any]:
        return self.properties

    def get_property(self, key: str, default: Any = None) -> Any:
        """Return a property. The key may have any case, like HTTP headers."""
        for name, value in self.properties.items():
            if name.lower() == key.lower():
                return value

        return default

    def contains_property(self, key: str) -> bool:
        return any(name.lower() == key.lower() for name in self.properties)

    def add_property(self, key: str, value: Any) -> None:
        self.properties[key] = value

    def get_content(self) -> PairList:
        return self.content

    def contains_key(self, key: str) -> bool:
        return bool(self.content.contains_key(key))

    def is_empty(self) -> bool:
        return bool(self.content.is_empty())

    def is_batch(self) -> bool:
        return False

    def get_batch_size(self) -> int:
        return 1

    def get_batches(self) -> "list[Input]":
        """Return this request, which is the whole batch, even in the first call, which has no
        content.
        """
        return [self]

    def get_as_bytes(self, key: str | int | None = None) -> bytes | None:
        value = self.content.get(key)
        return None if value is None else bytes(value)

    def get_as_string(self, key: str | int | None = None) -> str | None:
        value = self.get_as_bytes(key)
        return None if value is None else value.decode("utf-8")

    def get_as_json(self, key: str | int | None = None) -> Any:
        value = self.get_as_bytes(key)
        if value is None:
            return None

        return json.loads(value)

    def get_as_csv(self, key: str | int | None = None) -> list[dict[str, str]]:
        text = self.get_as_string(key) or ""
        return list(csv.DictReader(io.StringIO(text, newline="")))

    def get_as_npz(self, key: str | int | None = None) -> list[Any]:
        import numpy

        data = self.get_as_bytes(key) or b""
        with numpy.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return list(arrays.values())

    def get_as_numpy(self, key: str | int | None = None) -> list[Any]:
        """Return the arrays of an npz or npy body."""
        import numpy

        data = self.get_as_bytes(key) or b""
        is_npz = data.startswith(b"PK")
        if is_npz:
            return self.get_as_npz(key)

        return [numpy.load(io.BytesIO(data), allow_pickle=False)]

    def get_as_image(self, key: str | int | None = None) -> Any:
        from PIL import Image

        data = self.get_as_bytes(key) or b""
        return Image.open(io.BytesIO(data)).convert("RGB")

    def __str__(self) -> str:
        return f"Input(properties={self.properties}, keys={self.content.keys()})"
