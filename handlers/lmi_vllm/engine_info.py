"""What a loaded engine can do, read from vLLM's own configuration of it."""

from typing import Any, NamedTuple

from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader import get_model_cls

from handlers.guides.support import NO_TEXTS
from handlers.lmi_vllm.arguments import num_express_places
from lmi.executor.executor import Capabilities, Embeddings, EngineInfo
from lmi.executor.request import GuideType

# vLLM's SamplingParams takes no higher one.
MAX_TEMPERATURE = 2.0


class Images(NamedTuple):
    """What a model takes of images."""

    # How many a prompt may have.
    max_num: int
    # What stands for an image in a prompt, where a chat template writes nothing for it. {n} is its
    # number.
    placeholder: str


NO_IMAGES = Images(0, "")


def num_blocks(config: VllmConfig) -> int:
    """Return how many blocks of the KV cache requests have. vLLM reserves one block."""
    return max(0, (config.cache_config.num_gpu_blocks or 0) - 1)


def describe(config: VllmConfig, max_beam_width: int, renderer: Any = None) -> EngineInfo:
    """Return what the engine says of itself. `renderer` is what reads images, if any does."""
    model = config.model_config
    max_num_seqs = config.scheduler_config.max_num_seqs
    images = NO_IMAGES if renderer is None else _images_of(model, renderer)

    return EngineInfo(
        name="vllm",
        vocab_size=model.get_vocab_size(),
        max_sequence_length=model.max_model_len,
        max_num_sequences=max_num_seqs - num_express_places(max_num_seqs),
        num_express_places=num_express_places(max_num_seqs),
        dtype=str(model.dtype).removeprefix("torch."),
        device=config.device_config.device_type,
        max_kv_cache_tokens=num_blocks(config) * config.cache_config.block_size,
        capabilities=_capabilities(config, max_beam_width, images.max_num),
        image_placeholder=images.placeholder,
    )


def _capabilities(config: VllmConfig, max_beam_width: int, max_images: int) -> Capabilities:
    model = config.model_config
    vocab_size = model.get_vocab_size()
    max_logprobs = model.max_logprobs
    max_top_log_probs = vocab_size if max_logprobs < 0 else min(max_logprobs, vocab_size)
    speculates = config.speculative_config is not None

    return Capabilities(
        max_beam_width=max(1, min(max_beam_width, max_top_log_probs // 2)),
        num_return_sequences=True,
        guided_decoding=() if model.skip_tokenizer_init else tuple(GuideType),
        why_no_guides=NO_TEXTS if model.skip_tokenizer_init else "",
        # vLLM refuses both beside drafts.
        min_p=not speculates,
        embedding_bias=not speculates,
        perf_metrics=True,
        max_top_log_probs=max_top_log_probs,
        max_temperature=MAX_TEMPERATURE,
        lora=config.lora_config is not None,
        adapter_pins=True,
        priority=config.scheduler_config.policy == "priority",
        embeddings=_embeddings(model),
        max_images=max_images,
    )


def _embeddings(model: ModelConfig) -> Embeddings | None:
    if model.runner_type != "pooling":
        return None

    # The sizes to which embeddings may be shortened.
    sizes = None
    if model.is_matryoshka:
        sizes = tuple(model.matryoshka_dimensions or ())

    return Embeddings(model.embedding_size, sizes)


def _images_of(model: ModelConfig, renderer: Any) -> Images:
    if not model.supports_multimodal_inputs:
        return NO_IMAGES

    max_num = renderer.get_mm_processor().info.allowed_mm_limits.get("image", 0)
    if not max_num:
        return Images(max_num, "")

    placeholder_of = get_model_cls(model).get_placeholder_str
    first = placeholder_of("image", 1)
    second = placeholder_of("image", 2)
    if first == second:
        return Images(max_num, first or "")

    # The model numbers its placeholders.
    return Images(max_num, first.replace("1", "{n}"))
