"""How an Executor is built. These classes stay in the process of the engine: they may hold
functions.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from lmi.executor.checks import MAX_INT, broken, check_int
from lmi.executor.request import AdditionalModelOutput

__all__ = [
    "BatchingType",
    "ExecutorConfig",
    "GuidedDecodingConfig",
    "KvCacheConfig",
    "LogitsPostProcessor",
    "LogitsPostProcessorBatched",
    "LogitsPostProcessorConfig",
]

LogitsPostProcessor = Callable[[int, Any, list[list[int]], Any, int | None], Any]
"""Takes request id, logits (1, num_beams, vocab), the generated tokens of each beam, CUDA stream
and client id.

The logits are float32, a tensor of torch or an array of numpy, as
`Capabilities.logits_post_processor_arrays` says. The embedded engine has torch's where torch is
installed, always in the host's memory, and the stream is None there. It changes the logits in place
and returns None, or returns others of the same shape.
"""

LogitsPostProcessorBatched = Callable[
    [list[int], list[Any], list[list[list[int]]], Any, list[int | None]], None
]
"""Takes a list of each, with an entry for each request. It changes the logits in place."""


class BatchingType(enum.Enum):
    # Every engine here refuses it, since none waits for a whole batch.
    STATIC = 0
    INFLIGHT = 1


@dataclass(kw_only=True)
class KvCacheConfig:
    """`max_tokens` is the size of the cache; None leaves it to the engine."""

    enable_block_reuse: bool = True
    max_tokens: int | None = None


@dataclass
class LogitsPostProcessorConfig:
    """The functions that requests may name. `replicate` has no effect on one rank."""

    processor_map: Mapping[str, LogitsPostProcessor] = field(default_factory=dict)
    processor_batched: LogitsPostProcessorBatched | None = None
    replicate: bool = True


@dataclass
class GuidedDecodingConfig:
    """The vocabulary of guided decoding: the text of each token as the tokenizer writes it, by its
    id.

    `tokenizer_str` is the text of tokenizer.json, which says how these texts become bytes.
    `stop_token_ids` may end an answer that is complete.
    """

    encoded_vocab: Sequence[str]
    tokenizer_str: str | None = None
    stop_token_ids: Sequence[int] | None = None


@dataclass
class ExecutorConfig:
    """Mutable, and read once, when the Executor is built. None leaves a limit to the engine.

    A request may ask only for additional outputs, post-processors and beam widths that stand here.
    """

    max_beam_width: int = 1
    _: KW_ONLY
    batching_type: BatchingType = BatchingType.INFLIGHT
    # Sequences that run at once.
    max_batch_size: int | None = None
    # Prompt tokens of a step.
    max_num_tokens: int | None = None
    # Requests that wait.
    max_queue_size: int | None = None
    iter_stats_max_iterations: int = 1000
    request_stats_max_iterations: int = 0
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    logits_post_processor_config: LogitsPostProcessorConfig | None = None
    guided_decoding_config: GuidedDecodingConfig | None = None
    additional_model_outputs: Sequence[AdditionalModelOutput] = ()

    def check(self) -> None:
        """Raise ValueError for the first field that breaks its rule. An Executor calls it when it
        is built.
        """
        if self.batching_type is not BatchingType.INFLIGHT:
            raise broken("batching_type", "BatchingType.INFLIGHT", self.batching_type)

        check_int("max_batch_size", self.max_batch_size, 1)
        check_int("max_beam_width", self.max_beam_width, 1, self.max_batch_size or MAX_INT)
        check_int("max_num_tokens", self.max_num_tokens, 1)
        check_int("max_queue_size", self.max_queue_size, 0)
        check_int("iter_stats_max_iterations", self.iter_stats_max_iterations, 0)
        check_int("request_stats_max_iterations", self.request_stats_max_iterations, 0)
        check_int("kv_cache_config.max_tokens", self.kv_cache_config.max_tokens, 1)

        names = [output.name for output in self.additional_model_outputs]
        if len(set(names)) < len(names):
            raise broken("additional_model_outputs", "outputs of different names", names)
