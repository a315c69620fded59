"""Answers of OpenAI's embeddings, in the order of the inputs.

{"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.5, …]}], "model": "m",
 "usage": {"prompt_tokens": 3, "total_tokens": 3}}
"""

from __future__ import annotations

import base64
from array import array

from orjson import Fragment, dumps

from lmi.apis.base.readers import Parsed
from lmi.apis.embeddings.schema import EmbeddingFormat
from lmi.apis.openai.formatter import OpenAIFormatter
from lmi.apis.openai.schema import OpenAIFormat
from lmi.executor import Tensor
from lmi.types import Delta


class EmbeddingsWhole(OpenAIFormatter):
    """All embeddings as one object. Each is written when it comes, so that no turn of the event loop is long."""

    media_type = "application/json"
    is_streaming = False
    kind, id_prefix = "list", ""

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._written: dict[int, Fragment] = {}  # by index

    def feed(self, delta: Delta) -> list[bytes]:
        self._count(delta)
        assert delta.embedding is not None
        fields = {"object": "embedding", "index": delta.index, "embedding": self._numbers(delta.embedding)}
        self._written[delta.index] = Fragment(dumps(fields))
        if self._num_open:
            return []
        data = [self._written[index] for index in range(self._num_sequences)]
        usage = {"prompt_tokens": self._num_prompt_tokens, "total_tokens": self._num_prompt_tokens}
        return [dumps({"object": self.kind, "data": data, "model": self._format.model, "usage": usage})]

    def _numbers(self, embedding: Tensor) -> list[float] | str:
        assert isinstance(self._format, EmbeddingFormat)
        return (
            base64.b64encode(embedding.data).decode() if self._format.is_base64 else array("f", embedding.data).tolist()
        )
