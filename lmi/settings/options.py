"""The one table of settings: names, aliases, environment variables, types, help.

Each row is one option, under the key it has in serving.properties. Command-line flags, `lmi config`, the environment's
names and the messages about bad values all come from here. It knows nothing of files or precedence; defaults stand in
`config.py`, on the field that a row fills. Names: research of LMI's serving.properties and of TGI's environment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lmi.settings import model_urls
from lmi.settings.model_urls import NamedModel

SIZE_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
LENGTH_UNITS = {"": 1, "k": 10**3, "m": 10**6, "K": 1 << 10, "M": 1 << 20}
WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Kind:
    """How a text becomes a value. `parse` raises ValueError for what `allowed` does not name."""

    allowed: str
    parse: Callable[[str], Any]


def integer(low: int, high: int = 2**31 - 1) -> Kind:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,12}", text) or not low <= int(text) <= high:
            raise ValueError
        return int(text)

    return Kind(f"a whole number of at least {low}" if high == 2**31 - 1 else f"a whole number {low}..{high}", parse)


def choice(*words: str, **long_names: str) -> Kind:
    """One of `words`, in any case; `long_names` are further names of them."""
    known = {word: word for word in words} | long_names

    def parse(text: str) -> str:
        if text.lower() not in known:
            raise ValueError
        return known[text.lower()]

    return Kind(", ".join(words), parse)


def form(*words: str, **other_names: str) -> Kind:
    """One of `words`, in any case; `other_names` are further names of them. Any other name is a form not read here."""
    known = {word: word for word in words} | other_names

    def parse(text: str) -> str:
        return known.get(text.lower()) or str(FORM_NAME.parse(text))

    return Kind(f"{', '.join(words)}, or another name, which means plain text", parse)


def matching(allowed: str, pattern: str) -> Kind:
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError
        return text

    return Kind(allowed, parse)


def _boolean(text: str) -> bool:
    if text.lower() not in WORDS:
        raise ValueError
    return WORDS[text.lower()]


def _streaming(text: str) -> bool:
    return text.lower() == "huggingface" or _boolean(text)  # the reference's own streamer, or transformers'


def _seconds(text: str) -> float:
    value = float(text)
    if not (0 < value <= 1e7 and math.isfinite(value)):
        raise ValueError
    return value


def _seconds_or_none(text: str) -> float | None:
    return None if text.lower() in ("none", "0", "-1") else _seconds(text)


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15})\s*([kmg]?)(?:i?b)?", text.lower())
    if match is None or not 0 < int(match[1]) * SIZE_UNITS[match[2]] < 2**50:
        raise ValueError
    return int(match[1]) * SIZE_UNITS[match[2]]


def _length(text: str) -> int | None:
    """As vLLM reads lengths: small units are decimal, large ones binary. None: as long as the engine can."""
    if text.lower() in ("auto", "-1"):
        return None
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6}(?=[km]))?)([kmKM]?)", text)
    length = round(float(match[1]) * LENGTH_UNITS[match[2]]) if match else 0
    if not 1 <= length < 2**31:
        raise ValueError
    return length


def _degree(text: str) -> int | str:
    return "max" if text.lower() == "max" else int(integer(1, 1024).parse(text))


def _devices(text: str) -> tuple[str, ...] | None:
    if text.strip() == "*":
        return None
    names = tuple(name.strip() for name in re.split("[;,]", text))
    if not all(re.fullmatch(r"[0-9]{1,4}", name) for name in names) or len(set(names)) < len(names):
        raise ValueError
    return names


def _names(text: str) -> tuple[str, ...]:
    return tuple(NAME.parse(name.strip()) for name in re.split("[;,]", text))


def _served_names(text: str) -> tuple[str, ...]:
    return tuple(SERVED_NAME.parse(name) for name in re.split(r"[;,\s]+", text.strip("[]").replace('"', "")) if name)


def _models(text: str) -> tuple[NamedModel, ...]:
    models = model_urls.parse(text)
    for name in [model.name for model in models if model.name]:
        NAME.parse(name)
    return models


def _variables(text: str) -> dict[str, str]:
    """A comma inside a value stays: a new variable begins where a name and `=` follow."""
    variables = {}
    for pair in re.split(r"[;,](?=\s*[A-Za-z_]\w*=)", text):
        name, equals, value = pair.strip().partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or not equals or "\0" in value:
            raise ValueError
        variables[name] = value
    return variables


def _address(text: str) -> tuple[str, int]:
    parts = urlsplit(text)
    if parts.scheme != "http" or not parts.hostname or not parts.port or parts.path not in ("", "/"):
        raise ValueError
    return parts.hostname, parts.port


def _port_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= 65535:
        raise ValueError
    return int(match[1]), int(match[2])


TEXT = Kind("any text in UTF-8", str)
BOOLEAN = Kind("true or false", _boolean)
SECONDS = Kind("seconds, more than 0", _seconds)
SECONDS_OR_NONE = Kind("seconds, more than 0, or none", _seconds_or_none)
SIZE = Kind("bytes, more than 0, as in 67108864, 64k, 64m or 1g", _size)
LENGTH = Kind("a whole number of at least 1, as in 4096, 32k (32000) or 32K (32768), or auto", _length)
DEGREE = Kind("a whole number of at least 1, or max", _degree)
ADDRESS = Kind("http://HOST:PORT", _address)
NAME = matching("1 to 128 letters, digits or ._:@-, a letter or digit first", r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
SERVED_NAME = matching(
    "1 to 128 letters, digits or ._:@/-, a letter or digit first", r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}"
)
SERVED_NAMES = Kind(f"names with , or blanks between, each {SERVED_NAME.allowed}", _served_names)
VARIABLES = Kind("NAME=VALUE, several with , between", _variables)
MODELS = Kind("NAME=PATH, NAME:VERSION:ENGINE:DEVICE=PATH, a path, ALL or NONE", _models)
FUNCTION = matching("the name of a function in the model's own model.py", r"[A-Za-z_][A-Za-z0-9_]{0,127}")
ENTRY_POINT = matching(
    "a Python file in the model's folder, or djl_python.…", r"djl_python\.[A-Za-z0-9_.-]+|[^\0]+\.py"
)
ENGINE = Kind(
    "Python or MPI; what runs the model is option.rolling_batch (auto, vllm, lmi-dist)",
    choice("Python", "MPI", python="Python", mpi="MPI").parse,
)
FORM_NAME = matching("a name", r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
FORMATTER_WORDS = ("json", "jsonlines", "sse")


def _formatter(text: str) -> str:
    return text.lower() if text.lower() in FORMATTER_WORDS else str(FUNCTION.parse(text))


FORMATTER = Kind("json, jsonlines, sse, or a function in the model's own model.py", _formatter)
# vLLM's names of the same forms. Source: the parsers of vLLM 0.32.
TOOL_CALL_FORMS, REASONING_FORMS = ("hermes", "json", "text"), ("think",)
TOOL_CALL_FORM = form(
    *TOOL_CALL_FORMS,
    qwen="hermes",
    qwen25="hermes",
    qwen2_5="hermes",
    qwen3="hermes",
    qwen3_json="hermes",
    granite4="hermes",
    llama3="json",
    llama3_json="json",
    llama4_json="json",
)
REASONING_FORM = form(
    *REASONING_FORMS,
    deepseek_r1="think",
    deepseek_v3="think",
    glm45="think",
    glm47="think",
    holo2="think",
    kimi_k2="think",
    minimax_m2="think",
    nemotron_v3="think",
    olmo3="think",
    qwen3="think",
)
DTYPE = choice(
    "auto", "fp32", "bf16", "fp16", float32="fp32", float="fp32", bfloat16="bf16", float16="fp16", half="fp16"
)


@dataclass(frozen=True, slots=True)
class Option:
    """One row. `field` is "server.port" and the like, "" where `choices.py` makes several values out of it."""

    key: str
    field: str
    kind: Kind
    help: str
    aliases: tuple[str, ...] = ()  # further keys of the same meaning
    env: tuple[str, ...] = ()  # environment names beside OPTION_… and SERVING_…, the first one given counts
    platform: tuple[str, ...] = ()  # SAGEMAKER_… names, which beat the file; the first one given counts
    has_flag: bool = True
    more_flags: tuple[str, ...] = ()
    is_for_engine: bool = False  # every engine finds its text among EngineConfig.options

    @property
    def flag(self) -> str:
        return _flag(self.key)

    @property
    def flags(self) -> tuple[str, ...]:
        """All of them: its own, those of its aliases, and more."""
        return tuple(dict.fromkeys([*map(_flag, (self.key, *self.aliases)), *self.more_flags]))


def _flag(key: str) -> str:
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", key.removeprefix("option.")).lower()
    return "--" + words.replace("_", "-")


OPTIONS = (
    Option(
        "host", "server.host", matching("a host name or address", r"[A-Za-z0-9.:_-]{1,253}"), "address to listen on"
    ),
    Option("port", "server.port", integer(0, 65535), "port; 0: any free one", platform=("SAGEMAKER_BIND_TO_PORT",)),
    Option("inference_address", "", ADDRESS, "host and port in one"),
    Option(
        "safe_port_range",
        "",
        Kind("FIRST-LAST, two ports", _port_range),
        "ports for further listeners; none are opened, so it is only checked",
        platform=("SAGEMAKER_SAFE_PORT_RANGE",),
    ),
    Option("frontend_workers", "server.frontend_workers", integer(1, 256), "front-end processes"),
    Option(
        "job_queue_size",
        "server.job_queue_size",
        integer(1),
        "waiting sequences of the model; more are answered 503",
        env=("MAX_CONCURRENT_REQUESTS",),
    ),
    Option(
        "max_request_sequences",
        "server.max_request_sequences",
        integer(1),
        "sequences of one request: its prompts times n or best_of; more are refused",
    ),
    Option(
        "max_request_size",
        "server.max_request_size",
        SIZE,
        "bytes of a request's body; more are answered 413",
        platform=("SAGEMAKER_MAX_REQUEST_SIZE", "SAGEMAKER_MAX_PAYLOAD_IN_MB"),
    ),
    Option(
        "max_body_memory",
        "server.max_body_memory",
        SIZE,
        "bytes of all request bodies in one front end; more are answered 503",
    ),
    Option(
        "predict_timeout",
        "server.predict_timeout_s",
        SECONDS_OR_NONE,
        "seconds for a whole request, then 504",
        aliases=("option.predict_timeout",),
        env=("PREDICT_TIMEOUT",),
        platform=("SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS", "SAGEMAKER_MODEL_SERVER_TIMEOUT"),
    ),
    Option("drain_timeout", "server.drain_timeout_s", SECONDS, "seconds for open answers after SIGTERM"),
    Option("stall_timeout", "server.stall_timeout_s", SECONDS, "seconds that a client may leave its answer unread"),
    Option("header_timeout", "server.header_timeout_s", SECONDS, "seconds for a request's head"),
    Option("body_timeout", "server.body_timeout_s", SECONDS, "seconds for a request's body"),
    Option("allow_multi_status", "server.allow_multi_status", BOOLEAN, "/ping may answer 207"),
    Option(
        "log_level",
        "server.log_level",
        choice("DEBUG", "INFO", "WARNING", "ERROR", debug="DEBUG", info="INFO", warning="WARNING", error="ERROR"),
        "least level that is logged",
    ),
    Option("log_format", "server.log_format", choice("auto", "text", "json"), "auto: text on a terminal, else json"),
    Option(
        "option.model_id",
        "",
        TEXT,
        "folder of the model, or demo; nothing: the folder of serving.properties itself",
        aliases=("option.model",),
        env=("HF_MODEL_ID",),
    ),
    Option("option.model_name", "model.name", NAME, "name in URLs and answers; nothing: the folder's name"),
    Option(
        "option.model_alias",
        "model.aliases",
        Kind(f"names with ; between, each {NAME.allowed}", _names),
        "further names of the model in URLs",
    ),
    Option(
        "option.served_model_name",
        "",
        SERVED_NAMES,
        "the model's name, then further ones; nothing: option.model_name",
    ),
    Option(
        "load_models",
        "",
        MODELS,
        "the folder to serve and the model's name, as NAME=PATH",
        more_flags=("-m", "--models"),
    ),
    Option("option.output_formatter", "model.output_formatter", FORMATTER, "form of answers, or a function for it"),
    Option("option.input_formatter", "", FUNCTION, "function of model.py that reads requests"),
    Option("option.tgi_compat", "model.tgi_compat", BOOLEAN, "answers in the shape of TGI"),
    Option(
        "option.enable_streaming",
        "model.enable_streaming",
        Kind("true, false", _streaming),
        "answers of option.rolling_batch=disable as they come, as jsonlines",
    ),
    Option("option.chat_template", "model.chat_template", TEXT, "chat template: a file, or the text itself"),
    Option(
        "option.tool_call_parser",
        "model.tool_call_parser",
        TOOL_CALL_FORM,
        "form of a model's tool calls: hermes, json",
    ),
    Option(
        "option.reasoning_parser", "model.reasoning_parser", REASONING_FORM, "marks around a model's thoughts: think"
    ),
    Option(
        "option.trust_remote_code",
        "engine.trust_remote_code",
        BOOLEAN,
        "run Python code that comes with the model (vllm)",
        env=("HF_MODEL_TRUST_REMOTE_CODE", "HF_TRUST_REMOTE_CODE"),
    ),
    Option("option.allow_pickle", "engine.allow_pickle", BOOLEAN, "load pickled weights, which can run code"),
    Option("option.rolling_batch", "engine.handler", TEXT, "engine: auto, lmi-dist, vllm, trtllm, scheduler, disable"),
    Option(
        "option.async_mode",
        "",
        BOOLEAN,
        "with option.rolling_batch=disable: the engine of auto, in-flight batching, the LMI schema",
        has_flag=False,
    ),
    Option("option.dtype", "engine.dtype", DTYPE, "type of the weights: auto, fp32, bf16, fp16"),
    Option(
        "option.quantize",
        "engine.quantize",
        matching("the name of a method, such as int8", r"[A-Za-z0-9_-]{1,64}"),
        "quantise the weights at load",
        aliases=("option.quantization",),
        env=("HF_MODEL_QUANTIZE",),
    ),
    Option("option.device", "engine.device", choice("auto", "cpu", "cuda"), "auto: cuda where a GPU is visible"),
    Option(
        "option.max_rolling_batch_size",
        "engine.max_num_sequences",
        integer(1, 65536),
        "sequences that run at once",
        aliases=("option.max_num_seqs",),
        env=("MAX_BATCH_SIZE",),
    ),
    Option(
        "option.max_rolling_batch_prefill_tokens",
        "engine.max_prefill_tokens",
        integer(1),
        "prompt tokens of one step",
        aliases=("option.max_num_batched_tokens",),
        env=("MAX_BATCH_PREFILL_TOKENS",),
    ),
    Option(
        "batch_size",
        "",
        integer(1, 65536),
        "sequences that run at once with option.rolling_batch=disable",
        aliases=("max_dynamic_batch_size",),
    ),
    Option("max_batch_delay", "", integer(0), "milliseconds to wait for a batch; accepted, nothing waits"),
    Option("option.max_kv_cache_tokens", "engine.max_kv_cache_tokens", integer(1), "size of the KV cache in tokens"),
    Option(
        "option.max_model_len",
        "engine.max_sequence_length",
        LENGTH,
        "longest prompt and answer together, as in 4096 or 32k; auto: as long as the engine can",
        env=("MAX_TOTAL_TOKENS",),
    ),
    Option(
        "option.request_stats_max_iterations",
        "",
        integer(0),
        "steps of which an engine keeps each request's statistics",
        is_for_engine=True,
    ),
    Option("option.batch_invariant", "engine.batch_invariant", BOOLEAN, "neighbours change no bit of an answer"),
    Option(
        "option.tensor_parallel_degree",
        "engine.tensor_parallel_degree",
        DEGREE,
        "GPUs that share each layer, or groups of cores on a CPU (vllm); max: all GPUs",
        aliases=("option.tensor_parallel_size",),
        env=("TENSOR_PARALLEL_DEGREE", "SM_NUM_GPUS", "TENSOR_PARALLEL_SIZE"),
    ),
    Option(
        "option.pipeline_parallel_degree",
        "engine.pipeline_parallel_degree",
        integer(1, 1024),
        "GPUs that share the layers in turn",
        aliases=("option.pipeline_parallel_size",),
        env=("PIPELINE_PARALLEL_DEGREE",),
    ),
    Option("option.env", "engine.environ", VARIABLES, "environment of engines and of the model's own code, as A=1,B=2"),
    Option("option.num_threads", "engine.num_threads", integer(1, 1024), "threads of an engine on a CPU"),
    Option("minWorkers", "", integer(1, 1024), "least number of replicas", platform=("SAGEMAKER_NUM_MODEL_WORKERS",)),
    Option("maxWorkers", "", integer(1, 1024), "most replicas", platform=("SAGEMAKER_NUM_MODEL_WORKERS",)),
    Option("load_on_devices", "", Kind("* or GPU numbers with ; between", _devices), "GPUs to use, as in 0;1"),
    Option(
        "step_timeout",
        "engine.step_timeout_s",
        SECONDS,
        "seconds without a step while work waits: the engine hangs",
        aliases=("option.step_timeout",),
    ),
    Option("first_step_timeout", "engine.first_step_timeout_s", SECONDS, "the same for an engine's first step"),
    Option(
        "model_loading_timeout",
        "engine.model_loading_timeout_s",
        SECONDS,
        "seconds for loading the model",
        aliases=("option.model_loading_timeout",),
        env=("MODEL_LOADING_TIMEOUT",),
        platform=("SAGEMAKER_STARTUP_TIMEOUT",),
    ),
    Option(
        "retry_threshold",
        "engine.retry_threshold",
        integer(0, 1000),
        "deaths of an engine in retry_window, then the server ends; 0 as 1: the first one ends it",
        aliases=("option.retry_threshold",),
        env=("PROCESS_MAX_START_RETRIES",),
    ),
    Option("retry_window", "engine.retry_window_s", SECONDS, "seconds in which those deaths are counted"),
    Option("option.strict", "engine.strict", BOOLEAN, "an unknown option.* stops the start"),
    Option("engine", "", ENGINE, "accepted, means nothing", has_flag=False),
    Option(
        "option.entryPoint",
        "",
        ENTRY_POINT,
        "Python file whose function handle is the model; djl_python.… means nothing",
        env=("DJL_ENTRY_POINT",),
    ),
    Option(
        "option.task",
        "",
        TEXT,
        "what the model is for; text is generated, whatever it says",
        env=("HF_TASK",),
        has_flag=False,
    ),
    Option("option.handler", "", FUNCTION, "the function of entryPoint, instead of handle"),
)

# Environment names of options that have no row here, and names whose values are written in another way.
OTHER_ENV = {
    "HF_REVISION": "option.revision",
    "MAX_INPUT_LENGTH": "max_input_length",
    "MAX_INPUT_TOKENS": "max_input_length",
    "CUDA_MEMORY_FRACTION": "option.gpu_memory_utilization",
    "ENABLE_CUDA_GRAPHS": "option.enforce_eager",
    "LWS_GROUP_SIZE": "option.nnodes",  # these three are given to each pod of a Kubernetes LeaderWorkerSet
    "LWS_WORKER_INDEX": "option.node_rank",
    "LWS_LEADER_ADDRESS": "option.master_addr",
}
TRANSLATED: dict[str, Callable[[str], str]] = {
    "ENABLE_CUDA_GRAPHS": lambda text: str(not WORDS.get(text.lower(), True)).lower(),
    "SAGEMAKER_MAX_PAYLOAD_IN_MB": lambda text: "" if text == "0" else f"{text}m",  # 0: bodies without end
}

# Keys of the reference that ask for nothing here: processes, memory and batches are arranged differently.
WITHOUT_EFFECT = frozenset(
    "max_idle_time max_input_length log_request_metric metrics_aggregation "
    "required_memory_mb reserved_memory_mb translatorFactory model_store download_dir features fail_fast "
    "option.fail_fast option.enable_auto_tool_choice option.enable_reasoning option.paged_attention option.n_positions "
    "option.batch_size option.device_map option.low_cpu_mem_usage "
    "option.mpi_mode option.use_passive_workers option.parallel_loading option.waiting_steps "
    "option.pythonExecutable option.enable_venv option.max_output_size "
    "option.log_request_metric option.bedrock_compat".split()
)

# Why, where that is not plain.
REASONS = {
    "max_input_length": "a prompt may fill all but one token of the context, which option.max_model_len sets",
    "option.batch_size": "option.max_rolling_batch_size bounds the sequences that run at once",
    "option.enable_auto_tool_choice": "option.tool_call_parser switches it on",
    "option.enable_reasoning": "option.reasoning_parser switches it on",
    "option.device_map": "option.device and option.tensor_parallel_degree choose the devices",
    "fail_fast": "a start that fails always ends the server",
    "option.fail_fast": "a start that fails always ends the server",
}

# Words, as keys and as flags, that other servers have for what this one has not; never taken for a slip of the pen.
ELSEWHERE = {
    "api_key": "this server has no keys yet",
    "ssl_certfile": "this server speaks plain HTTP",
    "ssl_keyfile": "this server speaks plain HTTP",
    "lora_modules": "no adapters are loaded at the start yet",
    "max_new_tokens": "a request says it, as max_new_tokens among its parameters",
}
GENERATION_TASKS = frozenset(("auto", "conversational", "generate", "text-generation"))

# Options of the table that one engine alone uses, and what happens with the others.
OF_ONE_ENGINE = {"option.trust_remote_code": ("vllm", "code that comes with a model is never run")}

LORA_KEYS = frozenset(("option.enable_lora", "option.max_loras", "option.max_lora_rank", "option.max_cpu_loras"))

# Keys that some engine understands: never called unknown, handed on unless the engine's own names are known.
ENGINE_KEYS = frozenset(
    "option.revision option.enforce_eager option.gpu_memory_utilization option.load_format option.enable_lora "
    "option.max_loras option.max_lora_rank option.max_cpu_loras option.lora_extra_vocab_size option.kv_cache_dtype "
    "option.enable_prefix_caching option.enable_chunked_prefill option.speculative_draft_model "
    "option.speculative_length option.draft_model_tp_size option.swap_space option.cpu_offload_gb "
    "option.limit_mm_per_prompt option.tokenizer option.tokenizer_mode option.max_input_len option.max_output_len "
    "option.max_num_tokens option.kv_cache_free_gpu_mem_fraction option.batch_scheduler_policy "
    "option.enable_kv_cache_reuse option.enable_trt_overlap option.tokens_per_block option.seed option.nnodes "
    "option.node_rank option.master_addr option.master_port option.distributed_executor_backend "
    "option.speculative_config option.disable_custom_all_reduce option.lmcache_config_file option.block_size "
    "option.long_lora_scaling_factors option.fully_sharded_loras".split()
)

_BY_KEY = {key: option for option in OPTIONS for key in (option.key, *option.aliases)}
_BY_ENV_NAME = {key.removeprefix("option.").replace("_", "").lower(): key for key in _BY_KEY}


def find(key: str) -> Option | None:
    """The row of a key or alias of serving.properties."""
    return _BY_KEY.get(key)


def key_of_env(name: str) -> str:
    """The key that OPTION_X_Y or SERVING_X_Y stands for: MIN_WORKERS is minWorkers, other names become lower case."""
    prefix, _, rest = name.partition("_")
    known = _BY_ENV_NAME.get(rest.replace("_", "").lower())
    if known is not None:
        return known
    lowered = rest.lower() if rest.isupper() else rest
    return f"option.{lowered}" if prefix == "OPTION" else lowered


# Keys of LMI that are translated for vLLM; every other option that it uses has the name of an argument of its own.
TRANSLATED_FOR_VLLM = frozenset(
    "option.speculative_draft_model option.speculative_length option.draft_model_tp_size".split()
)


def elsewhere(key: str) -> str:
    """What a key or flag of other servers means here, or nothing."""
    return ELSEWHERE.get(key.removeprefix("option.").lstrip("-").replace("-", "_").lower(), "")


def known_keys() -> list[str]:
    return sorted({*_BY_KEY, *WITHOUT_EFFECT, *ENGINE_KEYS})
