"""Answers of completions, and what those of chats share with them. Sources: OpenAI's API reference,
vLLM's fields.
"""

import math
import time
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from orjson import dumps

from lmi.apis.base.api import (
    JSONLINES,
    SSE,
    ErrorFields,
    Formatter,
    WholeFormatter,
    one_line,
    text_of,
    waiting_fields,
)
from lmi.apis.base.readers import Parsed
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.types import Answer, AnswerEnd, Delta, Token, WaitStatus

# JSON has no infinity, so this stands for it.
LEAST_LOG_PROB = -9999.0
FINISH_REASONS = {
    AnswerEnd.LENGTH: "length",
    AnswerEnd.EOS_TOKEN: "stop",
    AnswerEnd.STOP_SEQUENCE: "stop",
}


class OpenAIFormatter(Formatter[OpenAIFormat]):
    """Writes the fields that all answers share, and counts tokens and open sequences."""

    # The kind of the objects.
    kind: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._id = f"{self.id_prefix}{uuid.uuid4().hex}"
        self._created_s = int(time.time())
        self._num_open = parsed.num_sequences
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_tokens = 0
        # The tokens of the prompt of each request.
        self._prefills: dict[int, list[Token]] = {}

    def _count(self, delta: Delta) -> None:
        if delta.num_prompt_tokens:
            self._num_prompt_tokens += delta.num_prompt_tokens
            self._num_cached_tokens += delta.num_cached_tokens

        if delta.prefill:
            self._prefills[delta.index // self._request.num_sequences] = delta.prefill

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

    def _ids(self, delta: Delta) -> dict[str, Any]:
        """Return vLLM's field for the ids of new tokens, if it is asked for."""
        if not self._format.has_token_ids:
            return {}

        if not self._format.is_answer_wanted:
            return {"token_ids": []}

        return {"token_ids": [token.id for token in delta.tokens]}

    def _prompt_ids(self, delta: Delta) -> dict[str, Any]:
        if not self._format.has_token_ids:
            return {}

        return {"prompt_token_ids": list(delta.prompt_token_ids)}

    def _reason(self, end: AnswerEnd, has_calls: bool = False) -> str:
        reason = FINISH_REASONS[end] if self._format.is_answer_wanted else "length"
        return "tool_calls" if has_calls and reason == "stop" else reason

    def _prefill(self, delta: Delta) -> list[Token]:
        """Return the prompt's tokens, which come with the first sequence of its request. That may
        be late.
        """
        return self._prefills.get(delta.index // self._request.num_sequences, [])

    def _shown(self, delta: Delta) -> list[Token]:
        """Return the tokens whose log-probs are shown: all that count, as in vLLM also the end
        token.
        """
        return delta.tokens if self._format.is_answer_wanted else []

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
        kind = _kind_of_status(error.code)
        fields = {"message": error.message, "type": kind, "param": error.param, "code": error.kind}
        return dumps({"error": fields})


def _kind_of_status(status: int) -> str:
    """Return OpenAI's type for the errors of a status."""
    if status >= 500:
        return "server_error"

    return "rate_limit_error" if status == 429 else "invalid_request_error"


class OpenAIWhole(OpenAIFormatter, WholeFormatter[OpenAIFormat]):
    """Writes an answer as one object."""

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._last_by_index: dict[int, Delta] = {}

    def feed(self, delta: Delta) -> list[bytes]:
        self._count(delta)
        self._last_by_index[delta.index] = delta
        return super().feed(delta)

    # vLLM's fields are null in a whole answer that nobody asked for them, since typed clients read
    # them.

    def _ids(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": None} | super()._ids(delta)

    def _prompt_ids(self, delta: Delta) -> dict[str, Any]:
        return {"prompt_token_ids": None} | super()._prompt_ids(delta)

    def _whole(self, answers: list[Answer]) -> bytes:
        choices = []
        for number, index in enumerate(self._indexes_of_choices(answers)):
            last = self._last_by_index[index]
            whole = msgspec.structs.replace(last, tokens=answers[index].tokens)
            choices.append(self._choice(number, whole))

        return dumps(self._object(choices) | {"usage": self._usage()})

    def _indexes_of_choices(self, answers: list[Answer]) -> list[int]:
        """Of more sequences than choices return the most probable of each request."""
        num_sequences = self._request.num_sequences
        num_choices = self._format.num_choices
        indexes = list(range(len(answers)))
        if num_sequences > num_choices:
            indexes.sort(key=lambda index: (index // num_sequences, -answers[index].cum_log_prob))

        return [index for n, index in enumerate(indexes) if n % num_sequences < num_choices]

    def _of_prompt(self, delta: Delta) -> dict[str, Any]:
        """Return vLLM's fields of the prompt of a sequence."""
        log_probs = None
        num_top = self._format.num_prompt_log_probs
        if num_top is not None:
            log_probs = [prompt_log_prob(token, num_top) for token in self._prefill(delta)]

        return self._prompt_ids(delta) | {"prompt_logprobs": log_probs}

    @abstractmethod
    def _choice(self, number: int, whole: Delta) -> dict[str, Any]:
        """Return a choice. `whole` has all tokens of its sequence."""


class OpenAIStream(OpenAIFormatter):
    """Writes an answer as server-sent events, of which the last is `[DONE]`."""

    media_type = SSE
    is_streaming = True
    opening = b"data: "
    closing = b"\n\n"
    done: ClassVar[bytes] = b"data: [DONE]\n\n"
    begins_early = True

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._before = self.opening + dumps(self._object([])).removesuffix(b"]}")
        self._behind = (b',"usage":null}' if self._format.has_usage else b"}") + self.closing
        # The tokens of the prompt that the choice answers.
        self._num_running_prompt_tokens = 0
        self._num_running_tokens_by_index = Counter[int]()

    def feed(self, delta: Delta) -> list[bytes]:
        self._count(delta)
        if self._format.has_running_usage:
            self._num_running_prompt_tokens = len(delta.prompt_token_ids)
            if self._format.is_answer_wanted:
                self._num_running_tokens_by_index[delta.index] += len(delta.tokens)

        records = [self._chunk(choice) for choice in self._choices(delta)]
        if self._num_open:
            return records

        if self._format.has_usage:
            records.append(self.record(dumps(self._object([]) | {"usage": self._usage()})))

        if self.done:
            records.append(self.done)

        return records

    def waiting(self, status: WaitStatus, waited_s: float) -> list[bytes]:
        fields = self._object([])
        if self._format.has_usage:
            fields["usage"] = None

        return [self.record(dumps(fields | waiting_fields(status, waited_s)))]

    def _chunk(self, choice: dict[str, Any], beside: bytes = b"") -> bytes:
        behind = self._behind
        if self._format.has_running_usage:
            behind = b',"usage":%b}%b' % (dumps(self._running_usage(choice)), self.closing)

        return one_line(b"%b%b]%b%b" % (self._before, dumps(choice), beside, behind))

    def _running_usage(self, choice: dict[str, Any]) -> dict[str, int]:
        """Return the numbers of tokens of a choice so far and of its prompt, as vLLM does: others
        do not count.
        """
        num_prompt_tokens = self._num_running_prompt_tokens
        num_tokens = 0
        if "role" not in choice.get("delta", ()):
            num_tokens = self._num_running_tokens_by_index[choice["index"]]

        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
        }

    @classmethod
    def error(cls, error: ErrorFields) -> bytes:
        return cls.record(super().error(error)) + cls.done

    @abstractmethod
    def _choices(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the new choices. Each is sent as one record."""


class OpenAILines(OpenAIStream):
    """Writes the objects of a stream as lines."""

    media_type = JSONLINES
    opening = b""
    closing = b"\n"
    done = b""
    # Who reads lines expects a choice in each.
    begins_early = False


class Completion(OpenAIFormatter):
    """Writes what whole completions and streamed ones have alike."""

    kind = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        # The characters so far of each choice that has log-probs, by index.
        self._num_chars: dict[int, int] = {}

    def _new_fields(self, number: int, delta: Delta) -> dict[str, Any]:
        """Return what a Delta adds to its choice. The first one has the prompt, as far as it is
        asked for.
        """
        is_first = delta.index not in self._num_chars
        text = text_of(delta.tokens) if self._format.is_answer_wanted else ""
        if is_first:
            self._num_chars[delta.index] = 0
            if self._request.return_full_text:
                text = delta.prompt + text

        log_probs = None
        if self._format.has_log_probs:
            log_probs = self._log_probs(delta, is_first)

        fields = {
            "index": number,
            "text": text,
            "logprobs": log_probs,
            "finish_reason": delta.finish_reason and self._reason(delta.finish_reason),
            **self._ids(delta),
        }
        if is_first:
            fields |= self._prompt_ids(delta)

        return fields

    def _log_probs(self, delta: Delta, is_first: bool) -> dict[str, Any]:
        """Return four lists. Offsets are places in the text of the choice, where a token that adds
        none has one too.
        """
        tokens = self._shown(delta)
        offsets: list[int] = []
        if is_first and self._request.return_full_text:
            prompt_tokens = self._prefill(delta)
            is_truncated = self._request.truncate is not None
            is_end_cut = is_truncated and self._request.truncation_side == "right"
            offsets += offsets_in(delta.prompt, prompt_tokens, is_end_cut=is_end_cut)
            self._num_chars[delta.index] = len(delta.prompt)
            tokens = [*prompt_tokens, *tokens]

        for token in tokens[len(offsets) :]:
            offsets.append(self._num_chars[delta.index])
            self._num_chars[delta.index] += len(token.spelling)

        return {
            "tokens": [name_of(token, self._format) for token in tokens],
            "token_logprobs": [log_prob(token) for token in tokens],
            "top_logprobs": [self._top_log_probs(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top_log_probs(self, token: Token) -> dict[str, float | None] | None:
        """Return the token itself, then the best in its place, as in vLLM. A name that several have
        means the first.
        """
        if token.log_prob is None:
            return None

        log_probs: dict[str, float | None] = {}
        for candidate in (token, *(token.top or ())):
            log_probs.setdefault(name_of(candidate, self._format), log_prob(candidate))

        return log_probs


class CompletionWhole(Completion, OpenAIWhole):
    """Writes a completion as one object."""

    def _choice(self, number: int, whole: Delta) -> dict[str, Any]:
        return self._new_fields(number, whole) | self._of_prompt(whole)


class CompletionStream(Completion, OpenAIStream):
    """Writes a completion as server-sent events."""

    def _choices(self, delta: Delta) -> list[dict[str, Any]]:
        choice = self._new_fields(delta.index, delta)
        is_told = choice["text"] or delta.finish_reason or self._format.has_token_ids
        return [choice] if is_told or (choice["logprobs"] and delta.tokens) else []


class CompletionLines(OpenAILines, CompletionStream):
    """Writes a completion as lines."""


def log_prob_fields(tokens: list[Token], format: OpenAIFormat) -> dict[str, Any]:
    """Return the log-probs of a chat."""

    def fields(token: Token) -> dict[str, Any]:
        return {
            "token": name_of(token, format),
            "logprob": log_prob(token),
            "bytes": list(token.spelled_name.encode()),
        }

    content = []
    for token in tokens:
        top_log_probs = [fields(candidate) for candidate in token.top or ()]
        content.append(fields(token) | {"top_logprobs": top_log_probs})

    return {"content": content, "refusal": None}


def prompt_log_prob(token: Token, num_top: int) -> dict[str, Any] | None:
    """Return a token of the prompt and the best in its place, by their ids. Nothing comes before
    the first token.

    The rank of a token that is not among the best is not known.
    """
    if token.log_prob is None:
        return None

    best = (token.top or ())[:num_top]
    log_probs = {}
    for rank, candidate in [(None, token), *enumerate(best, 1)]:
        log_probs[str(candidate.id)] = {
            "logprob": log_prob(candidate),
            "rank": rank,
            "decoded_token": candidate.text,
        }

    return log_probs


def name_of(token: Token, format: OpenAIFormat) -> str:
    """Return a token's name in log-probs: how it is spelled, or its id where the format asks."""
    return f"token_id:{token.id}" if format.names_tokens_by_id else token.spelled_name


def offsets_in(prompt: str, tokens: Sequence[Token], *, is_end_cut: bool = False) -> list[int]:
    """Return where each token of a prompt begins in its text.

    The text may lack what the tokenizer has added, a special token or a space before the first
    word, which have a place but no width. The search begins at the end of the text, because a
    prompt that was cut has lost its beginning, but at the beginning where it is the end that may be
    cut.
    """
    if is_end_cut:
        return _offsets_from_the_beginning(prompt, tokens)

    offsets: list[int] = []
    end = len(prompt)
    for token in reversed(tokens):
        if prompt.endswith(token.text, 0, end):
            end -= len(token.text)
        elif token.text.startswith(" ") and prompt.endswith(token.text[1:], 0, end):
            end -= len(token.text) - 1
        elif not token.is_special:
            # The tokenizer has changed the text, as to lower case.
            end = max(0, end - len(token.text))

        offsets.append(end)

    return offsets[::-1]


def _offsets_from_the_beginning(prompt: str, tokens: Sequence[Token]) -> list[int]:
    offsets: list[int] = []
    begin = 0
    for token in tokens:
        offsets.append(begin)
        if prompt.startswith(token.text, begin):
            begin += len(token.text)
        elif token.text.startswith(" ") and prompt.startswith(token.text[1:], begin):
            begin += len(token.text) - 1
        elif not token.is_special:
            begin = min(len(prompt), begin + len(token.text))

    return offsets


def log_prob(token: Token) -> float | None:
    """Return the log-prob as a finite number, None for a first prompt token."""
    if token.log_prob is None:
        return None

    if not math.isfinite(token.log_prob):
        return LEAST_LOG_PROB

    return max(token.log_prob, LEAST_LOG_PROB)
