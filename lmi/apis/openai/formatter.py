"""Answers of completions and chats, and the parts that other answers share with them.

A stream of a chat sends the role first, then the text, then the finish reason in a separate delta, whose content is
empty as in vLLM, because clients read it from every delta. Sources: OpenAI's API reference; the fields that its client
reads; `reasoning_content` is DeepSeek's.
"""

import math
import time
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from orjson import dumps

from lmi.apis.base.formatter import JSONLINES, SSE, ErrorFields, Formatter, WholeFormatter, one_line, text_of
from lmi.apis.base.readers import Parsed
from lmi.apis.openai.calls.reader import AnswerPart, Arguments, Text, Thought, ToolCall
from lmi.apis.openai.parts import AnswerParts
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
    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._last: dict[int, Delta] = {}  # by index

    def feed(self, delta: Delta) -> list[bytes]:
        self._count(delta)
        self._last[delta.index] = delta
        return super().feed(delta)

    def _whole(self, answers: list[Answer]) -> bytes:
        choices = [self._choice(number, index, answers[index]) for number, index in enumerate(self._chosen())]
        return dumps(self._object(choices) | {"usage": self._usage()})

    def _chosen(self) -> list[int]:
        """Return the index of each choice's answer. Of more sequences than choices the most probable are taken."""
        answers, num_made, num_wanted = self._answers, self._request.num_sequences, self._format.num_choices
        made = list(range(len(answers)))
        if num_made > num_wanted:
            made.sort(key=lambda index: (index // num_made, -answers[index].cum_log_prob))
        return [index for place, index in enumerate(made) if place % num_made < num_wanted]

    def _prefill(self, index: int) -> list[Token]:
        """Return the prompt's tokens, which the first sequence of its request has."""
        return self._answers[index - index % self._request.num_sequences].prefill or []

    def _of_prompt(self, index: int) -> dict[str, Any]:
        """Return vLLM's fields of the prompt of the sequence with this index, as far as they are asked for."""
        num_top, fields = self._format.num_prompt_log_probs, self._prompt_ids(self._last[index])
        if num_top is not None:
            fields["prompt_logprobs"] = [prompt_log_prob(token, num_top) for token in self._prefill(index)]
        return fields

    @abstractmethod
    def _choice(self, number: int, index: int, answer: Answer) -> dict[str, Any]: ...


class OpenAIStream(OpenAIFormatter):
    media_type = SSE
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
    media_type = JSONLINES
    opening = b""
    closing = b"\n"
    done = b""


class CompletionWhole(OpenAIWhole):
    kind = "text_completion"
    id_prefix = "cmpl-"

    def _choice(self, number: int, index: int, answer: Answer) -> dict[str, Any]:
        assert answer.finish_reason is not None
        text, tokens = answer.text, shown_tokens(answer.tokens, answer.finish_reason)
        if not self._format.is_answer_wanted:
            text, tokens = "", []
        if self._format.echoes_prompt:
            text, tokens = self._last[index].prompt + text, [*self._prefill(index), *tokens]
        return {
            "index": number,
            "text": text,
            "logprobs": log_prob_lists(tokens, self._format) if self._format.has_log_probs else None,
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
        tokens = shown_tokens(delta.tokens, delta.finish_reason) if self._format.is_answer_wanted else []
        if is_first and self._format.echoes_prompt:  # its tokens come with its first sequence, which may be late
            request = delta.index // self._request.num_sequences
            if delta.prefill:
                self._prefills[request] = delta.prefill
            tokens = [*self._prefills.get(request, []), *tokens]
        offset = self._begun[delta.index]
        self._begun[delta.index] += sum(len(token.spelling) for token in tokens)
        return log_prob_lists(tokens, self._format, offset)


class CompletionLines(OpenAILines, CompletionStream):
    pass


class ChatWhole(OpenAIWhole):
    kind = "chat.completion"
    id_prefix = "chatcmpl-"

    def _choice(self, number: int, index: int, answer: Answer) -> dict[str, Any]:
        message = whole_message(AnswerParts.of(self._format, self._last[index].prompt).feed(answer.text, is_last=True))
        assert answer.finish_reason is not None
        tokens = shown_tokens(answer.tokens, answer.finish_reason)
        return {
            "index": number,
            "message": message,
            "logprobs": log_prob_fields(tokens, self._format) if self._format.has_log_probs else None,
            "finish_reason": chat_reason(answer.finish_reason, "tool_calls" in message),
            **self._ids(answer.tokens),
        }

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return super()._object(choices) | self._of_prompt(0)


class ChatStream(OpenAIStream):
    kind = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._parts: dict[int, AnswerParts] = {}  # by index
        self._num_calls = Counter[int]()  # by index

    def _choices(self, delta: Delta) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if delta.index not in self._parts:
            self._parts[delta.index] = AnswerParts.of(self._format, delta.prompt)
            deltas.append({"role": "assistant", "content": "", **self._prompt_ids(delta)})
        num_opening = len(deltas)
        parts = self._parts[delta.index].feed(text_of(delta.tokens), delta.finish_reason is not None)
        deltas += [self._fields(delta.index, part) for part in parts]
        tokens = shown_tokens(delta.tokens, delta.finish_reason) if self._format.has_log_probs else []
        is_told = tokens or (self._format.has_token_ids and delta.finish_reason is None)
        if is_told and len(deltas) == num_opening:
            deltas.append({"content": ""})  # the text is held back, but its tokens are not
        choices = [choice(delta.index, fields) for fields in deltas]
        if tokens:
            choices[num_opening]["logprobs"] = log_prob_fields(tokens, self._format)
        if delta.finish_reason is not None:
            reason = chat_reason(delta.finish_reason, self._num_calls[delta.index] > 0)
            choices.append(choice(delta.index, {"content": ""}, reason))
        if self._format.has_token_ids:
            choices[num_opening] |= self._ids(delta.tokens)
        return choices

    def _fields(self, index: int, part: AnswerPart) -> dict[str, Any]:
        if isinstance(part, Thought):
            return {"reasoning_content": part.text}
        if isinstance(part, Text):
            return {"content": part.text}
        if isinstance(part, Arguments):
            return {"tool_calls": [{"index": self._num_calls[index] - 1, "function": {"arguments": part.text}}]}
        self._num_calls[index] += 1
        return {"tool_calls": [{"index": self._num_calls[index] - 1} | new_call(part.name)]}

    def _chunk(self, choice: dict[str, Any], beside: bytes = b"") -> bytes:
        """Return the record of a choice. The prompt's ids stand beside the choices, as in vLLM."""
        if (ids := choice["delta"].pop("prompt_token_ids", None)) is not None:
            beside = b',"prompt_token_ids":' + dumps(ids)
        return super()._chunk(choice, beside)


class ChatLines(OpenAILines, ChatStream):
    pass


class BlockStream(OpenAIFormatter):
    """Writes the answer to a chat as blocks, each a thought, a text or a call, and an event for each change of one.

    A whole answer is made as a stream is, without the events.
    """

    media_type = SSE
    is_streaming = True
    block_types: ClassVar[Mapping[type[AnswerPart], str]]

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._parts: AnswerParts | None = None
        self._block: dict[str, Any] = {}  # that is open
        self._texts: list[str] = []  # of the open block

    def feed(self, delta: Delta) -> list[bytes]:
        self._count(delta)
        records: list[bytes] = []
        if self._parts is None:
            self._parts = AnswerParts.of(self._format, delta.prompt)
            records += self._begin()
        for part in self._parts.feed(text_of(delta.tokens), delta.finish_reason is not None):
            if isinstance(part, ToolCall) or self._block.get("type") != self.block_types[type(part)]:
                records += [*self._close(), *self._open(part)]
                self._texts = []
            if not isinstance(part, ToolCall):
                self._texts.append(part.text)
                records.append(self._grow(part))
        if delta.finish_reason is None:
            return records if self.is_streaming else []
        ending, whole = self._end(delta, delta.finish_reason)
        return [*records, *ending] if self.is_streaming else [dumps(whole)]

    def _event(self, kind: str, **fields: Any) -> bytes:
        return named_event(kind, {"type": kind, **fields}) if self.is_streaming else b""

    @abstractmethod
    def _begin(self) -> list[bytes]:
        """Return the events of an answer without blocks."""

    @abstractmethod
    def _open(self, part: AnswerPart) -> list[bytes]:
        """Begin a block."""

    @abstractmethod
    def _grow(self, part: Text | Thought | Arguments) -> bytes: ...

    @abstractmethod
    def _close(self) -> list[bytes]:
        """End the block that is open, if there is one."""

    @abstractmethod
    def _end(self, delta: Delta, reason: AnswerEnd) -> tuple[list[bytes], dict[str, Any]]:
        """Return the last events, and the whole answer."""


def named_event(name: str, fields: Mapping[str, object]) -> bytes:
    """Return a server-sent event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), one_line(dumps(fields)))


def choice(index: int, fields: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": fields, "logprobs": None, "finish_reason": finish_reason}


def whole_message(parts: Iterable[AnswerPart]) -> dict[str, Any]:
    """Return the message of a whole answer. Its content is null if there are only calls or thoughts."""
    said, thoughts = "", ""
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, ToolCall):
            calls.append(new_call(part.name))
        elif isinstance(part, Arguments):
            calls[-1]["function"]["arguments"] += part.text
        elif isinstance(part, Thought):
            thoughts += part.text
        else:
            said += part.text
    content = None if not said and (calls or thoughts) else said
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    message |= {"reasoning_content": thoughts} if thoughts else {}
    return message | ({"tool_calls": calls} if calls else {})


def new_call(name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": ""}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def chat_reason(end: AnswerEnd, has_calls: bool) -> str:
    return "tool_calls" if has_calls and REASONS[end] == "stop" else REASONS[end]


def log_prob_fields(tokens: list[Token], format: OpenAIFormat) -> dict[str, Any]:
    content = [
        token_fields(token, format) | {"top_logprobs": [token_fields(other, format) for other in token.top or ()]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def token_fields(token: Token, format: OpenAIFormat) -> dict[str, Any]:
    return {"token": name_of(token, format), "logprob": log_prob(token), "bytes": list(token.spelling.encode())}


def log_prob_lists(tokens: list[Token], format: OpenAIFormat, offset: int = 0) -> dict[str, Any]:
    """Return the four lists of a completion's log-probs. Offsets count characters of the tokens' joined spellings."""
    names: list[str] = []
    log_probs: list[float | None] = []
    top: list[dict[str, float | None] | None] = []
    offsets: list[int] = []
    for token in tokens:
        name, value = name_of(token, format), log_prob(token)
        names.append(name)
        log_probs.append(value)
        offsets.append(offset)
        offset += len(token.spelling)
        best = {name_of(other, format): log_prob(other) for other in token.top or ()}
        top.append(None if value is None else best | {name: value})
    told = top if format.num_top_log_probs else None
    return {"tokens": names, "token_logprobs": log_probs, "top_logprobs": told, "text_offset": offsets}


def shown_tokens(tokens: list[Token], finish_reason: AnswerEnd | None) -> list[Token]:
    """Return the tokens whose log-probs the answer shows: all except the end token, which has no text."""
    is_end = finish_reason is AnswerEnd.EOS_TOKEN and tokens and not tokens[-1].spelling
    return tokens[:-1] if is_end else tokens


def name_of(token: Token, format: OpenAIFormat) -> str:
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
