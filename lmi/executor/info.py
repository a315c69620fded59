"""What an engine is and what it can do, so that a request can be checked before it is sent."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from lmi.executor.request import AdditionalModelOutput, GuideType
from lmi.executor.sampling import MAX_TEMPERATURE


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do. A request that needs more is refused with a clear error, never served with less.

    `adapter_pins` says that `load_adapter` may pin one. With `log_probs_before_processors` log-probs are the model's,
    whatever a logits post-processor does. `logits_post_processor_arrays` is the library, torch or numpy, whose arrays
    it gets. With `batch_invariant` a request gets the same ids in every batch, and with
    `log_probs_invariant` the same log-probs too, bit for bit. `max_top_log_probs` bounds `num_top_log_probs` and
    `num_prompt_log_probs`, and `max_temperature` bounds `temperature`.
    """

    max_beam_width: int = 1  # 1: no beam search
    num_return_sequences: bool = False
    guided_decoding: tuple[GuideType, ...] = ()
    why_no_guides: str = ""  # the reason, where the engine could guide decoding
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


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a loaded engine, with which a front end checks a request before it sends it.

    Only `adapters` changes while the engine runs.
    """

    name: str  # the engine, as `option.rolling_batch` names it
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
