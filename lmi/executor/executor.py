"""The contract of an engine: what it is and can do, so that a request can be checked first;
enqueue, await, cancel.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self

import msgspec

from lmi.errors import Unsupported
from lmi.executor.request import MAX_TEMPERATURE, AdditionalModelOutput, GuideType, Request
from lmi.executor.response import Response

__all__ = [
    "Capabilities",
    "Embeddings",
    "EngineInfo",
    "Executor",
    "InflightBatchingStats",
    "IterationStats",
    "KvCacheStats",
    "MemoryUse",
    "Progress",
    "PromptProgress",
    "RequestStats",
    "RequestStatsPerIteration",
    "SpecDecodingStats",
]


class Embeddings(msgspec.Struct, frozen=True):
    """The embeddings of a model: how many numbers one has, and how many a request may ask for
    instead.

    With `shorter` None it may not, with () it may ask for any number below `size`.
    """

    size: int
    shorter: tuple[int, ...] | None = None


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do. A request that needs more is refused with a clear error, never served
    with less.

    `adapter_pins` says that `load_adapter` may pin one. With `log_probs_before_processors`
    log-probs are the model's, whatever a logits post-processor does. `logits_post_processor_arrays`
    is the library, torch or numpy, whose arrays it gets. With `batch_invariant` a request gets the
    same ids in every batch, and with `log_probs_invariant` the same log-probs too, bit for bit.
    `max_top_log_probs` bounds `num_top_log_probs` and `num_prompt_log_probs`, and `max_temperature`
    bounds `temperature`. `max_images` bounds the images of a prompt. A model with `embeddings` does
    nothing else. An engine without `penalties` says by itself why it refuses one.
    """

    # 1 means that there is no beam search.
    max_beam_width: int = 1
    num_return_sequences: bool = False
    guided_decoding: tuple[GuideType, ...] = ()
    # Why it does not guide decoding, where the engine could.
    why_no_guides: str = ""
    typical_p: bool = False
    min_p: bool = True
    seed: bool = True
    penalties: bool = True
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
    additional_outputs: tuple[AdditionalModelOutput, ...] = ()
    logits_post_processors: tuple[str, ...] = ()
    logits_post_processor_arrays: str = "torch"
    log_probs_before_processors: bool = False
    lora: bool = False
    adapter_pins: bool = False
    kv_cache_retention: bool = False
    priority: bool = False
    batch_invariant: bool = False
    log_probs_invariant: bool = False
    embeddings: Embeddings | None = None
    # 0 means that it reads none.
    max_images: int = 0


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a loaded engine, with which a front end checks a request before it sends it.

    Beside `max_num_sequences` in a batch it may run `num_express_places` requests with
    `is_express`. The sequences of a batch may have `max_loras` different adapters, 0 where the
    engine has none. `image_placeholder` is the text of an image where the chat template writes
    none; `{n}` is its number from 1 on.

    Only `adapters` changes while the engine runs.
    """

    # The engine, as `option.rolling_batch` names it.
    name: str
    vocab_size: int
    # Tokens of prompt and output together.
    max_sequence_length: int
    max_num_sequences: int
    # Why `max_num_sequences` is what it is, where the engine has chosen it.
    batch_reason: str = ""
    num_express_places: int = 0
    max_loras: int = 0
    dtype: str = ""
    device: str = ""
    # What computes, where an engine has a choice.
    kernels: str = ""
    max_kv_cache_tokens: int = 0
    capabilities: Capabilities = Capabilities()
    image_placeholder: str = ""
    # The names of the LoRA adapters that requests may use now.
    adapters: tuple[str, ...] = ()


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of the host's memory that an engine holds now. Upstream has none."""

    # In the form in which the kernels read them, without what stays in a mapped file.
    weights: int
    # What the KV cache takes at most.
    kv_cache_reserved: int
    # What of it was written, and not given back since.
    kv_cache_touched: int


Progress = Callable[[str, float], None]
"""Takes the progress of a load: the stage (config, weights, warm-up ...) and the share of it that
is done, 0 to 1.
"""


class KvCacheStats(msgspec.Struct, kw_only=True):
    """Blocks that can be reused and that nobody uses count as free. The last five are of the time
    since the start.

    `missed_blocks` are those of prompts that were not found, and `cache_hit_rate` is the share of
    those that were.
    """

    max_num_blocks: int = 0
    free_num_blocks: int = 0
    used_num_blocks: int = 0
    tokens_per_block: int = 0
    # New blocks and reused ones.
    alloc_total_blocks: int = 0
    alloc_new_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0
    cache_hit_rate: float = 0.0


class InflightBatchingStats(msgspec.Struct, kw_only=True):
    """The requests of one step: those that computed prompt tokens and those that computed tokens of
    an answer.
    """

    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_gen_requests: int = 0
    num_ctx_tokens: int = 0


