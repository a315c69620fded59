"""Answers of completions, and the parts that answers of chat completions share with them.

    {"id": "cmpl-…", "object": "text_completion", "created": 1, "model": "m", "choices": [{"index": 0, "text": " upon",
     "logprobs": null, "finish_reason": "length"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1, …}}

A stream sends such objects as server-sent events, which end with `data: [DONE]`, or as lines. Sources: OpenAI's API
reference; the fields that its client reads.
"""

from __future__ import annotations

import math
import time
import uuid
from abc import abstractmethod
from typing import Any, ClassVar

from orjson import dumps

from lmi.apis.base.formatter import ErrorFields, Formatter, WholeFormatter, one_line, text_of
from lmi.apis.base.readers import Parsed
from lmi.apis.openai.schema import OpenAIFormat
from lmi.types import Answer, AnswerEnd, Delta, Token

LEAST_LOG_PROB = -9999.0  # JSON has no infinity
REASONS = {AnswerEnd.LENGTH: "length", AnswerEnd.EOS_TOKEN: "stop", AnswerEnd.STOP_SEQUENCE: "stop"}


class OpenAIFormatter(Formatter[OpenAIFormat]):
    """Writes the fields that all answers share, and counts tokens and open sequences."""

    kind: ClassVar[str]  # of the objects
    id_prefix: ClassVar[str]

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._id = f"{self.id_prefix}{uuid.uuid4().hex}"
        self._created_s = int(time.time())
        self._num_sequences = parsed.num_sequences
        self._num_open = self._num_sequences
        self._num_prompt_tokens = self._num_cached_tokens = self._num_tokens = 0

    def _count(self, delta: Delta) -> None:
        if delta.num_prompt_tokens:
            self._num_prompt_tokens += delta.num_prompt_tokens
            self._num_cached_tokens += delta.num_cached_tokens
        if self._format.is_answer_wanted:
            self._num_tokens += len(delta.tokens)
        self._num_open -= delta.finish_reason is not None

    def _usage(self) -> dict[str, Any]:
        """Return the numbers of tokens. A prompt counts once, however many choices it has."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }

    def _ids(self, tokens: list[Token]) -> dict[str, Any]:
        """Return vLLM's field for the ids of new tokens, if it is asked for."""
        told = tokens if self._format.is_answer_wanted else []
        return {"token_ids": [token.id for token in told]} if self._format.has_token_ids else {}

    def _prompt_ids(self, delta: Delta) -> dict[str, Any]:
        return {"prompt_token_ids": delta.prompt_token_ids} if self._format.has_token_ids else {}

    def _reason(self, end: AnswerEnd) -> str:
        return REASONS[end] if self._format.is_answer_wanted else "length"

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": self.kind,
            "created": self._created_s,
            "model": self._format.model,
            "system_fingerprint": "lmi",
            "choices": choices,
        }

    @classmethod
    def error(cls, error: ErrorFields) -> bytes:
        status = error.code
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        fields = {"message": error.message, "type": kind, "param": error.param, "code": error.kind}
        return dumps({"error": fields})


class OpenAIWhole(OpenAIFormatter, WholeFormatter[OpenAIFormat]):
    """The answer as one object."""

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._last: dict[int, Delta] = {}  # by index

    def feed(self, delta: Delta) -> list[bytes]:
        self._count(delta)
        self._last[delta.index] = delta
        return super().feed(delta)

    def _whole(self, answers: list[Answer]) -> bytes:
        choices = [self._choice(n, index, answer) for n, (index, answer) in enumerate(self._chosen())]
        return dumps(self._object(choices) | {"usage": self._usage()})

    def _chosen(self) -> list[tuple[int, Answer]]:
        """Return the index and answer of each choice. Of more sequences than choices the most probable are taken."""
        num_made, num_wanted = self._request.num_sequences, self._format.num_choices
        indexed = list(enumerate(self._answers.all))
        chosen = []
        for first in range(0, len(indexed), num_made):
            made = indexed[first : first + num_made]
            if num_made > num_wanted:
                made.sort(key=lambda item: -item[1].cum_log_prob)
            chosen += made[:num_wanted]
        return chosen

    def _of_prompt(self, index: int) -> dict[str, Any]:
        """Return vLLM's fields of the prompt of the sequence with this index, as far as they are asked for."""
        first = self._answers.all[index - index % self._request.num_sequences]  # its Delta has the prompt's tokens
        num_top, fields = self._format.num_prompt_log_probs, self._prompt_ids(self._last[index])
        if num_top is not None:
            fields["prompt_logprobs"] = [prompt_log_prob(token, num_top) for token in first.prefill or ()]
        return fields

    @abstractmethod
    def _choice(self, number: int, index: int, answer: Answer) -> dict[str, Any]: ...


