"""What an engine answers: results, errors, and why a sequence ended."""

import enum
from typing import Self

import msgspec

from lmi import errors

__all__ = [
    "ErrorKind",
    "FinishReason",
    "PromptLogProb",
    "RequestPerfMetrics",
    "Response",
    "ResponseError",
    "Result",
    "Tensor",
    "TokenLogProb",
]


class FinishReason(enum.IntEnum):
    """Why a sequence ended. Every Result except the last of its sequence has NOT_FINISHED."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class ErrorKind(enum.IntEnum):
    """The class of a failure, which upstream lacks. An API chooses a status from it without reading
    the message.
    """

    error: type[errors.LmiError]

    # This request failed, and the others in its batch are unharmed.
    GENERATION = 0, errors.GenerationFailed
    OUT_OF_MEMORY = 1, errors.OutOfMemory
    # The engine died or was replaced while it worked on the request.
    ENGINE_LOST = 2, errors.EngineLost
    # The engine refused the request after acceptance.
    INVALID = 3, errors.InvalidRequest
    # What the request needs beside the engine is not there. A second attempt may succeed.
    UNAVAILABLE = 4, errors.Unavailable

    def __new__(cls, value: int, error: type[errors.LmiError]) -> Self:
        kind = int.__new__(cls, value)
        kind._value_ = value
        kind.error = error
        return kind


class TokenLogProb(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One alternative at one position."""

    token_id: int
    log_prob: float


class PromptLogProb(msgspec.Struct, frozen=True, array_like=True):
    """One position of the prompt: its token's log-prob (None for the first token) and the best
    alternatives.
    """

    log_prob: float | None
    top: list[TokenLogProb] = []


class RequestPerfMetrics(msgspec.Struct, kw_only=True):
    """The times of one sequence, in seconds of `time.monotonic()`. A time is None if its event did
    not happen.

    The sequence was enqueued at `arrival_time` and waited until `first_scheduled_time`, when its
    first step began. `num_reused_tokens` counts prompt tokens in cached whole blocks, or parts of
    16 tokens (upstream counts the blocks).
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_reused_tokens: int = 0


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """An array in the order of rows. `data` holds its bytes, little-endian; `dtype` is numpy's
    name, as "float32".

    `numpy.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)` reads it.
    """

    shape: tuple[int, ...]
    dtype: str
    data: bytes


class Result(msgspec.Struct, array_like=True):
    """New output of one sequence.

    Lists have one entry for each beam, and one without beam search. `output_token_ids` holds the
    tokens that are new in this Result, or all so far with beams or `return_all_generated_tokens`.
    It includes the end token, which upstream's C++ does not. `log_probs` and `top_log_probs` are
    parallel to it. If the request asks for them, the first Result of sequence 0 has
    `prompt_log_probs` and the last of each sequence has `request_perf_metrics`. The first Result of
    a sequence has `num_cached_tokens`, the prompt tokens in whole blocks or parts that were cached;
    later ones have 0.

    `generation_logits` (num_beams, num_tokens, vocab) are the model's logits from which the new
    tokens were drawn, and `additional_outputs["generation_NAME"]` (num_beams, num_tokens, …) the
    rows of an output at the same places. With beams they are those of all tokens, with zeros behind
    a shorter beam. `context_logits` and `context_NAME` come with the first Result of sequence 0: a
    row for each prompt token that was computed for it, which are all but the first
    `num_cached_tokens`. The last of them is the first row of the generation.

    Where the request has images, the first Result of a sequence has the `prompt_token_ids` that the
    engine made of its prompt: an image takes many tokens in place of its placeholder.

    The only Result of a request with `pooling_params` has no tokens, and the `embedding` (size,) in
    float32.
    """

    output_token_ids: list[list[int]]
    is_final: bool = False
    is_sequence_final: bool = False
    sequence_index: int = 0
    finish_reasons: list[FinishReason] = msgspec.field(
        default_factory=lambda: [FinishReason.NOT_FINISHED]
    )
    log_probs: list[list[float]] | None = None
    cum_log_probs: list[float] | None = None
    top_log_probs: list[list[list[TokenLogProb]]] | None = None
    prompt_log_probs: list[PromptLogProb] | None = None
    additional_outputs: dict[str, Tensor] | None = None
    request_perf_metrics: RequestPerfMetrics | None = None
    num_cached_tokens: int = 0
    context_logits: Tensor | None = None
    generation_logits: Tensor | None = None
    embedding: Tensor | None = None
    prompt_token_ids: list[int] | None = None


class ResponseError(msgspec.Struct, frozen=True, array_like=True):
    """Why a request ended without a Result. `message` says what is wrong, with `field` of the
    Request if given.
    """

    message: str
    kind: ErrorKind = ErrorKind.GENERATION
    field: str | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "message", errors.writable(self.message))


class Response(msgspec.Struct, array_like=True):
    """A Result or an error of one request, never both. An error is always final."""

    request_id: int
    result: Result | None = None
    error: ResponseError | None = None
    client_id: int | None = None

    def has_error(self) -> bool:
        return self.error is not None

    def get_result(self) -> Result:
        """Return the Result. Raises RuntimeError with the message of an errored Response."""
        if self.result is None:
            raise RuntimeError(f"request {self.request_id} ended with an error: {self.error_msg}")

        return self.result

    @property
    def error_msg(self) -> str:
        if self.error is None:
            return ""

        if self.error.field is None:
            return self.error.message

        return f"{self.error.field} {self.error.message}"

    @property
    def is_final(self) -> bool:
        return self.result is None or self.result.is_final