class SpecDecodingStats(msgspec.Struct, kw_only=True):
    """The drafts of one step, their tokens, and those tokens that were right."""

    num_requests_with_draft_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class IterationStats(msgspec.Struct, kw_only=True):
    """One step of the engine. It counts requests unless a name says otherwise.

    Upstream has no `num_preemptions` and no `num_reused_tokens`. An engine that does not say which
    requests ran in a step has no `inflight_batching_stats`.
    """

    # `time.monotonic()` at the end of the step.
    timestamp: float = 0.0
    iter: int = 0
    iter_latency_ms: float = 0.0
    num_active_requests: int = 0
    num_queued_requests: int = 0
    num_completed_requests: int = 0
    max_num_active_requests: int = 0
    num_context_tokens: int = 0
    num_generation_tokens: int = 0
    # Tokens of prompts that were in the cache.
    num_reused_tokens: int = 0
    # Sequences that were preempted in this step.
    num_preemptions: int = 0
    kv_cache_stats: KvCacheStats = msgspec.field(default_factory=KvCacheStats)
    inflight_batching_stats: InflightBatchingStats | None = None
    # Only a step with drafts has them.
    spec_decoding_stats: SpecDecodingStats | None = None


class RequestStats(msgspec.Struct, kw_only=True):
    """The state of one request at the end of one step."""

    id: int
    # QUEUED, CONTEXT_IN_PROGRESS, GENERATION_IN_PROGRESS or GENERATION_COMPLETE.
    stage: str
    context_prefill_position: int = 0
    num_generated_tokens: int = 0
    scheduled: bool = False
    paused: bool = False


class PromptProgress(msgspec.Struct, frozen=True):
    """How many tokens of a prompt are computed by now, and how many of these were cached. Upstream
    has none.
    """

    num_computed_tokens: int = 0
    num_cached_tokens: int = 0


class RequestStatsPerIteration(msgspec.Struct, kw_only=True):
    iter: int
    request_stats: list[RequestStats]


class Executor(ABC):
    """An engine with one model replica. Every method may be called from any thread.

    Ids are unique and grow. Every accepted request ends with exactly one final Response, be it
    output, error or cancellation. Source: Executor API of TensorRT-LLM.
    """

    @property
    @abstractmethod
    def info(self) -> EngineInfo: ...

    @property
    def capabilities(self) -> Capabilities:
        return self.info.capabilities

    @property
    def memory_use(self) -> MemoryUse | None:
        """Return the memory that it holds now, None where the engine does not know. Upstream has
        none.
        """
        return None

    @abstractmethod
    def enqueue_request(self, request: Request) -> int:
        """Accept a request and return its id.

        Raises InvalidParameter or Unsupported for what this engine cannot do, TypeError for a value
        of a wrong type, Overloaded when its queue is full, RuntimeError after shutdown.
        """

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        return [self.enqueue_request(request) for request in requests]

    @abstractmethod
    def await_responses(
        self, request_id: int | Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Response] | list[list[Response]]:
        """Wait until Responses are ready, then take all of them. After `timeout_s` the list is
        empty.

        Without an id, it returns Responses of all requests, in order for each. Those of one step
        become ready together. With an id, it returns only Responses of that request. After the
        final one it returns one error Response that says so. An id that was never given out raises
        ValueError (upstream blocks without end). With several ids, it returns one list for each, in
        their order. When the executor shuts down, it returns at once, perhaps [].
        """

    @abstractmethod
    def pass_responses_to(self, take: Callable[[list[Response]], None]) -> None:
        """Call `take` with the Responses of each step, on the thread that makes them. Use it before
        the first request.

        `await_responses` then gets none. A server does so: no waiting thread takes the interpreter
        from the thread that runs the next step. `take` must neither block nor raise.
        """

    @abstractmethod
    def get_num_responses_ready(self, request_id: int | None = None) -> int: ...

    @abstractmethod
    def cancel_request(self, request_id: int) -> None:
        """End a request at the next step boundary with a final CANCELLED Result. Ignores unknown
        and finished ids.

        Raises TypeError for what is no integer.
        """

    def get_prompt_progress(self, request_id: int) -> PromptProgress | None:
        """Return how far the prompt of a request is, None where the engine does not know. Upstream
        has none.

        It does not wait for a step, so what it returns may be that of the step before.
        """
        return None

    @property
    def is_loading_adapter(self) -> bool:
        """Whether the weights of an adapter are read now, while the running requests
        make no step.
        """
        return False

    @property
    def is_waiting_for_guides(self) -> bool:
        """Whether every request waits until its guide is compiled, which has a limit, and the
        engine has no step.
        """
        return False

    def load_adapter(
        self, name: str, path: str, *, pinned: bool = False, preload: bool = True
    ) -> None:
        """Let requests use the LoRA adapter in folder `path` as `name`. `info.adapters` then lists
        it.

        A pinned adapter is never evicted. Without `preload` only its files and rank are checked,
        and its weights are read for its first request. A name that is loaded from this folder is
        pinned or preloaded if it was not.

        Raises Unsupported if `capabilities.lora` is false, InvalidParameter for a name that is
        loaded from another folder, ModelUnusable with the engine's reason, and OutOfMemory if
        memory has no room.
        """
        raise Unsupported("lora_config", f"{self.info.name} has no adapters")

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter and free it. Requests that run with it finish.

        Raises Unsupported if `capabilities.lora` is false, UnknownAdapter for a name that is not
        loaded.
        """
        raise Unsupported("lora_config", f"{self.info.name} has no adapters")

    @abstractmethod
    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Return and remove the statistics of the steps since the last call, oldest first, at most
        1000.
        """

    @abstractmethod
    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]: ...

    @abstractmethod
    def can_enqueue_requests(self) -> bool: ...

    @abstractmethod
    def shutdown(self) -> None:
        """Cancel the remaining requests, end the loop and free the device. A second call does
        nothing.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.shutdown()