class OpenAIStream(OpenAIFormatter):
    """The answer as server-sent events."""

    media_type = "text/event-stream"
    is_streaming = True
    opening = b"data: "
    closing = b"\n\n"
    done: ClassVar[bytes] = b"data: [DONE]\n\n"

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._before = self.opening + dumps(self._object([])).removesuffix(b"]}")
        self._behind = (b',"usage":null}' if self._format.has_usage else b"}") + self.closing

    def feed(self, delta: Delta) -> list[bytes]:
        self._count(delta)
        records = [self._chunk(choice) for choice in self._choices(delta)]
        if self._num_open:
            return records
        if self._format.has_usage:
            records.append(self.record(dumps(self._object([]) | {"usage": self._usage()})))
        return [*records, self.done] if self.done else records

    def _chunk(self, choice: dict[str, Any], beside: bytes = b"") -> bytes:
        return one_line(b"%b%b]%b%b" % (self._before, dumps(choice), beside, self._behind))

    @classmethod
    def error(cls, error: ErrorFields) -> bytes:
        return cls.record(super().error(error)) + cls.done

    @abstractmethod
    def _choices(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the new choices. Each is sent as one record."""


class OpenAILines(OpenAIStream):
    """The answer as lines."""

    media_type = "application/jsonlines"
    opening = b""
    closing = b"\n"
    done = b""


class CompletionWhole(OpenAIWhole):
    kind = "text_completion"
    id_prefix = "cmpl-"

    def _choice(self, number: int, index: int, answer: Answer) -> dict[str, Any]:
        text, log_probs = answer.text, ChoiceLogProbs(self._format)
        if self._format.has_log_probs and self._format.echoes_prompt:
            first = index - index % self._request.num_sequences  # its Delta has the prompt's tokens
            log_probs.add(self._answers.all[first].prefill or [])
        if self._format.is_answer_wanted:
            log_probs.add(shown_tokens(answer.tokens, answer.finish_reason))
        if self._format.echoes_prompt:
            text = self._last[index].prompt + (text if self._format.is_answer_wanted else "")
        assert answer.finish_reason is not None
        return {
            "index": number,
            "text": text,
            "logprobs": log_probs.fields() if self._format.has_log_probs else None,
            "finish_reason": self._reason(answer.finish_reason),
            **self._ids(answer.tokens),
            **self._of_prompt(index),
        }


class CompletionStream(OpenAIStream):
    kind = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._begun: dict[int, int] = {}  # index -> characters with log-probs so far
        self._prefills: dict[int, list[Token]] = {}  # by request

    def _choices(self, delta: Delta) -> list[dict[str, Any]]:
        is_first = delta.index not in self._begun
        text = text_of(delta.tokens) if self._format.is_answer_wanted else ""
        if is_first:
            self._begun[delta.index] = 0
            text = delta.prompt + text if self._format.echoes_prompt else text
        log_probs = self._log_probs(delta, is_first) if self._format.has_log_probs else None
        ids = self._ids(delta.tokens) | (self._prompt_ids(delta) if is_first else {})
        if not (text or delta.finish_reason or ids or (log_probs is not None and delta.tokens)):
            return []
        reason = delta.finish_reason and self._reason(delta.finish_reason)
        return [{"index": delta.index, "text": text, "logprobs": log_probs, "finish_reason": reason, **ids}]

    def _log_probs(self, delta: Delta, is_first: bool) -> dict[str, Any]:
        log_probs = ChoiceLogProbs(self._format, self._begun[delta.index])
        if is_first and self._format.echoes_prompt:
            log_probs.add(self._prefill(delta))
        if self._format.is_answer_wanted:
            log_probs.add(shown_tokens(delta.tokens, delta.finish_reason))
        self._begun[delta.index] = log_probs.offset
        return log_probs.fields()

    def _prefill(self, delta: Delta) -> list[Token]:
        """Return the prompt tokens of the delta's request. They come with its first sequence, which may be late."""
        request = delta.index // self._request.num_sequences
        if delta.prefill:
            self._prefills[request] = delta.prefill
        return self._prefills.get(request, [])


class CompletionLines(OpenAILines, CompletionStream):
    pass


class ChoiceLogProbs:
    """The four lists of a completion's log-probs. Offsets count characters of the tokens' joined spellings."""

    def __init__(self, format: OpenAIFormat, offset: int = 0) -> None:
        self._format, self._num_top = format, format.num_top_log_probs
        self.offset = offset
        self._tokens: list[str] = []
        self._log_probs: list[float | None] = []
        self._top: list[dict[str, float | None] | None] = []
        self._offsets: list[int] = []

    def add(self, tokens: list[Token]) -> None:
        for token in tokens:
            name = name_of(token, self._format)
            self._tokens.append(name)
            self._log_probs.append(log_prob(token))
            self._offsets.append(self.offset)
            self.offset += len(token.spelling)
            best = {name_of(other, self._format): log_prob(other) for other in token.top or ()}
            is_told = self._num_top and token.log_prob is not None
            self._top.append(best | {name: log_prob(token)} if is_told else None)

    def fields(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens,
            "token_logprobs": self._log_probs,
            "top_logprobs": self._top if self._num_top else None,
            "text_offset": self._offsets,
        }


def shown_tokens(tokens: list[Token], finish_reason: AnswerEnd | None) -> list[Token]:
    """Return the tokens whose log-probs the answer shows: all except the end token, which has no text."""
    is_end = finish_reason is AnswerEnd.EOS_TOKEN and tokens and not tokens[-1].spelling
    return tokens[:-1] if is_end else tokens


def name_of(token: Token, format: OpenAIFormat) -> str:
    """Return what log-probs call a token."""
    return f"token_id:{token.id}" if format.names_tokens_by_id else token.spelling


def prompt_log_prob(token: Token, num_top: int) -> dict[str, Any] | None:
    """Return a token of the prompt and the best in its place, by their ids. Nothing comes before the first token.

    The rank of a token that is not among the best is not known.
    """
    if token.log_prob is None:
        return None
    ranked = [(None, token), *enumerate((token.top or ())[:num_top], 1)]
    return {str(one.id): {"logprob": log_prob(one), "rank": rank, "decoded_token": one.text} for rank, one in ranked}


def log_prob(token: Token) -> float | None:
    """Return the log-prob as a finite number, None for a first prompt token."""
    if token.log_prob is None:
        return None
    return max(token.log_prob, LEAST_LOG_PROB) if math.isfinite(token.log_prob) else LEAST_LOG_PROB
