"""The answers of both requests of embeddings.

OpenAI's is an object, `{"object": "list", "data": [{"object": "embedding", "index": 0, "embedding":
[0.5, …]}], "model": "m", "usage": {…}}`; LMI's a bare list of vectors, `[[0.5, …], …]`, also for
one text. Both are in the order of the texts.
"""

import base64
import math
from abc import abstractmethod
from array import array
from typing import Any

from orjson import Fragment, dumps

from lmi.apis.base.body import Parsed
from lmi.apis.base.media_types import JSON
from lmi.apis.openai.base_formatter import OpenAIFormatter
from lmi.types import Delta

# The length of a float32 vector that the engine has normalised may differ from 1 by so much.
UNIT_ERROR = 1e-5


class EmbeddingFormatter(OpenAIFormatter):
    """An answer with an embedding for each text. Each is written when it comes, so that no turn of
    the event loop is long.
    """

    media_type = JSON
    is_streaming = False
    kind = "list"
    # These answers have no id.
    id_prefix = ""

    def __init__(self, parsed: Parsed[Any]) -> None:
        super().__init__(parsed)
        # The elements of the answer that are written already, by the indexes of their texts.
        self._written_by_index: dict[int, Fragment] = {}

    def feed(self, delta: Delta) -> list[bytes]:
        self._count(delta)
        assert delta.embedding is not None
        element = self._element(delta.index, delta.embedding.data)
        self._written_by_index[delta.index] = Fragment(dumps(element))
        if self._num_open:
            return []

        num_texts = len(self._written_by_index)
        written = [self._written_by_index[index] for index in range(num_texts)]
        return [dumps(self._answer(written))]

    @abstractmethod
    def _element(self, index: int, data: bytes) -> object:
        """Return what the answer has for the text with this index, from its float32 numbers."""

    @abstractmethod
    def _answer(self, written: list[Fragment]) -> object:
        """Return the answer with its elements, which are written already, in the order of the
        texts.
        """


class EmbeddingsWhole(EmbeddingFormatter):
    """All embeddings as one object."""

    def _element(self, index: int, data: bytes) -> dict[str, object]:
        embedding: str | list[float]
        if self._format.is_base64:
            embedding = base64.b64encode(data).decode()
        else:
            embedding = array("f", data).tolist()

        return {"object": "embedding", "index": index, "embedding": embedding}

    def _answer(self, written: list[Fragment]) -> dict[str, object]:
        num_tokens = self._num_prompt_tokens
        return {
            "object": self.kind,
            "data": written,
            "model": self._format.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


class VectorsWhole(EmbeddingFormatter):
    """A bare list of vectors."""

    def __init__(self, parsed: Parsed[Any]) -> None:
        super().__init__(parsed)
        self._is_normalised = parsed.format.is_normalised

    def _element(self, index: int, data: bytes) -> list[float]:
        numbers = array("f", data).tolist()
        return _normalised(numbers) if self._is_normalised else numbers

    def _answer(self, written: list[Fragment]) -> list[Fragment]:
        return written


def _normalised(numbers: list[float]) -> list[float]:
    """Return a vector of length 1 in the same direction, or the vector itself if it is 0."""
    length = math.sqrt(math.fsum(number * number for number in numbers))
    has_unit_length = abs(length - 1) < UNIT_ERROR
    if has_unit_length or not length:
        return numbers

    return [number / length for number in numbers]
