"""What a loaded TensorRT-LLM engine is and can do: from its arguments, its settled ones, and the model's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from tensorrt_llm import LLM

from handlers.lmi_trtllm import guides, processors
from handlers.lmi_trtllm.profile import AUTO, CPP_SAMPLER, Profile
from handlers.lmi_trtllm.sampling import TrtllmSampler
from lmi.errors import ModelUnusable
from lmi.executor import Capabilities, EngineInfo, ExecutorConfig
from lmi.settings.config import EngineConfig

MAX_TOP_LOG_PROBS = 20
MAX_BATCH_SIZE = 2048  # TensorRT-LLM's own, for what an LLM leaves open
LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


class Effective:
    """The arguments of a loaded LLM: those that it was given, and where they say nothing, those that it settled on."""

    def __init__(self, given: Mapping[str, Any], llm: LLM) -> None:
        self._given, self._settled = given, llm.args

    def get(self, name: str) -> Any:
        """The value of an argument, or None if neither says it."""
        value = self._given.get(name)
        return getattr(self._settled, name, None) if value is None else value

    @property
    def max_num_sequences(self) -> int:
        return int(self.get("max_batch_size") or MAX_BATCH_SIZE)

    @property
    def max_beam_width(self) -> int:
        return int(self.get("max_beam_width") or 1)

    @property
    def max_prompt_tokens(self) -> int | None:
        """The longest prompt, where a step must take it whole; else None."""
        return None if self.get("enable_chunked_prefill") else self.get("max_num_tokens")

    @property
    def stream_interval(self) -> int:
        """The number of steps that an output brings."""
        return int(self.get("stream_interval") or 1)

    @property
    def sampler_type(self) -> str:
        value = self.get("sampler_type")
        return str(getattr(value, "value", value))

    @property
    def max_loras(self) -> int:
        config = self.get("lora_config")
        return 0 if config is None else int(config.max_loras)


def read_config(folder: str) -> dict[str, Any]:
    """config.json of a model, of its text part if it has several. Raises ModelUnusable if it cannot be read."""
    file = Path(folder, "config.json")
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelUnusable(f"{file}: {error}") from None
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def vocab_size(folder: str) -> int:
    """The width of the model's logits."""
    size = read_config(folder).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ModelUnusable(f"{folder}: config.json has no vocab_size")
    return size


def sampler_of(arguments: Effective, profile: Profile, folder: str) -> TrtllmSampler:
    searches_by_it = profile.has_cpp_beams and arguments.sampler_type == AUTO and arguments.max_beam_width > 1
    is_cpp = searches_by_it or (profile.has_cpp_sampler and arguments.sampler_type == CPP_SAMPLER)
    return TrtllmSampler(profile, vocab_size(folder), is_cpp)


def describe(
    arguments: Effective,
    sampler: TrtllmSampler,
    folder: str,
    settings: ExecutorConfig,
    options: EngineConfig,
) -> EngineInfo:
    config = read_config(folder)
    dtype = arguments.get("dtype")
    if dtype in (None, "auto"):
        dtype = config.get("dtype") or config.get("torch_dtype") or ""
    return EngineInfo(
        name="trtllm",
        vocab_size=sampler.vocab_size,
        max_sequence_length=_max_sequence_length(arguments, config, folder),
        max_num_sequences=arguments.max_num_sequences,
        dtype=str(dtype).removeprefix("torch."),
        device="cuda",
        max_kv_cache_tokens=options.max_kv_cache_tokens or 0,
        capabilities=_capabilities(arguments, sampler, folder, settings, options),
    )


def _max_sequence_length(arguments: Effective, config: Mapping[str, Any], folder: str) -> int:
    known = [arguments.get("max_seq_len"), *map(config.get, LENGTHS)]
    length = next((one for one in known if isinstance(one, int) and one > 0), None)
    if length is None:
        raise ModelUnusable(f"{folder}: config.json has no length of the context; set option.max_model_len")
    return length


def _capabilities(
    arguments: Effective, sampler: TrtllmSampler, folder: str, settings: ExecutorConfig, options: EngineConfig
) -> Capabilities:
    kinds, why_no_guides = guides.kinds(options, folder)
    max_beam_width = arguments.max_beam_width
    return Capabilities(
        max_beam_width=max_beam_width,
        num_return_sequences=True,
        guided_decoding=() if max_beam_width > 1 else kinds,
        why_no_guides=why_no_guides,
        min_p=sampler.has_rules,
        seed=sampler.has_rules,
        no_repeat_ngram_size=sampler.has_rules,
        embedding_bias=True,
        max_top_log_probs=0 if sampler.is_cpp and max_beam_width == 1 else min(MAX_TOP_LOG_PROBS, sampler.vocab_size),
        context_logits=True,
        generation_logits=max_beam_width == 1,
        perf_metrics=True,
        additional_outputs=tuple(settings.additional_model_outputs),
        logits_post_processors=processors.names(processors.file_of(options, folder)),
        lora=arguments.get("lora_config") is not None,
        kv_cache_retention=True,
        priority=sampler.profile.takes_priority,
    )
