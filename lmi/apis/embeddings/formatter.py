"""The answers of both requests of embeddings.

OpenAI's is an object, `{"object": "list", "data": [{"object": "embedding", "index": 0, "embedding":
[0.5, …]}], "model": "m", "usage": {…}}`; LMI's a bare list of vectors, `[[0.5, …], …]`, also for
one text. Both are in the order of the texts.
"""

import base64
import math
from array import array
from typing import Any

from orjson import Fragment, dumps

from lmi.apis.base.api import JSON
from lmi.apis.base.readers import Parsed
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.apis.openai.formatter import OpenAIFormatter
from lmi.types import Delta

# The length of a float32 vector that the engine has normalised may differ from 1 by so much.
UNIT_ERROR = 1e-5


class EmbeddingsWhole(OpenAIFormatter):
    """All embeddings as one object. Each is written when it comes, so that no turn of the event
    loop is long.
    """

    media_type = JSON
    is_streaming = False
    kind = "list"
    id_prefix = ""

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._written_by_index: dict[int, Fragment] = {}

    def feed(self, delta: Delta) -> list[bytes]:
        self._count(delta)
        assert delta.embedding is not None
        data = delta.embedding.data
        embedding: str | list[float]
        if self._format.is_base64:
            embedding = base64.b64encode(data).decode()
        else:
            embedding = array("f", data).tolist()

        fields = {"object": "embedding", "index": delta.index, "embedding": embedding}
        self._written_by_index[delta.index] = Fragment(dumps(fields))
        if self._num_open:
            return []

        num_tokens = self._num_prompt_tokens
        answer = {
            "object": self.kind,
            "data": _in_order(self._written_by_index),
            "model": self._format.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return [dumps(answer)]


class VectorsWhole(OpenAIFormatter):
    """A list of vectors. Each is written when it comes, so that no turn of the event
    loop is long.
    """

    media_type = JSON
    is_streaming = False
    kind = "list"
    id_prefix = ""

    def __init__(self, parsed: Parsed[Any]) -> None:
        super().__init__(parsed)
        self._is_normalised = parsed.format.is_normalised
        self._written_by_index: dict[int, Fragment] = {}

    def feed(self, delta: Delta) -> list[bytes]:
        self._count(delta)
        assert delta.embedding is not None
        numbers = array("f", delta.embedding.data).tolist()
        if self._is_normalised:
            numbers = _normalised(numbers)

        self._written_by_index[delta.index] = Fragment(dumps(numbers))
        if self._num_open:
            return []

        return [dumps(_in_order(self._written_by_index))]


def _in_order(fragments: dict[int, Fragment]) -> list[Fragment]:
    """Return what was written for each text, in the order of the texts."""
    return [fragments[index] for index in range(len(fragments))]


def _normalised(numbers: list[float]) -> list[float]:
    """Return a vector of length 1 in the same direction, or the vector itself if it is 0."""
    length = math.sqrt(math.fsum(number * number for number in numbers))
    is_done = abs(length - 1) < UNIT_ERROR
    if is_done or not length:
        return numbers

    return [number / length for number in numbers]
