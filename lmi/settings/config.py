"""The settings of a server, which all its processes share.

The supervisor fills these frozen dataclasses from command line, environment and serving.properties, and hands them to
its children as one JSON file. Only the supervisor reads options from the environment. The default of an option is the
default of its field, unless the engine's `Handler` has a different one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the front ends and the supervisor."""

    host: str = "0.0.0.0"
    port: int = 8080
    frontend_workers: int = 1
    job_queue_size: int = 1000  # waiting sequences
    max_request_sequences: int = 512  # prompts times n or best_of
    max_request_size: int = 64 << 20  # bytes of a body
    max_body_memory: int = 256 << 20  # bytes of all bodies in a front end
    predict_timeout_s: float | None = None  # a whole request
    drain_timeout_s: float = 25.0
    stall_timeout_s: float = 30.0  # a client that does not read
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    allow_multi_status: bool = False
    ascii_streams: bool = False  # records of a stream have only ASCII
    buffer_streams: bool = False  # a stream is sent whole, with its length
    max_payload_mb: int = 6  # of a batch transform's requests, 0 without a limit
    max_concurrent_transforms: int | None = None  # None: as many as the engines run
    batch_strategy: str = "SINGLE_RECORD"
    enable_sessions: bool = True
    sessions_expiration_s: float = 1200.0  # after a session was opened
    sessions_path: str | None = None  # None: in the runtime folder
    max_sessions: int = 20_000  # open at once
    management: bool = True  # the routes that change models and adapters
    max_adapters: int = 128  # registered ones of a model
    adapter_roots: tuple[str, ...] = ()  # folders below which registered adapters may lie
    model_flags: dict[str, str] = field(default_factory=dict)  # of the command line, by key, for each of several models
    log_level: str = "INFO"
    log_format: str = "auto"  # auto (text on a terminal, else json), text, json
    gateway_port: int | None = None  # AWS's SageMaker API on loopback; None: no gateway
    safe_port_range: tuple[int, int] | None = None  # first and last port for every listener but the server's own
    multi_model: bool = False
    max_models: int = 64
    model_store: str = "/opt/ml/models"
    reserved_memory_mb: int = 500
    secure_mode: bool = False
    security_controls: tuple[str, ...] = ()
    untrusted_channels: tuple[str, ...] = ()
    download_dir: str = ""  # an absolute path, once it is resolved


@dataclass(frozen=True, slots=True)
class SamplingValues:
    """Values of parameters of the LMI APIs. A top_k of 0 is no limit."""

    temperature: float
    top_k: int
    top_p: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """The values of what an LMI request leaves out, with `do_sample: true` and without it.

    An engine that has them chooses by top_k and top_p: if both are 0, decoding is greedy; otherwise one that is 0 is no
    limit.
    """

    with_do_sample: SamplingValues
    without: SamplingValues


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model as clients see it. `path` is a local folder."""

    path: str
    name: str
    revision: str | None = None  # of a model from a hub
    aliases: tuple[str, ...] = ()  # further names that requests may use
    adapters: dict[str, str] = field(default_factory=dict)  # the folders of the LoRA adapters beside it, by name
    version: str = "1"
    output_formatter: str | None = None  # json, jsonlines, sse; None: by the request
    tgi_compat: bool = False
    dynamic_batch: bool = False  # option.rolling_batch=disable
    enable_streaming: bool = False  # of the dynamic-batch schema
    sampling_defaults: SamplingDefaults | None = None  # the engine's; None: greedy unless do_sample, without limits
    chat_template: str | None = None
    prefix_cache_scope: str = "server"  # or request: no two requests share cached keys and values
    tool_call_parser: str | None = None  # hermes, json; text: calls stay text; None: a chat with free calls is refused
    reasoning_parser: str | None = None  # think

    @property
    def names(self) -> tuple[str, ...]:
        """All names that a request may have for this model. `model` is always one of them."""
        return tuple(dict.fromkeys((self.name, "model", *self.aliases)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the engine replicas. None means that the engine chooses."""

    handler: str = "auto"  # the name of a Handler, once it is resolved
    num_engines: int = 1
    ports: tuple[int, ...] = ()  # TCP ports of all replicas in turn, by Handler.port_variables; (): any free ones
    device_ids: tuple[str, ...] = ()  # GPUs of all replicas in turn, as CUDA_VISIBLE_DEVICES names them; () on a CPU
    dtype: str = "auto"  # auto, fp32, bf16, fp16
    quantize: str | None = None  # a method, such as int8
    device: str = "auto"  # auto, cpu, cuda
    max_num_sequences: int | None = None  # option.max_rolling_batch_size
    max_prefill_tokens: int | None = None  # option.max_rolling_batch_prefill_tokens, prompt tokens a step
    max_kv_cache_tokens: int | None = None
    max_sequence_length: int | None = None  # option.max_model_len
    max_queue_size: int | None = None  # requests an Executor holds before Overloaded; None: the front end bounds it
    enable_prefix_caching: bool | None = None
    max_beam_width: int = 8
    request_stats_max_iterations: int = 0
    additional_outputs: tuple[str, ...] = ()  # NAME or NAME:context
    logits_post_processors: str | None = None  # a Python file in the model's folder
    max_step_ms: float | None = None  # with decodes in it, a step takes prompt tokens only up to about this time
    speculative: str | None = None  # ngram
    allow_pickle: bool = False
    trust_remote_code: bool = False
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    num_threads: int | None = None
    bind_cores: bool = True
    step_timeout_s: float = 60.0
    first_step_timeout_s: float = 300.0
    model_loading_timeout_s: float = 1200.0
    retry_threshold: int = 3
    retry_window_s: float = 600.0
    required_memory_mb: int | None = None  # of all replicas together; None: an estimate from the model's files
    strict: bool = False  # an unknown option stops the start
    environ: dict[str, str] = field(default_factory=dict)  # option.env, of engines and of the model's own code
    options: dict[str, str] = field(default_factory=dict)  # every other option.*, for engines that know more
    option_sources: dict[str, str] = field(default_factory=dict, compare=False)  # where each option.* was given


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCodeConfig:
    """A file of user code. A file with a `handler` is the model; another file holds formatters for a model.

    If the file has a formatter whose field is None, the formatter is the function with djl_python's decorator.
    """

    path: str
    handler: str | None = None
    output_formatter: str | None = None
    input_formatter: str | None = None
    has_output_formatter: bool = False
    has_input_formatter: bool = False
    properties: dict[str, str] = field(default_factory=dict)  # the properties of the handler's first call


@dataclass(frozen=True, slots=True, kw_only=True)
class RequirementsConfig:
    """A requirements.txt of the model, and the folder that what it names is installed in."""

    file: str
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    server: ServerConfig
    model: ModelConfig
    engine: EngineConfig
    user_code: UserCodeConfig | None = None
    requirements: RequirementsConfig | None = None  # None: nothing is installed

    @property
    def is_user_code(self) -> bool:
        """Whether user code is the model. It then runs in place of the engines."""
        return self.user_code is not None and self.user_code.handler is not None

    @property
    def num_formatters(self) -> int:
        """The number of processes that run the formatters of user code."""
        return 0 if self.user_code is None or self.is_user_code else 1


def dump(config: Config) -> bytes:
    return msgspec.json.encode(config)


def load(data: bytes) -> Config:
    return msgspec.json.decode(data, type=Config)
