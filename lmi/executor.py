"""The contract between lmi and its engines: token ids in, token ids out.

The names are those of TensorRT-LLM's Executor API (Request, SamplingConfig, OutputConfig, Response, Result, enqueue,
await, cancel, statistics), so a reader of one knows the other. A docstring says where lmi adds a name or settles a
choice that upstream leaves open. The types are msgspec structs, which are both the Python API and the messages on the
engine socket. This module does not know text, HTTP or devices.

Errors have two channels. A request that can never be right raises ValueError where it is built, or `Unsupported`,
`InvalidParameter` or `Overloaded` of `lmi.errors` where it is enqueued. After acceptance every fault is a Response with
an `error`, which is always final.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import msgspec

from lmi.errors import Unsupported, writable

MAX_SEED = 2**64 - 1  # clients send unsigned 64-bit seeds
MAX_TEMPERATURE = 100.0  # the distribution is nearly flat far below this
REPETITION_PENALTIES = 0.01, 100.0  # beyond these, a logit divided by the penalty may leave the range of float32
DEFAULT_PRIORITY = 0.5
MAX_PENALTY = 2.0  # presence and frequency, either sign: the bounds of OpenAI and vLLM


def _check_int(name: str, value: int | None, minimum: int, maximum: int | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise _broken(name, "an integer", value)
    if value < minimum or (maximum is not None and value > maximum):
        raise _broken(name, f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}", value)


def _check_range(name: str, value: float | None, low: float, high: float, *, low_open: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _broken(name, "a finite number", value)
    if value < low or value > high or (low_open and value == low):
        bound = f"over {low:g}" if low_open else f"at least {low:g}"
        raise _broken(name, bound if high == math.inf else f"{bound} and at most {high:g}", value)


def _broken(name: str, rule: str, given: object) -> ValueError:
    return ValueError(f"{name} must be {rule}, given {given!r}")


class FinishReason(enum.IntEnum):
    """Why a sequence ended. Every Result except the last of its sequence has NOT_FINISHED."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class ErrorKind(enum.IntEnum):
    """The class of a failure, which upstream lacks. An API chooses a status from it without reading the message."""

    GENERATION = 0  # this request failed, and the others in its batch are unharmed
    OUT_OF_MEMORY = 1
    ENGINE_LOST = 2  # the engine died or was replaced while it worked on the request
    INVALID = 3  # the engine refused the request after acceptance


class GuideType(enum.IntEnum):
    JSON = 0
    JSON_SCHEMA = 1
    REGEX = 2
    EBNF_GRAMMAR = 3


class GuidedDecodingParams(msgspec.Struct, frozen=True):
    """The structure that the output must have. `guide` may be None only for JSON."""

    guide_type: GuideType
    guide: str | None = None

    def __post_init__(self) -> None:
        if self.guide is None and self.guide_type is not GuideType.JSON:
            raise ValueError(f"guide must be given for {self.guide_type.name}")


