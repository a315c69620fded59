"""The types of the front end, between the wire's and the engine's.

A schema turns bytes into a GenerationRequest, the pipeline turns engine Responses into Deltas, a formatter turns
Deltas into bytes. No wire format's names and no I/O here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lmi.executor import GuidedDecodingParams, SamplingConfig


class AnswerEnd(enum.StrEnum):
    """Why an answer ended, in the words of the LMI wire; other APIs translate."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    ERROR = "error"


class OutputFormat(enum.StrEnum):
    """What separates the records of an answer."""

    JSON = "json"
    JSONLINES = "jsonlines"
    SSE = "sse"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How the answer to a request looks. Known before the parameters are checked, so that errors can use it.

    An API that has more to say has a subclass beside its schema. What only the parameters say is filled in when they
    are checked. `details`: the answer holds more than its text. `field_names` are the request's own names for fields of
    the engines' contract, beside those that its API always has.
    """

    output_format: OutputFormat = OutputFormat.JSON
    details: bool = False
    field_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_streamed(self) -> bool:
        """Whether the body is a sequence of records."""
        return self.output_format is not OutputFormat.JSON


Format = TypeVar("Format", bound=AnswerFormat)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation, for the model's chat template. `variables` are further names for the template.

    `add_generation_prompt`: the prompt ends where the model's next answer begins.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A checked request: what to generate and how, in one vocabulary for every API.

    The prompt is `prompt`, unless `prompt_token_ids` or `chat` is given. `sampling` holds only values that mean
    something ("off" values are None by now); its `num_return_sequences` is how many sequences are generated.
    `max_new_tokens` None: what the context has room for. `stop_token_ids` end the answer like a stop string.
    `needs_log_probs`: those of the generated tokens, which cost an engine time; `num_top_log_probs` None: no others.
    `is_streaming`: the answer is wanted piece by piece. `token_biases` are added to the logits of (token id, bias).
    """

    prompt: str = ""
    prompt_token_ids: tuple[int, ...] | None = None
    chat: Chat | None = None
    max_new_tokens: int | None
    sampling: SamplingConfig
    is_streaming: bool = False
    stop_sequences: tuple[str, ...] = ()
    bad_sequences: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    truncate: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    return_full_text: bool = False
    prefill_details: bool = False
    num_top_log_probs: int | None = None
    num_prompt_log_probs: int | None = None
    needs_log_probs: bool = False
    guided_decoding: GuidedDecodingParams | None = None
    token_biases: tuple[tuple[int, float], ...] = ()
    adapter: str | None = None

    @property
    def num_sequences(self) -> int:
        """How many are generated."""
        return self.sampling.num_return_sequences


@dataclass(slots=True)
class Token:
    """One token of prompt or answer.

    `text` is the piece of text that this token released: the pieces of an answer concatenate exactly to the whole
    text, so it is "" while half a character or a possible stop string is held back. `raw_text` is the text before the
    search for stop strings, None where there is no search. `log_prob` None: unknown (first prompt token).
    """

    id: int
    text: str
    log_prob: float | None = None
    is_special: bool = False
    top: list[Token] | None = None
    raw_text: str | None = None

    @property
    def spelling(self) -> str:
        """What the token adds to the text, also where that is held back for a stop string."""
        return self.text if self.raw_text is None else self.raw_text


@dataclass(slots=True)
class Delta:
    """What one engine Response brought of one sequence: new tokens, and on its last Delta the reason of the end.

    `index` numbers the sequences of all requests that are answered together: those of the first request, then those
    of the second. `prefill` (prompt tokens), `num_prompt_tokens` and `prompt_token_ids` are on the first Delta of
    each request, prefill when it was asked for. `prompt` is the text that the answer continues, on every Delta: as
    given, as rendered from a chat, or, where `return_full_text` asks for it, as decoded from token ids. `stop_reason`:
    the stop string or the stop token's id that ended the sequence. An error inside a stream is raised by the
    pipeline, never hidden in a Delta. A sequence's whole text is the concatenation of all its token texts.
    `is_followed`: the next Delta has come already, so that a writer may put both into one record.
    """

    tokens: list[Token]
    finish_reason: AnswerEnd | None = None
    prefill: list[Token] | None = None
    num_prompt_tokens: int = 0
    prompt: str = ""
    index: int = 0
    prompt_token_ids: Sequence[int] | None = None
    stop_reason: str | int | None = None
    is_followed: bool = False


@dataclass(slots=True)
class Answer:
    """A whole sequence: all its Deltas put together."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: AnswerEnd | None = None
    prefill: list[Token] | None = None
    num_prompt_tokens: int = 0

    @property
    def cum_log_prob(self) -> float:
        return sum(token.log_prob or 0.0 for token in self.tokens)

    def add(self, delta: Delta) -> None:
        self.tokens.extend(delta.tokens)
        self.finish_reason = delta.finish_reason
        self.num_prompt_tokens += delta.num_prompt_tokens
        if delta.prefill is not None:
            self.prefill = delta.prefill
        if delta.finish_reason is not None:
            self.text = "".join(token.text for token in self.tokens)


class Answers:
    """The sequences of one or more requests that are answered together, as their Deltas come."""

    def __init__(self, num_sequences: int) -> None:
        self.all = [Answer() for _ in range(num_sequences)]
        self._num_open = num_sequences

    def add(self, delta: Delta) -> bool:
        """True when this Delta was the last of all."""
        self.all[delta.index].add(delta)
        self._num_open -= delta.finish_reason is not None
        return self._num_open == 0

    def ranked(self) -> list[Answer]:
        """The most probable first; equals stay in order."""
        return sorted(self.all, key=lambda answer: -answer.cum_log_prob)
