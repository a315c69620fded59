"""The front end's own words, between the wire's and the engine's.

A schema turns bytes into a GenerationRequest, the pipeline turns engine Responses into Deltas, a formatter turns
Deltas into bytes. No wire format's names and no I/O here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from lmi.executor import GuidedDecodingParams, SamplingConfig


class FinishReason(enum.StrEnum):
    """Why an answer ended, in the words of the LMI wire; other doors translate."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    ERROR = "error"


class OutputFormat(enum.StrEnum):
    """How an answer is framed."""

    JSON = "json"
    JSONLINES = "jsonlines"
    SSE = "sse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The form of an answer: all that must be known to answer a request at all, if only with an error."""

    output_format: OutputFormat = OutputFormat.JSON
    tgi_compat: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A checked request: what to generate and how, in one vocabulary for every door.

    `sampling` holds only values that mean something ("off" values are None by now). `stop_token_ids` end the answer
    like a stop string. `num_top_log_probs` None: none asked for. `is_streaming`: the answer is wanted piece by piece.
    """

    prompt: str
    max_new_tokens: int
    sampling: SamplingConfig
    is_streaming: bool = False
    output_format: OutputFormat = OutputFormat.JSON
    stop_sequences: tuple[str, ...] = ()
    bad_sequences: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    truncate: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    return_full_text: bool = False
    details: bool = False
    prefill_details: bool = False
    num_top_log_probs: int | None = None
    num_prompt_log_probs: int | None = None
    guided_decoding: GuidedDecodingParams | None = None
    adapter: str | None = None
    tgi_compat: bool = False

    @property
    def frame(self) -> Frame:
        return Frame(output_format=self.output_format, tgi_compat=self.tgi_compat)


@dataclass(slots=True)
class Token:
    """One token of prompt or answer.

    `text` is the piece of text that this token released: the pieces of an answer concatenate exactly to the whole
    text, so it is "" while half a character or a possible stop string is held back. `log_prob` None: unknown (first
    prompt token).
    """

    id: int
    text: str
    log_prob: float | None = None
    is_special: bool = False
    top: list[Token] | None = None


@dataclass(slots=True)
class Delta:
    """What one engine Response brought: new tokens, and on the last Delta the reason of the end.

    `prefill` (prompt tokens) stands on the first Delta when it was asked for. An error inside a stream is raised by
    the pipeline, never hidden in a Delta. The answer's whole text is the concatenation of all token texts.
    """

    tokens: list[Token]
    finish_reason: FinishReason | None = None
    prefill: list[Token] | None = None
    num_prompt_tokens: int = 0  # on the first Delta


@dataclass(slots=True)
class Answer:
    """A whole answer: every Delta of a request put together."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prefill: list[Token] | None = None

    def add(self, delta: Delta) -> None:
        self.tokens.extend(delta.tokens)
        self.finish_reason = delta.finish_reason
        if delta.prefill is not None:
            self.prefill = delta.prefill
        if delta.finish_reason is not None:
            self.text = "".join(token.text for token in self.tokens)
