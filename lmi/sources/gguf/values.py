"""Reads values of a GGUF file's metadata. Each is held to a rule, as the file is a stranger's."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from lmi.errors import ModelUnusable, shorten
from lmi.shared.gguf_file import GgufModel

ARCHITECTURE = "general.architecture"
MAX_NUMBER = (1 << 31) - 1


class GgufValues:
    """The metadata of a model. Every method raises ModelUnusable for a value that breaks its rule.

    A key that begins with a dot is one of the model's architecture: `.block_count` of a Llama is
    `llama.block_count`.
    """

    def __init__(self, model: GgufModel) -> None:
        self.file = model.files[0]
        self.metadata: Mapping[str, Any] = model.metadata
        self.architecture = self.text(ARCHITECTURE)

    def key(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key

    def __contains__(self, key: str) -> bool:
        return self.key(key) in self.metadata

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number. An array of equal numbers counts as that number."""
        value = self._value(key, default)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]

        if isinstance(value, list):
            raise self.fault(key, "one number, layers that differ are not read here", value)

        if type(value) is not int or not least <= value <= MAX_NUMBER:
            raise self.fault(key, f"a whole number from {least} to {MAX_NUMBER}", value)

        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float) or not isfinite(value) or value <= 0:
            raise self.fault(key, "a number over 0", value)

        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.fault(key, "a text", value)

        return value

    def switch(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.fault(key, "true or false", value)

        return value

    def texts(self, key: str) -> list[str]:
        return self._items(key, str, "texts")

    def numbers(self, key: str) -> list[float]:
        return self._items(key, (int, float), "numbers")

    def wholes(self, key: str) -> list[int]:
        return self._items(key, int, "whole numbers")

    def switches(self, key: str) -> list[bool]:
        return self._items(key, bool, "true or false")

    def _items(self, key: str, kind: type | tuple[type, ...], plural: str) -> list[Any]:
        """Return an array whose items are all of the kind. `plural` names them in the error."""
        value = self._value(key, None)
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
            raise self.fault(key, f"an array of {plural}", value)

        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.metadata.get(self.key(key), default)
        if value is None:
            raise ModelUnusable(f"{self.file}: its metadata has no {self.key(key)}")

        return value

    def fault(self, key: str, rule: str, value: object) -> ModelUnusable:
        return ModelUnusable(f"{self.file}: {self.key(key)} must be {rule}, given {shorten(value)}")

    def refusal(self, why: str) -> ModelUnusable:
        return ModelUnusable(f"{self.file}: {why}")
