"""The content of an Input or Output: a list of pairs. Keys may be missing or repeat."""

from collections.abc import Iterator
from typing import Any


class PairList:
    def __init__(self, pairs: list[tuple[str | None, Any]] | None = None) -> None:
        self.pairs = list(pairs or ())

    def add(self, value: Any, key: str | None = None) -> None:
        self.pairs.append((key, value))

    def key_at(self, index: int) -> str | None:
        return self.pairs[index][0]

    def value_at(self, index: int) -> Any:
        return self.pairs[index][1]

    def get(self, key: str | int | None = None) -> Any:
        """Return the value at a position, or of a key (or None). The default is `data`, else the
        first value.
        """
        if isinstance(key, int):
            return self.pairs[key][1]

        if key is None:
            data = self.get("data")
            if data is None and self.pairs:
                return self.pairs[0][1]

            return data

        for name, value in self.pairs:
            if name == key:
                return value

        return None

    def contains_key(self, key: str) -> bool:
        return key in self.keys()

    def keys(self) -> list[str | None]:
        return [name for name, _ in self.pairs]

    def values(self) -> list[Any]:
        return [value for _, value in self.pairs]

    def is_empty(self) -> bool:
        return not self.pairs

    def size(self) -> int:
        return len(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[tuple[str | None, Any]]:
        return iter(self.pairs)