class LoraConfig(msgspec.Struct, frozen=True):
    """The adapter to use, by the name under which it was loaded."""

    name: str


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen.

    Decoding is greedy if and only if `temperature` is 0 or `top_k` is 1; otherwise it samples. None means "off": no
    top_k, no penalty. Upstream has no `typical_p`. A `seed` of None draws fresh randomness (upstream is deterministic
    then). Sequence i of a request uses seed + i. An engine whose seeds are signed drops the highest bit. The constants
    above bound temperature and penalties (upstream has no bounds), so that no value makes logits NaN or infinite. An
    engine may raise a tiny temperature to a larger one that is still nearly greedy.
    """

    beam_width: int = 1
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    temperature: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    num_return_sequences: int = 1

    def __post_init__(self) -> None:
        _check_int("beam_width", self.beam_width, 1)
        _check_int("num_return_sequences", self.num_return_sequences, 1)
        if self.beam_width > 1 and self.num_return_sequences > self.beam_width:
            raise _broken("num_return_sequences", f"at most beam_width ({self.beam_width})", self.num_return_sequences)
        for name, minimum in (("top_k", 0), ("min_tokens", 0), ("early_stopping", 0), ("no_repeat_ngram_size", 0)):
            _check_int(name, getattr(self, name), minimum)
        _check_int("seed", self.seed, 0, MAX_SEED)
        _check_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("typical_p", self.typical_p, 0.0, 1.0, low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES)
        _check_range("length_penalty", self.length_penalty, 0.0, math.inf)
        _check_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs that a Result carries beside the token ids.

    `num_top_log_probs` and `num_prompt_log_probs` say how many best alternatives each generated token and each prompt
    token gets; upstream does not have them. With `num_prompt_log_probs` 0 a Result has only the log-probs of the prompt
    tokens, with None it has none. Inside lmi the prompt is always excluded from the output.
    """

    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_perf_metrics: bool = False
    additional_model_outputs: tuple[str, ...] = ()
    num_top_log_probs: int = 0
    num_prompt_log_probs: int | None = None

    def __post_init__(self) -> None:
        _check_int("num_top_log_probs", self.num_top_log_probs, 0)
        _check_int("num_prompt_log_probs", self.num_prompt_log_probs, 0)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and everything an engine needs to continue it.

    `end_ids` holds further end tokens beside `end_id`, and `ignore_eos` lets generation continue past all of them;
    upstream has neither. `stop_words` and `bad_words` are token id sequences. Stop words are matched only on generated
    tokens and stay in the output. `allotted_time_ms` counts from enqueue. Every Response carries the `client_id`.
    """

    input_token_ids: tuple[int, ...]
    max_tokens: int
    streaming: bool = False
    sampling_config: SamplingConfig = SamplingConfig()
    output_config: OutputConfig = OutputConfig()
    end_id: int | None = None
    end_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop_words: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    embedding_bias: tuple[tuple[int, float], ...] = ()
    guided_decoding_params: GuidedDecodingParams | None = None
    lora_config: LoraConfig | None = None
    logits_post_processor_name: str | None = None
    return_all_generated_tokens: bool = False
    priority: float = DEFAULT_PRIORITY  # 1 is the most urgent
    allotted_time_ms: int | None = None
    client_id: int | None = None
    cache_salt: str | None = None  # prompts share cached keys and values only if they have the same salt

    def __post_init__(self) -> None:
        if not self.input_token_ids:
            raise ValueError("input_token_ids must not be empty")
        _check_int("max_tokens", self.max_tokens, 1)
        _check_range("priority", self.priority, 0.0, 1.0)
        _check_int("allotted_time_ms", self.allotted_time_ms, 1)
        for name in ("stop_words", "bad_words"):
            if any(not word for word in getattr(self, name)):
                raise ValueError(f"{name} must not hold an empty word")
        if any(not math.isfinite(bias) for _, bias in self.embedding_bias):
            raise ValueError("embedding_bias must be finite")
        if self.cache_salt == "":
            raise ValueError("cache_salt must not be empty")
        if self.guided_decoding_params is not None and self.sampling_config.beam_width > 1:
            raise ValueError("guided_decoding_params must not be combined with beam_width over 1")


class TokenLogProb(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One alternative at one position."""

    token_id: int
    log_prob: float


class PromptLogProb(msgspec.Struct, frozen=True, array_like=True):
    """One position of the prompt: its token's log-prob (None for the first token) and the best alternatives."""

    log_prob: float | None
    top: list[TokenLogProb] = []


