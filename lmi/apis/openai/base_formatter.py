"""What all answers of OpenAI's API share: whole ones, streams of events, and streams of lines.

Sources: OpenAI's API reference, and vLLM's fields.
"""

import time
import uuid
from abc import abstractmethod
from collections import Counter
from typing import Any, ClassVar

import msgspec
from orjson import dumps

from lmi.apis.base.body import Parsed
from lmi.apis.base.errors import ErrorFields
from lmi.apis.base.formatters import Formatter, WholeFormatter, one_line
from lmi.apis.base.media_types import JSONLINES, SSE
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.apis.openai.log_probs import prompt_log_prob
from lmi.apis.openai.waiting import waiting_fields
from lmi.types import Answer, AnswerEnd, Delta, Token, WaitStatus

FINISH_REASONS = {
    AnswerEnd.LENGTH: "length",
    AnswerEnd.EOS_TOKEN: "stop",
    AnswerEnd.STOP_SEQUENCE: "stop",
}


class OpenAIFormatter(Formatter[OpenAIFormat]):
    """Writes the fields that all answers share, and counts tokens and open sequences."""

    # The field `object` of the answer, and the beginning of its id.
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
        # The tokens of each request's prompt, by the request's number.
        self._prefills: dict[int, list[Token]] = {}

    def _count(self, delta: Delta) -> None:
        if delta.num_prompt_tokens:
            self._num_prompt_tokens += delta.num_prompt_tokens
            self._num_cached_tokens += delta.num_cached_tokens

        if delta.prefill:
            self._prefills[self._request_of(delta)] = delta.prefill

        if self._format.is_answer_wanted:
            self._num_tokens += len(delta.tokens)

        if delta.finish_reason is not None:
            self._num_open -= 1

    def _request_of(self, delta: Delta) -> int:
        """Return the number of the request that a Delta belongs to. All have equally many
        sequences.
        """
        return delta.index // self._request.num_sequences

    def _usage(self) -> dict[str, Any]:
        """Return the numbers of tokens. A prompt counts once, however many choices it has."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }

    def _ids(self, delta: Delta) -> dict[str, Any]:
        """Return vLLM's field with the ids of new tokens, if it is asked for."""
        if not self._format.has_token_ids:
            return {}

        if not self._format.is_answer_wanted:
            return {"token_ids": []}

        return {"token_ids": [token.id for token in delta.tokens]}

    def _prompt_ids(self, delta: Delta) -> dict[str, Any]:
        """Return vLLM's field with the ids of the prompt, if it is asked for."""
        if not self._format.has_token_ids:
            return {}

        return {"prompt_token_ids": list(delta.prompt_token_ids)}

    def _reason(self, end: AnswerEnd, has_calls: bool = False) -> str:
        """Return the finish_reason of a choice."""
        if not self._format.is_answer_wanted:
            return "length"

        reason = FINISH_REASONS[end]
        if has_calls and reason == "stop":
            return "tool_calls"

        return reason

    def _prefill(self, delta: Delta) -> list[Token]:
        """Return the tokens of the prompt that a Delta answers, as far as they are known: they come
        with the first Delta of its request's first sequence.
        """
        return self._prefills.get(self._request_of(delta), [])

    def _shown(self, delta: Delta) -> list[Token]:
        """Return the new tokens whose log-probs are shown: all that count, also the end token, as
        in vLLM.
        """
        return delta.tokens if self._format.is_answer_wanted else []

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the answer with these choices, or a chunk of it."""
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

    # A whole answer always has vLLM's fields, since typed clients read them. They are null where
    # nobody asked for them.

    def _ids(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": None} | super()._ids(delta)

    def _prompt_ids(self, delta: Delta) -> dict[str, Any]:
        return {"prompt_token_ids": None} | super()._prompt_ids(delta)

    def _whole(self, answers: list[Answer]) -> bytes:
        choices = []
        for number, index in enumerate(self._indexes_of_choices(answers)):
            last_delta = self._last_by_index[index]
            tokens = answers[index].tokens
            whole_answer = msgspec.structs.replace(last_delta, tokens=tokens)
            choices.append(self._choice(number, whole_answer))

        fields = self._object(choices)
        fields["usage"] = self._usage()
        return dumps(fields)

    def _indexes_of_choices(self, answers: list[Answer]) -> list[int]:
        """Return the indexes of the answers that are choices: of each request all, or the most
        probable ones if there are more sequences than choices.
        """
        num_sequences = self._request.num_sequences
        num_choices = self._format.num_choices
        indexes_of_choices: list[int] = []
        for begin in range(0, len(answers), num_sequences):
            indexes = list(range(begin, begin + num_sequences))
            if num_sequences > num_choices:
                indexes.sort(key=lambda index: -answers[index].cum_log_prob)

            indexes_of_choices += indexes[:num_choices]

        return indexes_of_choices

    def _prompt_fields(self, delta: Delta) -> dict[str, Any]:
        """Return vLLM's fields about the prompt of a sequence."""
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
    # What stands around the object of each record.
    opening = b"data: "
    closing = b"\n\n"
    done: ClassVar[bytes] = b"data: [DONE]\n\n"
    begins_early = True

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        # All chunks are alike but for their choice, so what stands before and behind it is written
        # once.
        self._before = self.opening + dumps(self._object([])).removesuffix(b"]}")
        self._behind = b"}" + self.closing
        if self._format.has_usage:
            self._behind = b',"usage":null' + self._behind

        # For the usage so far: the tokens of the prompt that the choice answers, and those of the
        # choice.
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
        """Return a chunk without choices, which says how far the request is."""
        fields = self._object([])
        if self._format.has_usage:
            fields["usage"] = None

        return [self.record(dumps(fields | waiting_fields(status, waited_s)))]

    def _chunk(self, choice: dict[str, Any], beside: bytes = b"") -> bytes:
        """Return the record of a choice. `beside` has further fields, behind the choices."""
        behind = self._behind
        if self._format.has_running_usage:
            behind = b',"usage":%b}%b' % (dumps(self._running_usage(choice)), self.closing)

        return one_line(b"%b%b]%b%b" % (self._before, dumps(choice), beside, behind))

    def _running_usage(self, choice: dict[str, Any]) -> dict[str, int]:
        """Return the numbers of tokens of a choice so far and of its prompt. As in vLLM the other
        choices do not count.
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
    # Clients that read lines expect a choice in each.
    begins_early = False
