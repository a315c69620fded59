"""Answers to several inputs: a list, or lines that hold the new text of each input.

    [
      {
        "generated_text":"..."
      }
    ]
    {"outputs": ["This", ""]}

Indents, separators and escapes are those of the reference. The best sequence of an input is its answer.
Source: LMI handlers' inference API schema (v0.28.0 page), second half.
"""

from __future__ import annotations

import json

from orjson import dumps

from lmi.apis.base.formatter import ErrorFields, Formatter, text_of
from lmi.apis.base.readers import Parsed
from lmi.types import Answer, AnswerFormat, Answers, Delta, GenerationRequest, ranked

FAILURE = "invoke handler failure"


class BatchWhole(Formatter[AnswerFormat]):
    """The whole answer: an object for each input, in the inputs' order."""

    media_type = "application/json"
    is_streaming = False

    def __init__(self, parsed: Parsed[AnswerFormat]) -> None:
        super().__init__(parsed)
        self._requests = parsed.requests
        self._answers = Answers(parsed.num_sequences)

    def feed(self, delta: Delta) -> list[bytes]:
        if not self._answers.add(delta):
            return []
        num = self._requests[0].num_sequences  # equal for all requests
        texts = [
            self._text(request, self._answers.all[n * num : (n + 1) * num]) for n, request in enumerate(self._requests)
        ]
        return [b"[\n%b\n]" % b",\n".join(b'  {\n    "generated_text":%b\n  }' % dumps(text) for text in texts)]

    @staticmethod
    def _text(request: GenerationRequest, answers: list[Answer]) -> str:
        best = ranked(request, answers)[0]
        return (request.prompt if request.return_full_text else "") + best.text

    @staticmethod
    def error(error: ErrorFields) -> bytes:
        return b'{\n  "code":%d,\n  "message":%b,\n  "error":%b\n}' % (error.code, dumps(FAILURE), dumps(error.message))


class BatchStream(Formatter[AnswerFormat]):
    """The answer as a stream. A line holds the Deltas that arrived together, and "" for inputs without new text."""

    media_type = "application/jsonlines"
    is_streaming = True

    def __init__(self, parsed: Parsed[AnswerFormat]) -> None:
        super().__init__(parsed)
        self._prefixes = [request.prompt if request.return_full_text else "" for request in parsed.requests]
        self._outputs = [""] * len(parsed.requests)  # of the next line
        self._has_news = False

    def feed(self, delta: Delta) -> list[bytes]:
        text = text_of(delta.tokens)
        if text or delta.finish_reason is not None:
            self._has_news = True
            self._outputs[delta.index] += self._prefixes[delta.index] + text
            self._prefixes[delta.index] = ""
        if delta.is_followed or not self._has_news:
            return []
        outputs, self._outputs, self._has_news = self._outputs, [""] * len(self._outputs), False
        return [_line({"outputs": outputs})]

    @staticmethod
    def error(error: ErrorFields) -> bytes:
        return _line({"code": error.code, "message": FAILURE, "error": error.message})


def _line(fields: dict[str, object]) -> bytes:
    return json.dumps(fields).encode() + b"\n"
