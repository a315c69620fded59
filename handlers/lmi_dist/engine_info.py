"""What an engine says of itself: its sizes, and what it can do."""

from handlers.lmi_dist.limits import Limits
from handlers.lmi_dist.post_processors import ARRAYS, PostProcessors
from handlers.lmi_dist.runner import Runner
from handlers.lmi_dist.sampler import MAX_TOP_LOG_PROBS
from lmi.executor import Capabilities, EngineInfo, ExecutorConfig, GuideType


def describe(
    runner: Runner,
    limits: Limits,
    settings: ExecutorConfig,
    why_no_guides: str,
    post_processors: PostProcessors | None,
) -> EngineInfo:
    """Return the EngineInfo of a loaded model. `why_no_guides` is "" if there are guides."""
    max_loras = 0
    if runner.adapters is not None:
        max_loras = runner.adapters.limits.max_in_batch

    return EngineInfo(
        name="lmi-dist",
        vocab_size=runner.vocab_size,
        max_sequence_length=limits.max_length,
        max_num_sequences=limits.num_slots,
        batch_reason=limits.batch_reason,
        num_express_places=limits.num_express,
        max_loras=max_loras,
        dtype=runner.dtype,
        device=runner.device,
        kernels=runner.kernels,
        max_kv_cache_tokens=limits.num_cache_tokens,
        capabilities=_capabilities(runner, limits, settings, why_no_guides, post_processors),
    )


def _capabilities(
    runner: Runner,
    limits: Limits,
    settings: ExecutorConfig,
    why_no_guides: str,
    post_processors: PostProcessors | None,
) -> Capabilities:
    """Return what the engine can do: an embedding model generates nothing."""
    if runner.pooling is not None:
        return Capabilities(perf_metrics=True, priority=True, embeddings=runner.pooling.embeddings)

    reuses_blocks = runner.slots is None and settings.kv_cache_config.enable_block_reuse

    return Capabilities(
        max_beam_width=min(settings.max_beam_width, limits.num_slots),
        num_return_sequences=True,
        guided_decoding=() if why_no_guides else tuple(GuideType),
        why_no_guides=why_no_guides,
        typical_p=True,
        embedding_bias=True,
        no_repeat_ngram_size=True,
        perf_metrics=True,
        context_logits=True,
        generation_logits=True,
        additional_outputs=tuple(settings.additional_model_outputs),
        logits_post_processors=post_processors.names if post_processors else (),
        logits_post_processor_arrays=ARRAYS,
        log_probs_before_processors=True,
        max_top_log_probs=min(MAX_TOP_LOG_PROBS, runner.vocab_size),
        priority=True,
        kv_cache_retention=reuses_blocks,
        lora=runner.adapters is not None,
        adapter_pins=True,
        batch_invariant=runner.is_batch_invariant,
        log_probs_invariant=runner.is_batch_invariant,
    )
