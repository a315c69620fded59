"""The table of options, read from the fields of the settings, and the names that other servers have beside them.

Some of these go to the engine, some have no effect, and some exist only elsewhere. Sources: LMI's serving.properties,
TGI's environment variables, and AWS's pages of LMI, of its vLLM, SGLang and llama.cpp images, and of its containers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from msgspec.structs import replace

from lmi.settings.config import EngineConfig, ModelConfig, ServerConfig
from lmi.settings.kinds import is_true
from lmi.settings.option import ROW, Option

# The key that a variable means. TRANSLATED converts values of another form.
OTHER_ENV = {
    "MAX_INPUT_LENGTH": "max_input_length",
    "MAX_INPUT_TOKENS": "max_input_length",
    "CUDA_MEMORY_FRACTION": "option.gpu_memory_utilization",
    "ENABLE_CUDA_GRAPHS": "option.enforce_eager",
    "LWS_GROUP_SIZE": "option.nnodes",  # a Kubernetes LeaderWorkerSet gives these three to each pod
    "LWS_WORKER_INDEX": "option.node_rank",
    "LWS_LEADER_ADDRESS": "option.master_addr",
}
TRANSLATED: dict[str, Callable[[str], str]] = {"ENABLE_CUDA_GRAPHS": lambda text: str(not is_true(text, True)).lower()}


OF_PROMPT = "a prompt may fill all but one token of the context, which option.max_model_len sets"
# Keys of the reference that have no effect here, because processes, memory and batches are arranged differently, and
# the reason where it is not obvious.
WITHOUT_EFFECT = {
    **dict.fromkeys(
        "max_idle_time log_request_metric metrics_aggregation translatorFactory features option.paged_attention "
        "option.n_positions option.low_cpu_mem_usage option.mpi_mode option.use_passive_workers "
        "option.parallel_loading option.waiting_steps option.pythonExecutable option.enable_venv "
        "option.max_output_size option.log_request_metric option.bedrock_compat".split(),
        "",
    ),
    **dict.fromkeys(("fail_fast", "option.fail_fast"), "a start that fails always ends the server"),
    "max_input_length": OF_PROMPT,
    "option.batch_size": "option.max_rolling_batch_size bounds the sequences that run at once",
    "option.enable_auto_tool_choice": "option.tool_call_parser switches it on",
    "option.enable_reasoning": "option.reasoning_parser switches it on",
    **dict.fromkeys(
        ("option.allowed_media_domains", "option.allowed_local_media_path"),
        "clients send images, and nothing is fetched or opened for them",
    ),
    "option.device_map": "option.device and option.tensor_parallel_degree choose the devices",
    "option.batch_invariant": "the native kernels always are, and torch is not",
}

# Options that LMI documents for one of its engines, and what to write instead on an engine that does not use one. They
# are never unknown. An engine that does not list its options gets all of them.
ENGINE_KEYS = {
    **dict.fromkeys(
        "option.enforce_eager option.gpu_memory_utilization option.load_format option.enable_lora option.max_loras "
        "option.max_lora_rank option.max_cpu_loras option.lora_extra_vocab_size option.kv_cache_dtype "
        "option.enable_chunked_prefill option.speculative_draft_model option.speculative_length "
        "option.draft_model_tp_size option.swap_space option.cpu_offload_gb option.limit_mm_per_prompt "
        "option.tokenizer option.tokenizer_mode option.max_num_tokens option.kv_cache_free_gpu_mem_fraction "
        "option.batch_scheduler_policy option.enable_kv_cache_reuse option.enable_trt_overlap "
        "option.tokens_per_block option.seed option.nnodes option.node_rank option.master_addr option.master_port "
        "option.distributed_executor_backend option.speculative_config option.disable_custom_all_reduce "
        "option.lmcache_config_file option.block_size option.fully_sharded_loras option.disable_any_whitespace".split(),
        "",
    ),
    "option.long_lora_scaling_factors": "an adapter's own adapter_config.json has its scale; leave this out",
    "option.max_output_len": "max_new_tokens of a request bounds its answer, option.max_model_len prompt and answer",
    "option.max_input_len": OF_PROMPT,
}

# Keys and flags of other servers for features that are missing here. They are never taken for a misspelt option.
ELSEWHERE = {
    "ssl_ca_certs": "this server asks no client for a certificate",
    "lora_modules": "an adapter is a folder in adapters/ beside the model, or registered at /adapters",
    "api_server_count": "frontend_workers is their number",
    "chat_template_content_format": "the template itself decides",
    "disable_fastapi_docs": "management_port moves the docs to a port of their own",
    **dict.fromkeys(
        ("disable_log_requests", "disable_uvicorn_access_log"),
        "a request has one line in the log, without its prompt, and --log-level WARNING leaves it out",
    ),
    "root_path": "the proxy in front takes its prefix away, and the pages work below any",
    "uvicorn_log_level": "--log-level is for every process",
    "max_stop_sequences": "the limit is fixed, and /info tells it",
    "max_new_tokens": "a request says it, as max_new_tokens among its parameters",
    "adapters": "the adapters are in the folder adapters/ beside the model, move or link them there",
    **dict.fromkeys(
        ("adapter_ids", "adapter_names"),
        "each adapter is a folder in adapters/ beside the model, which has its name, or is registered at /adapters",
    ),
}
# Variables that AWS's other images read and this server does not, yet. Who moves here may still set them.
PREFIXES = ("SM_VLLM_", "SM_SGLANG_", "SM_LLAMA_CPP_", "CUSTOM_FASTAPI_", "SUPERVISOR_")
NAMES = frozenset(
    "CUSTOM_PRE_PROCESS CUSTOM_POST_PROCESS CUSTOM_SCRIPT_FILENAME PROCESS_AUTO_RECOVERY SAGEMAKER_MODEL_PATH "
    "STANDARD_PIP_ARGS".split()
)
# supervisord gives these to every process that it starts.
OF_SUPERVISORD = frozenset(
    "SUPERVISOR_ENABLED SUPERVISOR_GROUP_NAME SUPERVISOR_PROCESS_NAME SUPERVISOR_SERVER_URL".split()
)


def _options(part: str, settings: type) -> Iterator[Option]:
    """Yield the options of a class of settings in its order, those of its fields and those that fill none."""
    filling = {one.name: one.metadata[ROW] for one in fields(settings) if ROW in one.metadata}
    for name in settings.__annotations__:
        row = filling.get(name) or getattr(settings, name, None)
        if isinstance(row, Option):
            key = row.key or (name if part == "server" else f"option.{name}")
            yield replace(row, key=key, part=part, field=f"{part}.{name}" if name in filling else "")


OPTIONS = (*_options("server", ServerConfig), *_options("model", ModelConfig), *_options("engine", EngineConfig))
_BY_KEY = {key: option for option in OPTIONS for key in (option.key, *option.aliases)}
_BY_ENV_NAME = {key.removeprefix("option.").replace("_", "").lower(): key for key in _BY_KEY}


def find(key: str) -> Option | None:
    """Return the option of a key or alias of serving.properties, or None if no field is that option."""
    return _BY_KEY.get(key)


def default(key: str) -> Any:
    option = find(key)
    return None if option is None else option.default


def is_of_server(key: str) -> bool:
    """Return whether an option belongs to the whole server, and not to a model of it."""
    option = find(key)
    return option is not None and option.part == "server"


def key_of_env(name: str) -> str:
    """Return the key that OPTION_X_Y or SERVING_X_Y means.

    SERVING_MIN_WORKERS means minWorkers. The name of an unknown key becomes lower case, if it is all upper case.
    """
    prefix, _, rest = name.partition("_")
    known = _BY_ENV_NAME.get(rest.replace("_", "").lower())
    if known is not None:
        return known
    lowered = rest.lower() if rest.isupper() else rest
    return f"option.{lowered}" if prefix == "OPTION" else lowered


def known_keys() -> list[str]:
    return sorted({*_BY_KEY, *WITHOUT_EFFECT, *ENGINE_KEYS})


def elsewhere(key: str) -> str:
    """Return a hint on a key or flag of other servers, or ""."""
    return ELSEWHERE.get(key.removeprefix("option.").lstrip("-").replace("-", "_").lower(), "")


def is_of_other_image(name: str) -> bool:
    return name in NAMES or (name.startswith(PREFIXES) and name not in OF_SUPERVISORD)


def of_other_images(environ: Mapping[str, str]) -> list[str]:
    """Return the line about variables of other images, or no line. Their values may be secrets."""
    names = sorted(filter(is_of_other_image, environ))
    if not names:
        return []
    counted = "1 variable" if len(names) == 1 else f"{len(names)} variables"
    return [f"{counted} of AWS's other images not read yet: {', '.join(names)}"]


def unused_of_platform(environ: Mapping[str, str]) -> list[str]:
    """Return the line about SageMaker's variables that set no option, or no line."""
    used = {name for option in OPTIONS for name in option.platform}
    named = {name for name in environ if name.startswith("SAGEMAKER_") and not is_of_other_image(name)}
    unused = sorted(named - used)
    return [f"{', '.join(unused)}: set no option"] if unused else []
