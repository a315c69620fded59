"""Every setting of lmi, resolved once.

Frozen dataclasses that the supervisor fills from command line, environment and serving.properties and hands to its children as
one JSON file. Nobody else reads the environment. A default stands here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The front end and the supervisor."""

    host: str = "0.0.0.0"
    port: int = 8080
    frontend_workers: int = 1
    job_queue_size: int = 1000  # waiting requests
    max_request_size: int = 64 << 20  # bytes of a body
    predict_timeout_s: float | None = None  # a whole request
    drain_timeout_s: float = 25.0
    stall_timeout_s: float = 30.0  # a client that does not read
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    allow_multi_status: bool = False
    log_level: str = "INFO"
    log_format: str = "auto"  # auto (text on a terminal, else json), text, json


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model as clients see it. `path` is a local folder by now."""

    path: str
    name: str
    version: str = "1"
    output_formatter: str | None = None  # json, jsonlines, sse; None: by the request
    tgi_compat: bool = False
    chat_template: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    is_demo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine replica. None means that the engine chooses."""

    handler: str = "lmi-dist"
    num_engines: int = 1
    dtype: str = "auto"  # auto, fp32, bf16, fp16
    quantize: str | None = None  # int8
    device: str = "auto"  # auto, cpu, cuda
    max_num_sequences: int | None = None  # option.max_rolling_batch_size
    max_prefill_tokens: int | None = None  # option.max_rolling_batch_prefill_tokens, prompt tokens a step
    max_kv_cache_tokens: int | None = None
    max_sequence_length: int | None = None  # option.max_model_len
    max_queue_size: int | None = None  # requests an Executor holds before Overloaded; None: the front end bounds it
    batch_invariant: bool = True
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    num_threads: int | None = None
    step_timeout_s: float = 60.0
    first_step_timeout_s: float = 300.0
    model_loading_timeout_s: float = 1200.0
    retry_threshold: int = 3
    retry_window_s: float = 600.0
    options: dict[str, str] = field(default_factory=dict)  # every other option.*, for engines that know more


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    server: ServerConfig
    model: ModelConfig
    engine: EngineConfig
