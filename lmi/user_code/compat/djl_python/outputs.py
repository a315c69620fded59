"""The result of `handle`: a status, properties (headers of the response) and content, whole or as a
stream.
"""

import io
import json
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from typing import Any, Self

from djl_python.pair_list import PairList

JSON = "application/json"
JSONLINES = "application/jsonlines"


def _default_stream_output_formatter(output: Any) -> bytes:
    """Return one line for each output of a stream."""
    line = json.dumps({"outputs": output}) + "\n"
    return line.encode()


class Record(bytes):
    """One piece of an asynchronous answer, from `Output.binary_encode`: its bytes, and whether it
    is the last.
    """

    code: int | None = None
    is_last: bool = False


class Output:
    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code = code
        self.message = message
        self.properties: dict[str, str] = {}
        self.content = PairList()
        self.stream_content: Iterable[Any] | AsyncIterable[Any] | None = None
        self.stream_formatter: Callable[[Any], bytes | str] | None = None
        self.finalizer: Callable[[], Any] | None = None
        # The type of the value that was added first. A property that names one goes before it.
        self.media_type: str | None = None
        # A last output ends the answer, even if the generator would yield more.
        self.is_last = False

    def set_code(self, code: int) -> Self:
        self.code = code
        return self

    def set_message(self, message: str) -> Self:
        self.message = message
        return self

    def get_properties(self) -> dict[str, str]:
        return self.properties

    def get_property(self, key: str) -> str | None:
        return self.properties.get(key)

    def add_property(self, key: str, value: Any) -> Self:
        self.properties[key] = value
        return self

    @staticmethod
    def binary_encode(data: Mapping[str, Any]) -> Record:
        """Make a piece of an asynchronous answer for `add` from `data`, `last`, and an `error` with
        its `code`.
        """
        text = str(data.get("data") or "")
        code = None
        if data.get("error"):
            code = int(data.get("code") or 424)
            text = json.dumps({"error": str(data["error"]), "code": code}) + "\n"

        record = Record(text.encode())
        record.is_last = str(data.get("last", False)).lower() == "true"
        record.code = code
        return record

    def error(self, error: str, code: int = 424, message: str = "invoke handler failure") -> Self:
        """Turn this into the answer to a failed request."""
        self.code = code
        self.message = message
        self.content = PairList()
        return self.add_as_json({"code": code, "message": message, "error": error})

    def add(self, value: Any, key: str | None = None, batch_index: int | None = None) -> Self:
        """Add bytes as they are, str in UTF-8, and any other value as JSON."""
        if isinstance(value, Record):
            self.code = value.code or self.code
            self.is_last = value.is_last

        if isinstance(value, bytes | bytearray | memoryview):
            return self._add(bytes(value), key, None)

        if isinstance(value, str):
            return self._add(value.encode(), key, "text/plain; charset=utf-8")

        return self.add_as_json(value, key)

    def add_as_json(
        self, value: Any, key: str | None = None, batch_index: int | None = None
    ) -> Self:
        return self._add(json.dumps(value, ensure_ascii=False).encode(), key, JSON)

    def add_as_string(
        self, value: Any, key: str | None = None, batch_index: int | None = None
    ) -> Self:
        return self._add(str(value).encode(), key, "text/plain; charset=utf-8")

    def add_as_numpy(
        self, np_list: Any, key: str | None = None, batch_index: int | None = None
    ) -> Self:
        """Add an array, or the first of a list of arrays, as npy."""
        import numpy

        array = np_list[0] if isinstance(np_list, list) else np_list
        buffer = io.BytesIO()
        numpy.save(buffer, array, allow_pickle=False)
        return self._add(buffer.getvalue(), key, "tensor/npy")

    def add_as_npz(
        self, np_list: list[Any], key: str | None = None, batch_index: int | None = None
    ) -> Self:
        import numpy

        buffer = io.BytesIO()
        numpy.savez(buffer, *np_list)
        return self._add(buffer.getvalue(), key, "tensor/npz")

    def add_stream_content(
        self,
        stream_content: Iterable[Any] | AsyncIterable[Any],
        output_formatter: Any = _default_stream_output_formatter,
    ) -> Self:
        """Send each item when the iterable yields it. `output_formatter` turns an item into bytes
        or str.
        """
        self.stream_content = stream_content
        self.stream_formatter = output_formatter if callable(output_formatter) else None
        if self.stream_formatter is _default_stream_output_formatter:
            self.media_type = JSONLINES

        return self

    def finalize(self, function: Callable[..., Any], *args: Any) -> Self:
        """Call `function` after the answer was sent."""
        self.finalizer = lambda: function(*args)
        return self

    def _add(self, data: bytes, key: str | None, media_type: str | None) -> Self:
        if self.content.is_empty():
            self.media_type = media_type

        self.content.add(data, key)
        return self

    def __str__(self) -> str:
        return f"Output(code={self.code}, message={self.message}, keys={self.content.keys()})"
