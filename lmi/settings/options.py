"""The table of options: names, aliases, environment variables, kinds, help.

Each row is one option, under its key in serving.properties. Command-line flags, `lmi config`, environment names and
the messages about bad values come from this table. It does not know files or precedence. The default of an option is
the default of the field in `config.py` that its row fills. Source of the names: LMI's serving.properties and TGI's
environment variables.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lmi.settings.kinds import (
    ABSOLUTE_PATH,
    ADDRESS,
    BOOLEAN,
    DEGREE,
    DEVICES,
    DTYPE,
    ENGINE,
    ENTRY_POINT,
    FOLDERS,
    FORMATTER,
    FUNCTION,
    GATEWAY,
    LENGTH,
    LOG_LEVEL,
    MILLISECONDS,
    MODELS,
    NAME,
    NAMES,
    OUTPUTS,
    PORT_RANGE,
    PYTHON_FILE,
    REASONING_FORM,
    SECONDS,
    SECONDS_OR_NONE,
    SERVED_NAMES,
    SIZE,
    STREAMING,
    TEXT,
    TEXTS,
    TOOL_CALL_FORM,
    VARIABLES,
    Kind,
    choice,
    integer,
    matching,
)
from lmi.settings.reference import ENGINE_KEYS, WITHOUT_EFFECT


@dataclass(frozen=True, slots=True)
class Option:
    """One row. `field` is the field of Config that it fills, such as "server.port", or "" if it fills none directly."""

    key: str
    field: str
    kind: Kind
    help: str
    aliases: tuple[str, ...] = ()  # further keys with the same meaning
    env: tuple[str, ...] = ()  # environment names beside OPTION_… and SERVING_…; the first one given counts
    platform: tuple[str, ...] = ()  # SAGEMAKER_… names, which beat the file; the first one given counts
    has_flag: bool = True
    more_flags: tuple[str, ...] = ()
    is_for_engine: bool = False  # EngineConfig.options holds its text for every engine

    @property
    def flag(self) -> str:
        return _flag(self.key)

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags of the option: one for the key, one for each alias, and `more_flags`."""
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
        "with_gateway",
        "server.gateway_port",
        GATEWAY,
        "port on loopback for AWS's SageMaker API in front of the server; without PORT: 8081",
    ),
    Option(
        "safe_port_range",
        "server.safe_port_range",
        PORT_RANGE,
        "ports for every listener beside the server's own port, such as an engine's rendezvous",
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
        "ascii_streams", "server.ascii_streams", BOOLEAN, "records of a stream have only ASCII, \\uXXXX for the rest"
    ),
    Option(
        "buffer_streams", "server.buffer_streams", BOOLEAN, "a stream is sent whole, as asynchronous endpoints need"
    ),
    Option(
        "max_payload_in_mb",
        "server.max_payload_mb",
        integer(0),
        "largest request of a batch transform, which /execution-parameters reports; 0: no limit",
        platform=("SAGEMAKER_MAX_PAYLOAD_IN_MB",),
    ),
    Option(
        "max_concurrent_transforms",
        "server.max_concurrent_transforms",
        integer(1),
        "requests of a batch transform at once, which /execution-parameters reports",
        platform=("SAGEMAKER_MAX_CONCURRENT_TRANSFORMS",),
    ),
    Option(
        "batch_strategy",
        "server.batch_strategy",
        choice(
            "SINGLE_RECORD",
            "MULTI_RECORD",
            single_record="SINGLE_RECORD",
            singlerecord="SINGLE_RECORD",
            multi_record="MULTI_RECORD",
            multirecord="MULTI_RECORD",
        ),
        "records in a request of a batch transform, which /execution-parameters reports",
        platform=("SAGEMAKER_BATCH_STRATEGY",),
    ),
    Option(
        "option.enable_stateful_sessions",
        "server.enable_sessions",
        BOOLEAN,
        "clients may open sessions",
        platform=("SAGEMAKER_ENABLE_STATEFUL_SESSIONS",),
    ),
    Option(
        "option.sessions_expiration",
        "server.sessions_expiration_s",
        SECONDS,
        "seconds after which a session ends, used or not",
        platform=("SAGEMAKER_SESSIONS_EXPIRATION",),
    ),
    Option(
        "option.sessions_path",
        "server.sessions_path",
        matching("an absolute path", r"/[^\0]*"),
        "folder of the sessions; one of your own outlives the server; nothing: a temporary one",
        platform=("SAGEMAKER_SESSIONS_PATH",),
    ),
    Option(
        "option.max_sessions",
        "server.max_sessions",
        integer(1),
        "sessions that are open at once; a client may have as many as are free, so one alone has half of them",
    ),
    Option(
        "management",
        "server.management",
        BOOLEAN,
        "routes that change models and adapters; false: they are answered 404",
    ),
    Option(
        "max_adapters",
        "server.max_adapters",
        integer(1),
        "registered adapters of a model; more are answered 507",
        platform=("SAGEMAKER_MAX_NUMBER_OF_ADAPTERS_IN_MEMORY",),
    ),
    Option(
        "adapter_roots",
        "server.adapter_roots",
        FOLDERS,
        "folders below which the src of an adapter may lie, beside the model's folder and /opt/ml",
    ),
    Option(
        "log_level",
        "server.log_level",
        LOG_LEVEL,
        "least level that is logged: DEBUG, INFO, WARNING, ERROR, or Python's numbers",
        platform=("SAGEMAKER_CONTAINER_LOG_LEVEL",),
    ),
    Option("log_format", "server.log_format", choice("auto", "text", "json"), "auto: text on a terminal, else json"),
    Option(
        "batch_transform",
        "",
        BOOLEAN,
        "the server runs for a batch transform; accepted, nothing depends on it",
        platform=("SAGEMAKER_BATCH",),
        has_flag=False,
    ),
    Option(
        "multi_model",
        "server.multi_model",
        BOOLEAN,
        "start without a model; POST /models loads one",
        platform=("SAGEMAKER_MULTI_MODEL",),
    ),
    Option("max_models", "server.max_models", integer(1, 10_000), "models that are loaded at once with multi_model"),
    Option("model_store", "server.model_store", ABSOLUTE_PATH, "folder that models of multi_model must be in"),
    Option(
        "reserved_memory_mb",
        "server.reserved_memory_mb",
        integer(0),
        "megabytes of memory that a further model of multi_model must leave free",
    ),
    Option(
        "secure_mode",
        "server.secure_mode",
        BOOLEAN,
        "refuse what security_controls name, and every option and path that is not known to be safe",
        platform=("SAGEMAKER_SECURE_MODE",),
    ),
    Option(
        "security_controls",
        "server.security_controls",
        TEXTS,
        "what secure_mode refuses, as in DISALLOW_PICKLE_FILES,DISALLOW_CHAT_TEMPLATE",
        platform=("SAGEMAKER_SECURITY_CONTROLS",),
    ),
    Option(
        "untrusted_channels",
        "server.untrusted_channels",
        TEXTS,
        "folders in which secure_mode looks for pickles and chat templates, with , between; nothing: the model's",
        platform=("SAGEMAKER_UNTRUSTED_CHANNELS",),
    ),
    Option(
        "download_dir",
        "server.download_dir",
        TEXT,
        "folder for models from S3 and for what requirements.txt installs; nothing: lmi/models in the user's cache",
    ),
    Option(
        "required_memory_mb",
        "engine.required_memory_mb",
        integer(0),
        "MB of memory that one of several models needs; nothing: estimated from its files",
    ),
    Option(
        "option.model_id",
        "",
        TEXT,
        "folder of the model, or demo; nothing: the folder of serving.properties itself",
        aliases=("option.model",),
        env=("HF_MODEL_ID",),
    ),
    Option(
        "option.revision",
        "model.revision",
        TEXT,
        "branch, tag or commit of a model from a hub; nothing: main",
        env=("HF_REVISION",),
        is_for_engine=True,
    ),
    Option("option.model_name", "model.name", NAME, "name in URLs and answers; nothing: the folder's name"),
    Option(
        "option.model_alias",
        "model.aliases",
        NAMES,
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
        STREAMING,
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
        "run Python code that comes with the model (vllm, trtllm)",
        env=("HF_MODEL_TRUST_REMOTE_CODE", "HF_TRUST_REMOTE_CODE"),
    ),
    Option(
        "option.install_requirements",
        "",
        BOOLEAN,
        "install the model's requirements.txt for its own code; nothing: true",
        env=("STANDARD_AUTO_INSTALL_REQ",),
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
        "quantise the weights at load; int8 on the embedded engine needs its native kernels",
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
    Option(
        "option.max_step_ms",
        "engine.max_step_ms",
        MILLISECONDS,
        "longest step of the embedded engine that takes prompt tokens beside answers; nothing: it measures and chooses",
    ),
    Option("option.max_kv_cache_tokens", "engine.max_kv_cache_tokens", integer(1), "size of the KV cache in tokens"),
    Option(
        "option.max_model_len",
        "engine.max_sequence_length",
        LENGTH,
        "longest prompt and answer together, as in 4096 or 32k; auto: as long as the engine can",
        env=("MAX_TOTAL_TOKENS",),
    ),
    Option(
        "option.max_beam_width",
        "engine.max_beam_width",
        integer(1, 256),
        "widest beam search that a request may ask for, at most option.max_rolling_batch_size; 1: none",
    ),
    Option(
        "option.request_stats_max_iterations",
        "engine.request_stats_max_iterations",
        integer(0),
        "steps of which an engine keeps each request's statistics",
    ),
    Option(
        "option.additional_outputs",
        "engine.additional_outputs",
        OUTPUTS,
        "tensors of the model that requests may ask for, NAME or NAME:context, which has the prompt's rows too",
    ),
    Option(
        "option.logits_post_processors",
        "engine.logits_post_processors",
        PYTHON_FILE,
        "Python file with functions that change logits; it runs in the engine's own process",
    ),
    Option(
        "option.enable_prefix_caching",
        "engine.enable_prefix_caching",
        BOOLEAN,
        "prompts that begin alike share cached keys and values; nothing: the engine chooses, as a rule true",
    ),
    Option(
        "option.prefix_cache_scope",
        "model.prefix_cache_scope",
        choice("server", "request"),
        "whose prompts share cached keys and values: all of the server, or only those of one request",
    ),
    Option(
        "option.speculative",
        "engine.speculative",
        choice("ngram"),
        "the embedded engine guesses tokens ahead, which changes no answer: ngram, from what the sequence holds",
    ),
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
    Option(
        "option.bind_cores",
        "engine.bind_cores",
        BOOLEAN,
        "keep an engine on a CPU to its cores and front ends to the rest, where both have enough",
    ),
    Option("minWorkers", "", integer(1, 1024), "least number of replicas", platform=("SAGEMAKER_NUM_MODEL_WORKERS",)),
    Option("maxWorkers", "", integer(1, 1024), "most replicas", platform=("SAGEMAKER_NUM_MODEL_WORKERS",)),
    Option("load_on_devices", "", DEVICES, "GPUs to use, as in 0;1"),
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
        "what the model is for; anything but generating text is refused",
        env=("HF_TASK",),
        has_flag=False,
    ),
    Option("option.handler", "", FUNCTION, "the function of entryPoint, instead of handle"),
)

_BY_KEY = {key: option for option in OPTIONS for key in (option.key, *option.aliases)}
_BY_ENV_NAME = {key.removeprefix("option.").replace("_", "").lower(): key for key in _BY_KEY}


def find(key: str) -> Option | None:
    """Return the row of a key or alias of serving.properties, or None if it has no row."""
    return _BY_KEY.get(key)


def is_of_server(key: str) -> bool:
    """Return whether an option belongs to the whole server, and not to a model of it."""
    option = find(key)
    return option is not None and (
        option.field.startswith("server.") or option.key in ("inference_address", "safe_port_range")
    )


def key_of_env(name: str) -> str:
    """Return the key that OPTION_X_Y or SERVING_X_Y means.

    SERVING_MIN_WORKERS means minWorkers. The name of a key without a row becomes lower case, if it is all upper case.
    """
    prefix, _, rest = name.partition("_")
    known = _BY_ENV_NAME.get(rest.replace("_", "").lower())
    if known is not None:
        return known
    lowered = rest.lower() if rest.isupper() else rest
    return f"option.{lowered}" if prefix == "OPTION" else lowered


def known_keys() -> list[str]:
    return sorted({*_BY_KEY, *WITHOUT_EFFECT, *ENGINE_KEYS})
