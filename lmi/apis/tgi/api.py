"""Answers of the TGI API: an object, a list of one, or server-sent events with a step each; and its rows.

    {"generated_text":"...","details":{"finish_reason":"length","generated_tokens":8,"seed":null,"prefill":[],...}}
    data:{"index":1,"token":{"id":304,"text":" a","logprob":-0.5,"special":false},"generated_text":null,"details":null}

Keys, their order and the separators are those of Text Generation Inference 3.3: `data:` without a space after it, no
`[DONE]`, events counted from 1, and fields that were not asked for left out or null. `seed` is the client's. The most
probable of several sequences is the answer, and its details hold the others.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from orjson import dumps

from lmi.apis.base.api import Api, ErrorRules, Forms, Row
from lmi.apis.base.formatter import NO_TOKEN, ErrorFields, Formatter, WholeFormatter, joined
from lmi.apis.base.readers import Parsed
from lmi.apis.tgi import schema
from lmi.apis.tgi.schema import TgiFormat
from lmi.errors import EngineLost, GenerationFailed, InvalidRequest, Overloaded
from lmi.types import Answer, AnswerEnd, Delta, Token, ranked


class TgiWhole(WholeFormatter[TgiFormat]):
    """The whole answer."""

    def _whole(self, answers: list[Answer]) -> bytes:
        best, *others = ranked(self._request, answers)
        whole: dict[str, Any] = {"generated_text": self._full_text(best.text)}
        if self._format.details:
            whole["details"] = self._sequence_details(best)
            if others:
                whole["details"]["best_of_sequences"] = [
                    {"generated_text": self._full_text(other.text)} | self._sequence_details(other) for other in others
                ]
        return dumps([whole] if self._format.is_list else whole)

    def _sequence_details(self, answer: Answer) -> dict[str, Any]:
        details: dict[str, Any] = {
            "finish_reason": answer.finish_reason,
            "generated_tokens": len(answer.tokens),
            "seed": self._request.sampling.seed,
            "prefill": [_prompt_token(token) for token in self._answers.all[0].prefill or ()],
            "tokens": [_token(token) for token in answer.tokens],
        }
        if self._request.num_top_log_probs:
            details["top_tokens"] = [[_token(other) for other in token.top or ()] for token in answer.tokens]
        return details

    @staticmethod
    def error(error: ErrorFields) -> bytes:
        return dumps({"error": error.message, "error_type": error.kind})


class TgiStream(Formatter[TgiFormat]):
    """The answer step by step. A step is nearly always one token."""

    media_type = "text/event-stream"
    is_streaming = True
    opening = b"data:"
    closing = b"\n\n"

    def __init__(self, parsed: Parsed[TgiFormat]) -> None:
        super().__init__(parsed)
        self._texts: list[str] = []
        self._num_tokens = self._num_prompt_tokens = 0

    def feed(self, delta: Delta) -> list[bytes]:
        self._num_prompt_tokens += delta.num_prompt_tokens
        is_last = delta.finish_reason is not None
        if not delta.tokens and not is_last:
            return []
        token = joined(delta.tokens) if delta.tokens else NO_TOKEN
        self._texts.append(token.text)
        self._num_tokens += len(delta.tokens)
        return [self._event(token, delta.finish_reason)]

    def _event(self, token: Token, finish_reason: AnswerEnd | None) -> bytes:
        index = self._num_tokens + (token is NO_TOKEN)
        event: dict[str, Any] = {"index": index, "token": _token(token)}
        if self._request.num_top_log_probs:
            event["top_tokens"] = [_token(other) for other in token.top or ()]
        is_last = finish_reason is not None
        event["generated_text"] = self._full_text("".join(self._texts)) if is_last else None
        event["details"] = None
        if is_last and self._format.details:
            event["details"] = {
                "finish_reason": finish_reason,
                "generated_tokens": self._num_tokens,
                "seed": self._request.sampling.seed,
                "input_length": self._num_prompt_tokens,
            }
        return self.record(dumps(event))

    @classmethod
    def error(cls, error: ErrorFields) -> bytes:
        return cls.record(TgiWhole.error(error))


def _token(token: Token) -> dict[str, Any]:
    return _prompt_token(token) | {"special": token.is_special}


def _prompt_token(token: Token) -> dict[str, Any]:
    return {"id": token.id, "text": token.text, "logprob": token.log_prob}


FORMS = Forms(TgiWhole, TgiStream)
TGI: Api[TgiFormat] = Api(
    name="tgi",
    paths=("/",),  # whose 404 and 405 are the LMI API's
    prefixes=("/info", "/health"),
    default_format=lambda model: TgiFormat(),
    read=schema.read,
    parse=schema.parse,
    formatter=FORMS.formatter,
    errors=ErrorRules(
        FORMS.write_error,
        (
            Row(InvalidRequest, 422, "validation"),
            Row(GenerationFailed, 424, "generation"),
            Row(Overloaded, 429, "overloaded"),
            Row(EngineLost, 503, "incomplete_generation"),
        ),
        schema.PARAMETERS.wire_names(input_token_ids="inputs"),
        lambda status: "validation" if status < 500 else "overloaded" if status == 503 else "generation",
    ),
)
TGI_GENERATE = replace(TGI, name="tgi_generate", paths=("/generate",), read=partial(schema.read, stream=False))
TGI_STREAM = replace(
    TGI, name="tgi_generate_stream", paths=("/generate_stream",), read=partial(schema.read, stream=True)
)
