"""The options of the reference for TensorRT-LLM, and what becomes of each. It does not import
tensorrt_llm.

The names are those of djl-serving's guide in all its revisions, of its class of properties, and of
the script that built engines. An option that has a row in the table of lmi is not here, unless its
values differ.
"""

import json
from collections.abc import Callable
from typing import Final

from handlers.driven.arguments import boolean

POLICIES = ("max_utilization", "guaranteed_no_evict", "static_batch")
# The value that TensorRT-LLM has by itself. Its argument is left out.
UPSTREAMS: Final = object()
NOTHING_IS_BUILT = "no engine is built: the checkpoint is loaded as it is"
NOTHING_IS_QUANTISED = (
    "nothing is quantised at load: the checkpoint says how its weights are stored"
)
QUANTISE_BEFORE = (
    "nothing: TensorRT-LLM quantises no weights at load, so give a checkpoint that is quantised, "
    "as NVIDIA's Model Optimizer writes it"
)
PYTHON_OBJECT = "nothing: it is an object of Python, which no text names"


def parsed(text: str) -> object:
    """Read JSON and none. Every other text stays a text, which the argument's own type reads.
    Raises ValueError.
    """
    if text.lower() in ("none", "null"):
        return None

    if text[:1] not in "{[":
        return text

    try:
        return json.loads(text)
    except ValueError:
        raise ValueError("JSON") from None


def _policy(text: str) -> str:
    if text.lower() not in POLICIES:
        raise ValueError(", ".join(POLICIES))

    return text.upper()


# Arguments of LLM, and fields of its nested configurations, that the reference has by the same
# name.
SAME = (
    "max_input_len",
    "tokenizer",
    "tokenizer_mode",
    "tokenizer_revision",
    "skip_tokenizer_init",
    "context_parallel_size",
    "moe_tensor_parallel_size",
    "moe_expert_parallel_size",
    "enable_attention_dp",
    "load_format",
    "enable_chunked_prefill",
    "guided_decoding_backend",
    "iter_stats_max_iterations",
    "gather_generation_logits",
    "attn_backend",
    "enable_lora",
)
OF_KV_CACHE = (
    "tokens_per_block",
    "max_attention_window",
    "sink_token_length",
    "free_gpu_memory_fraction",
    "host_cache_size",
    "onboard_blocks",
    "cross_kv_cache_fraction",
    "secondary_offload_min_priority",
    "event_buffer_max_size",
)
OF_LORA = ("max_loras", "max_lora_rank", "max_cpu_loras")
# What the reference's builds of engines, its quantisation and its tables of models read.
OF_BUILDS = (
    "trtllm_checkpoint_path",
    "num_checkpoint_workers",
    "num_engine_workers",
    "load_by_shard",
    "use_fused_mlp",
    "embedding_parallel_mode",
    "fast_build",
    "enable_build_cache",
)
OF_QUANTISATION = (
    "smoothquant_alpha",
    "smoothquant_per_token",
    "smoothquant_per_channel",
    "multi_query_mode",
    "awq_format",
    "awq_calib_size",
    "awq_block_size",
    "q_format",
    "calib_size",
    "calib_batch_size",
    "group_size",
    "smoothquant_val",
    "clamp_val",
    "use_meta_recipe",
    "has_zero_point",
    "pre_quant_scales",
    "exclude_modules",
    "calib_dataset",
    "calib_batches",
    "calib_max_seq_length",
    "random_seed",
    "tokenizer_max_seq_length",
)
OF_MODELS = ("baichuan_model_version", "chatglm_model_version", "gpt_model_version")
OF_NODES = ("node_rank", "master_addr", "master_port")

