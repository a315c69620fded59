"""Names of options of LMI, TGI and other servers that have no row in the table of options.

Some of these options go to the engine, some have no effect, some have values in another form, and some exist only in
other servers.
"""

from __future__ import annotations

from collections.abc import Callable

from lmi.settings.kinds import WORDS

# The key of each option without a row, by its environment name. TRANSLATED converts values of another form.
OTHER_ENV = {
    "MAX_INPUT_LENGTH": "max_input_length",
    "MAX_INPUT_TOKENS": "max_input_length",
    "CUDA_MEMORY_FRACTION": "option.gpu_memory_utilization",
    "ENABLE_CUDA_GRAPHS": "option.enforce_eager",
    "LWS_GROUP_SIZE": "option.nnodes",  # a Kubernetes LeaderWorkerSet gives these three to each pod
    "LWS_WORKER_INDEX": "option.node_rank",
    "LWS_LEADER_ADDRESS": "option.master_addr",
}
TRANSLATED: dict[str, Callable[[str], str]] = {
    "ENABLE_CUDA_GRAPHS": lambda text: str(not WORDS.get(text.lower(), True)).lower(),
}

# Keys of the reference that have no effect here, because processes, memory and batches are arranged differently.
WITHOUT_EFFECT = frozenset(
    "max_idle_time max_input_length log_request_metric metrics_aggregation "
    "translatorFactory features fail_fast "
    "option.fail_fast option.enable_auto_tool_choice option.enable_reasoning option.paged_attention option.n_positions "
    "option.batch_size option.device_map option.low_cpu_mem_usage "
    "option.mpi_mode option.use_passive_workers option.parallel_loading option.waiting_steps "
    "option.pythonExecutable option.enable_venv option.max_output_size "
    "option.log_request_metric option.bedrock_compat option.batch_invariant".split()
)

# Reasons that are not obvious.
REASONS = {
    "max_input_length": "a prompt may fill all but one token of the context, which option.max_model_len sets",
    "option.batch_size": "option.max_rolling_batch_size bounds the sequences that run at once",
    "option.enable_auto_tool_choice": "option.tool_call_parser switches it on",
    "option.enable_reasoning": "option.reasoning_parser switches it on",
    "option.device_map": "option.device and option.tensor_parallel_degree choose the devices",
    "option.batch_invariant": "the native kernels always are, and torch is not",
    "fail_fast": "a start that fails always ends the server",
    "option.fail_fast": "a start that fails always ends the server",
}

# Keys and flags of other servers for features that are missing here. They are never taken for a misspelt option.
ELSEWHERE = {
    "api_key": "this server has no keys yet",
    "ssl_certfile": "this server speaks plain HTTP",
    "ssl_keyfile": "this server speaks plain HTTP",
    "lora_modules": "an adapter is a folder in adapters/ beside the model, or registered at /adapters",
    "max_new_tokens": "a request says it, as max_new_tokens among its parameters",
    "adapters": "the adapters are in the folder adapters/ beside the model, move or link them there",
    **dict.fromkeys(
        ("adapter_ids", "adapter_names"),
        "each adapter is a folder in adapters/ beside the model, which has its name, or is registered at /adapters",
    ),
}
USUAL = frozenset({("option.adapters", "adapters")})  # keys and values that say what is so without them
GENERATION_TASKS = ("auto", "text-generation", "text2text-generation", "conversational", "generate")

# What to write in place of options that an engine does not use.
INSTEAD = {
    "option.long_lora_scaling_factors": "an adapter's own adapter_config.json has its scale; leave this out",
    "option.max_output_len": "max_new_tokens of a request bounds its answer, option.max_model_len prompt and answer",
    "option.max_input_len": "a prompt may fill all but one token of the context, which option.max_model_len sets",
}

# Options that LMI documents for one of its engines. They are never unknown. An engine that does not list its options
# gets all of them.
ENGINE_KEYS = frozenset(
    "option.enforce_eager option.gpu_memory_utilization option.load_format option.enable_lora "
    "option.max_loras option.max_lora_rank option.max_cpu_loras option.lora_extra_vocab_size option.kv_cache_dtype "
    "option.enable_chunked_prefill option.speculative_draft_model "
    "option.speculative_length option.draft_model_tp_size option.swap_space option.cpu_offload_gb "
    "option.limit_mm_per_prompt option.tokenizer option.tokenizer_mode option.max_input_len option.max_output_len "
    "option.max_num_tokens option.kv_cache_free_gpu_mem_fraction option.batch_scheduler_policy "
    "option.enable_kv_cache_reuse option.enable_trt_overlap option.tokens_per_block option.seed option.nnodes "
    "option.node_rank option.master_addr option.master_port option.distributed_executor_backend "
    "option.speculative_config option.disable_custom_all_reduce option.lmcache_config_file option.block_size "
    "option.long_lora_scaling_factors option.fully_sharded_loras "
    "option.disable_any_whitespace".split()
)

NEURON = "Neuron devices are not served here"
# Engines that option.rolling_batch can name in the reference and that have no handler here.
ENGINES_ELSEWHERE = {
    "deepspeed": "DeepSpeed is not served here",
    "neuronx": NEURON,
    "tnx": NEURON,
    "transformers-neuronx": NEURON,
    "optimum": NEURON,
}


def elsewhere(key: str) -> str:
    """Return a hint on a key or flag of other servers, or ""."""
    return ELSEWHERE.get(key.removeprefix("option.").lstrip("-").replace("-", "_").lower(), "")