class RequestPerfMetrics(msgspec.Struct, kw_only=True):
    """The times of one sequence, in seconds of `time.monotonic()`. A time is None if its event did not happen.

    The sequence was enqueued at `arrival_time` and waited until `first_scheduled_time`, when its first step began.
    `num_reused_tokens` counts prompt tokens whose keys and values were cached (upstream counts blocks).
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_reused_tokens: int = 0


class Result(msgspec.Struct, array_like=True):
    """New output of one sequence.

    Lists have one entry for each beam, and one without beam search. `output_token_ids` holds the tokens that are new in
    this Result, or all so far with beams or `return_all_generated_tokens`. It includes the end token, which upstream's
    C++ does not. `log_probs` and `top_log_probs` are parallel to it. If the request asks for them, the first Result of
    a request has `prompt_log_probs` and the last of a sequence has `request_perf_metrics`. The first Result of a
    sequence has `num_cached_tokens`, the prompt tokens whose keys and values were cached; in later ones it is 0.
    """

    output_token_ids: list[list[int]]
    is_final: bool = False
    is_sequence_final: bool = False
    sequence_index: int = 0
    finish_reasons: list[FinishReason] = msgspec.field(default_factory=lambda: [FinishReason.NOT_FINISHED])
    log_probs: list[list[float]] | None = None
    cum_log_probs: list[float] | None = None
    top_log_probs: list[list[list[TokenLogProb]]] | None = None
    prompt_log_probs: list[PromptLogProb] | None = None
    additional_outputs: dict[str, msgspec.Raw] | None = None
    request_perf_metrics: RequestPerfMetrics | None = None
    num_cached_tokens: int = 0


class ResponseError(msgspec.Struct, frozen=True, array_like=True):
    """Why a request ended without a Result. `message` says what is wrong, with `field` of the Request if given."""

    message: str
    kind: ErrorKind = ErrorKind.GENERATION
    field: str | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "message", writable(self.message))


class Response(msgspec.Struct, array_like=True):
    """A Result or an error of one request, never both. An error is always final."""

    request_id: int
    result: Result | None = None
    error: ResponseError | None = None
    client_id: int | None = None

    def has_error(self) -> bool:
        return self.error is not None

    @property
    def error_msg(self) -> str:
        if self.error is None:
            return ""
        return self.error.message if self.error.field is None else f"{self.error.field} {self.error.message}"

    @property
    def is_final(self) -> bool:
        return self.result is None or self.result.is_final


class KvCacheStats(msgspec.Struct, kw_only=True):
    """Blocks that can be reused and that nobody uses count as free. The last three count from the start."""

    max_num_blocks: int = 0
    free_num_blocks: int = 0
    used_num_blocks: int = 0
    tokens_per_block: int = 0
    alloc_total_blocks: int = 0  # new and reused
    alloc_new_blocks: int = 0
    reused_blocks: int = 0


class IterationStats(msgspec.Struct, kw_only=True):
    """One step of the engine. It counts requests unless a name says otherwise.

    Upstream has no `num_preemptions` and no `num_reused_tokens`.
    """

    timestamp: float = 0.0  # time.monotonic() at the end of the step
    iter: int = 0
    iter_latency_ms: float = 0.0
    num_active_requests: int = 0
    num_queued_requests: int = 0
    num_completed_requests: int = 0
    max_num_active_requests: int = 0
    num_context_tokens: int = 0
    num_generation_tokens: int = 0
    num_reused_tokens: int = 0  # that prompts found in the cache
    num_preemptions: int = 0  # in this step
    kv_cache_stats: KvCacheStats = msgspec.field(default_factory=KvCacheStats)


class RequestStats(msgspec.Struct, kw_only=True):
    """The state of one request at the end of one step."""

    id: int
    stage: str  # QUEUED, CONTEXT_IN_PROGRESS, GENERATION_IN_PROGRESS, GENERATION_COMPLETE
    context_prefill_position: int = 0
    num_generated_tokens: int = 0
    scheduled: bool = False
    paused: bool = False


class RequestStatsPerIteration(msgspec.Struct, kw_only=True):
    iter: int
    request_stats: list[RequestStats]


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do. A request that needs more is refused with a clear error, never served with less.

    With `batch_invariant` a request gets the same ids in every batch, and with `log_probs_invariant` the same log-probs
    too, bit for bit. `max_top_log_probs` bounds `num_top_log_probs` and `num_prompt_log_probs`, and `max_temperature`
    bounds `temperature`.
    """

    beam_search: bool = False
    num_return_sequences: bool = False
    guided_decoding: tuple[GuideType, ...] = ()
    typical_p: bool = False
    min_p: bool = True
    seed: bool = True
    bad_words: bool = True
    stop_words: bool = True
    embedding_bias: bool = False
    no_repeat_ngram_size: bool = False
    log_probs: bool = True
    prompt_log_probs: bool = True
    max_top_log_probs: int = 20
    max_temperature: float = MAX_TEMPERATURE
    context_logits: bool = False
    generation_logits: bool = False
    perf_metrics: bool = False
    additional_outputs: tuple[str, ...] = ()
    logits_post_processors: tuple[str, ...] = ()
    lora: bool = False
    priority: bool = False
    batch_invariant: bool = False
    log_probs_invariant: bool = False


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a loaded engine, with which a front end checks a request before it sends it.

    Only `adapters` changes while the engine runs.
    """

    name: str  # the handler: lmi-dist, vllm, trtllm
    vocab_size: int
    max_sequence_length: int  # prompt and output together, tokens
    max_num_sequences: int
    dtype: str = ""
    device: str = ""
    kernels: str = ""  # what computes, where an engine has a choice
    max_kv_cache_tokens: int = 0
    capabilities: Capabilities = Capabilities()
    adapters: tuple[str, ...] = ()  # names of the LoRA adapters that requests may use now


Progress = Callable[[str, float], None]
"""Takes the progress of a load: the stage (config, weights, warm-up ...) and the share of it that is done, 0 to 1."""


class Executor(ABC):
    """An engine with one model replica. Every method may be called from any thread.

    Ids are unique and grow. Every accepted request ends with exactly one final Response, be it output, error or
    cancellation. Source: Executor API of TensorRT-LLM.
    """

    @property
    @abstractmethod
    def info(self) -> EngineInfo: ...

    @property
    def capabilities(self) -> Capabilities:
        return self.info.capabilities

    @abstractmethod
    def enqueue_request(self, request: Request) -> int:
        """Accept a request and return its id.

        Raises InvalidParameter or Unsupported for what this engine cannot do, Overloaded when its queue is full,
        RuntimeError after shutdown.
        """

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        return [self.enqueue_request(request) for request in requests]

    @abstractmethod
    def await_responses(
        self, request_id: int | Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Response] | list[list[Response]]:
        """Wait until Responses are ready, then take all of them.

        Without an id, it returns Responses of all requests, in order for each. Those of one step become ready together.

        With an id, it returns only Responses of that request. After the final one it returns one error Response that
        says so. An id that was never given out raises ValueError (upstream blocks without end).

        With several ids, it returns one list for each, in their order. `timeout_s` is one limit for all of them.

        After `timeout_s` the list is empty. When the executor shuts down, it returns at once, perhaps an empty list.
        """

    def pass_responses_to(self, take: Callable[[list[Response]], None]) -> bool:
        """Call `take` with the Responses of each step, on the thread that makes them. Use it before the first request.

        Returns False if this engine cannot do it. If it returns True, `take` gets the Responses in the order of
        `await_responses`, which gets no more of them. So no waiting thread takes the interpreter from the thread that
        runs the next step. `take` must neither block nor raise.
        """
        return False

    @abstractmethod
    def get_num_responses_ready(self, request_id: int | None = None) -> int: ...

    @abstractmethod
    def cancel_request(self, request_id: int) -> None:
        """End a request at the next step boundary with a final CANCELLED Result. Ignores unknown and finished ids."""

    @property
    def is_loading_adapter(self) -> bool:
        """Whether the weights of an adapter are read now, while the running requests make no step."""
        return False

    def load_adapter(self, name: str, path: str, *, pinned: bool = False, preload: bool = True) -> None:
        """Let requests use the LoRA adapter in folder `path` as `name`. `info.adapters` then lists it.

        A pinned adapter is never evicted. Without `preload` only its files and rank are checked, and its weights are
        read for its first request. A name that is loaded from this folder is pinned or preloaded if it was not.

        Raises Unsupported if `capabilities.lora` is false, InvalidParameter for a name that is loaded from another
        folder, ModelUnusable with the engine's reason, and OutOfMemory if memory has no room.
        """
        raise Unsupported("lora_config", f"{self.info.name} has no adapters")

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter and free it. Requests that run with it finish.

        Raises Unsupported if `capabilities.lora` is false, UnknownAdapter for a name that is not loaded.
        """
        raise Unsupported("lora_config", f"{self.info.name} has no adapters")

    @abstractmethod
    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Return and remove the statistics of the steps since the last call, oldest first, at most 1000."""

    @abstractmethod
    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]: ...

    @abstractmethod
    def can_enqueue_requests(self) -> bool: ...

    @abstractmethod
    def shutdown(self) -> None:
        """Cancel the remaining requests, end the loop and free the device. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