# An option of the table of lmi, or an argument of LLM. A dot leads into a nested configuration.
TRANSLATED: dict[str, str] = {
    **{name: name for name in SAME},
    **{name: f"kv_cache_config.{name}" for name in OF_KV_CACHE},
    **{name: f"lora_config.{name}" for name in OF_LORA},
    # Of the guide, which maps this one to max_seq_len.
    "max_output_len": "option.max_model_len",
    "max_num_tokens": "option.max_rolling_batch_prefill_tokens",
    "max_num_sequences": "option.max_rolling_batch_size",
    "enable_kv_cache_reuse": "option.enable_prefix_caching",
    "kv_cache_free_gpu_mem_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "batch_scheduler_policy": "scheduler_config.capacity_scheduler_policy",
    # Of the class of properties.
    "enable_chunked_context": "enable_chunked_prefill",
    "max_batch_size": "option.max_rolling_batch_size",
    "max_seq_len": "option.max_model_len",
    "enable_block_reuse": "option.enable_prefix_caching",
    "max_tokens": "option.max_kv_cache_tokens",
    "enable_overlap_scheduler": "disable_overlap_scheduler",
    "kv_cache_dtype": "kv_cache_config.dtype",
    "use_cuda_graph": "cuda_graph_config",
    "moe_backend": "moe_config.backend",
    # Of the script that built engines, and of the reference's options for all engines.
    "kv_cache_quant_algo": "kv_cache_config.dtype",
    "enforce_eager": "cuda_graph_config",
}
# How those are read that are no JSON. They raise ValueError with the allowed values.
READ: dict[str, Callable[[str], object]] = {
    "batch_scheduler_policy": _policy,
    "enable_overlap_scheduler": lambda text: not boolean(text),
    "use_cuda_graph": lambda text: UPSTREAMS if boolean(text) else None,
    "kv_cache_quant_algo": str.lower,
    "enforce_eager": lambda text: None if boolean(text) else UPSTREAMS,
}
# What is allowed. A word before a colon, or alone, is the value that asks for what happens anyway.
FORBIDDEN = {
    "rotary_base": "nothing: write rope_theta into config.json of the model",
    "rotary_dim": "nothing: write rotary_dim into config.json of the model",
    "rotary_scaling_type": "nothing: write rope_scaling into config.json of the model",
    "rotary_scaling_factor": "nothing: write rope_scaling into config.json of the model",
    "auto_parallel": "false: option.tensor_parallel_degree says how many GPUs share a layer",
    "batching_type": "inflight",
    "backend": "pytorch: TensorRT's engines are not served",
    "quant_algo": QUANTISE_BEFORE,
    "nnodes": "1: the ranks are on one machine; vLLM serves a model over several",
    # Arguments of LLM that this handler sets, or that no text can name.
    "model": "nothing: option.model_id names the model",
    "build_config": f"nothing: {NOTHING_IS_BUILT}",
    "batched_logits_processor": (
        "nothing: option.logits_post_processors names a file with functions"
    ),
    "checkpoint_loader": PYTHON_OBJECT,
    "decoding_config": "nothing: option.speculative_config takes its place",
    "mpi_session": PYTHON_OBJECT,
    "num_postprocess_workers": "0: the front end makes text of tokens",
    "postprocess_tokenizer_dir": "nothing: the front end makes text of tokens",
    "post_processor_hook": "nothing: the front end makes text of tokens",
    "mm_encoder_only": "false: text is generated",
    "encode_only": "false: text is generated",
}
# Why they have no effect.
IGNORED = {
    **dict.fromkeys(OF_BUILDS, NOTHING_IS_BUILT),
    **dict.fromkeys(OF_QUANTISATION, NOTHING_IS_QUANTISED),
    **dict.fromkeys(OF_MODELS, "config.json of the model says it"),
    **dict.fromkeys(OF_NODES, "the ranks are on one machine"),
    "enable_trt_overlap": (
        "it overlapped TensorRT's engines; option.enable_overlap_scheduler is PyTorch's"
    ),
    "logits_dtype": "it had an effect only on T5",
    "use_custom_all_reduce": "option.allreduce_strategy chooses how ranks add up",
    "multi_block_mode": "the kernels of attention choose it",
    "use_fp8_context_fmha": "option.kv_cache_dtype=fp8 stores keys and values in 8 bits",
    "auto_parallel_world_size": "option.tensor_parallel_degree says how many GPUs share a layer",
    "normalize_log_probs": "log-probabilities are the model's own, not divided by a length",
    "extended_runtime_perf_knob_config": (
        "it was TensorRT's engines'; option.cuda_graph_config is PyTorch's"
    ),
    "max_draft_len": "option.speculative_config says how many tokens are guessed",
    "gpu_memory_utilization": (
        "option.kv_cache_free_gpu_mem_fraction is the KV cache's share of what the weights leave"
    ),
    "swap_space": "option.host_cache_size is the KV cache's room in the host's memory, in bytes",
    "speculative_draft_model": (
        'option.speculative_config names it, as in {"decoding_type": "DraftTarget", '
        '"max_draft_len": 4, …}'
    ),
    "speculative_length": "option.speculative_config says it, as max_draft_len",
}

# The fields of an EngineConfig that an argument takes.
OURS = {
    "max_num_sequences": "max_batch_size",
    "max_prefill_tokens": "max_num_tokens",
    "max_sequence_length": "max_seq_len",
    "max_beam_width": "max_beam_width",
    "tensor_parallel_degree": "tensor_parallel_size",
    "pipeline_parallel_degree": "pipeline_parallel_size",
    "trust_remote_code": "trust_remote_code",
    "enable_prefix_caching": "kv_cache_config.enable_block_reuse",
    "max_kv_cache_tokens": "kv_cache_config.max_tokens",
}

# The classes of nested configurations in the file of LLM's arguments.
CONFIG_CLASSES = {
    "kv_cache_config": "KvCacheConfig",
    "scheduler_config": "SchedulerConfig",
    "moe_config": "MoeConfig",
}
# Why one of the supported lines lacks an argument that another one has.
LACKING = {
    "kv_cache_config.onboard_blocks": "main has removed it",
    "sampler_type": "main has one sampler and has removed it",
}
