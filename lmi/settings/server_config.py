"""The settings of a server: its front ends, its supervisor, and what all its models share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from lmi.settings.kinds import (
    ABSOLUTE_PATH,
    ADDRESS,
    BATCH_STRATEGY,
    BOOLEAN,
    FOLDERS,
    GATEWAY,
    LOG_LEVEL,
    MEGABYTES,
    PORT_RANGE,
    SECONDS,
    SECONDS_OR_NONE,
    SIZE,
    TEXT,
    TEXTS,
    choice,
    integer,
    matching,
)
from lmi.settings.option import Option, option


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the front ends and the supervisor."""

    host: str = option(
        "host", "0.0.0.0", matching("a host name or address", r"[A-Za-z0-9.:_-]{1,253}"), "address to listen on"
    )
    port: int = option(
        "port",
        8080,
        integer(0, 65535),
        "port; 0: any free one",
        platform=("SAGEMAKER_BIND_TO_PORT",),
        own_kinds={"SAGEMAKER_BIND_TO_PORT": integer(1, 65535)},
    )
    inference_address: ClassVar = Option("inference_address", None, ADDRESS, "host and port in one")
    gateway_port: int | None = option(
        "with_gateway",
        None,
        GATEWAY,
        "port on loopback for AWS's SageMaker API in front of the server; without PORT: 8081",
    )
    safe_port_range: tuple[int, int] | None = option(
        "safe_port_range",
        None,
        PORT_RANGE,
        "ports for every listener beside the server's own port, such as an engine's rendezvous",
        platform=("SAGEMAKER_SAFE_PORT_RANGE",),
    )
    frontend_workers: int = option("frontend_workers", 1, integer(1, 256), "front-end processes")
    job_queue_size: int = option(
        "job_queue_size",
        1000,
        integer(1),
        "waiting sequences of the model; more are answered 503",
        env=("MAX_CONCURRENT_REQUESTS",),
    )
    max_request_sequences: int = option(
        "max_request_sequences",
        512,
        integer(1),
        "sequences of one request: its prompts times n or best_of; more are refused",
    )
    max_request_size: int = option(
        "max_request_size",
        64 << 20,
        SIZE,
        "bytes of a request's body; more are answered 413",
        platform=("SAGEMAKER_MAX_REQUEST_SIZE", "SAGEMAKER_MAX_PAYLOAD_IN_MB"),
        own_kinds={"SAGEMAKER_MAX_PAYLOAD_IN_MB": MEGABYTES},
    )
    max_body_memory: int = option(
        "max_body_memory", 256 << 20, SIZE, "bytes of all request bodies in one front end; more are answered 503"
    )
    predict_timeout_s: float | None = option(
        "predict_timeout",
        None,
        SECONDS_OR_NONE,
        "seconds for a whole request, then 504",
        aliases=("option.predict_timeout",),
        env=("PREDICT_TIMEOUT",),
        platform=("SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS", "SAGEMAKER_MODEL_SERVER_TIMEOUT"),
    )
    drain_timeout_s: float = option("drain_timeout", 25.0, SECONDS, "seconds for open answers after SIGTERM")
    stall_timeout_s: float = option("stall_timeout", 30.0, SECONDS, "seconds that a client may leave its answer unread")
    header_timeout_s: float = option("header_timeout", 10.0, SECONDS, "seconds for a request's head")
    body_timeout_s: float = option("body_timeout", 60.0, SECONDS, "seconds for a request's body")
    allow_multi_status: bool = option("allow_multi_status", False, BOOLEAN, "/ping may answer 207")
    ascii_streams: bool = option(
        "ascii_streams", False, BOOLEAN, "records of a stream have only ASCII, \\uXXXX for the rest"
    )
    buffer_streams: bool = option(
        "buffer_streams", False, BOOLEAN, "a stream is sent whole, as asynchronous endpoints need"
    )
    max_payload_mb: int = option(
        "max_payload_in_mb",
        6,
        integer(0),
        "largest request of a batch transform, which /execution-parameters reports; 0: no limit",
        platform=("SAGEMAKER_MAX_PAYLOAD_IN_MB",),
    )
    max_concurrent_transforms: int | None = option(
        "max_concurrent_transforms",
        None,
        integer(1),
        "requests of a batch transform at once, which /execution-parameters reports",
        platform=("SAGEMAKER_MAX_CONCURRENT_TRANSFORMS",),
    )
    batch_strategy: str = option(
        "batch_strategy",
        "SINGLE_RECORD",
        BATCH_STRATEGY,
        "records in a request of a batch transform, which /execution-parameters reports",
        platform=("SAGEMAKER_BATCH_STRATEGY",),
    )
    enable_sessions: bool = option(
        "option.enable_stateful_sessions",
        True,
        BOOLEAN,
        "clients may open sessions",
        platform=("SAGEMAKER_ENABLE_STATEFUL_SESSIONS",),
    )
    sessions_expiration_s: float = option(
        "option.sessions_expiration",
        1200.0,
        SECONDS,
        "seconds after which a session ends, used or not",
        platform=("SAGEMAKER_SESSIONS_EXPIRATION",),
    )
    sessions_path: str | None = option(
        "option.sessions_path",
        None,
        matching("an absolute path", r"/[^\0]*"),
        "folder of the sessions; one of your own outlives the server; nothing: a temporary one",
        platform=("SAGEMAKER_SESSIONS_PATH",),
        is_path=True,
    )
    max_sessions: int = option(
        "option.max_sessions",
        20_000,
        integer(1),
        "sessions that are open at once; a client may have as many as are free, so one alone has half of them",
    )
    management: bool = option(
        "management", True, BOOLEAN, "routes that change models and adapters; false: they are answered 404"
    )
    max_adapters: int = option(
        "max_adapters",
        128,
        integer(1),
        "registered adapters of a model; more are answered 507",
        platform=("SAGEMAKER_MAX_NUMBER_OF_ADAPTERS_IN_MEMORY",),
    )
    adapter_roots: tuple[str, ...] = option(
        "adapter_roots",
        (),
        FOLDERS,
        "folders below which the src of an adapter may lie, beside the model's folder and /opt/ml",
        is_for_operator=True,
    )
    log_level: str = option(
        "log_level",
        "INFO",
        LOG_LEVEL,
        "least level that is logged: DEBUG, INFO, WARNING, ERROR, or Python's numbers",
        platform=("SAGEMAKER_CONTAINER_LOG_LEVEL",),
    )
    log_format: str = option(
        "log_format", "auto", choice("auto", "text", "json"), "auto: text on a terminal, else json"
    )
    batch_transform: ClassVar = Option(
        "batch_transform",
        None,
        BOOLEAN,
        "the server runs for a batch transform; accepted, nothing depends on it",
        platform=("SAGEMAKER_BATCH",),
        has_flag=False,
    )
    multi_model: bool = option(
        "multi_model",
        False,
        BOOLEAN,
        "start without a model; POST /models loads one",
        platform=("SAGEMAKER_MULTI_MODEL",),
    )
    max_models: int = option("max_models", 64, integer(1, 10_000), "models that are loaded at once with multi_model")
    model_store: str = option(
        "model_store",
        "/opt/ml/models",
        ABSOLUTE_PATH,
        "folder that models of multi_model must be in",
        is_for_operator=True,
    )
    reserved_memory_mb: int = option(
        "reserved_memory_mb", 500, integer(0), "megabytes of memory that a further model of multi_model must leave free"
    )
    secure_mode: bool = option(
        "secure_mode",
        False,
        BOOLEAN,
        "refuse what security_controls name, and every option and path that is not known to be safe",
        platform=("SAGEMAKER_SECURE_MODE",),
        is_for_operator=True,
    )
    security_controls: tuple[str, ...] = option(
        "security_controls",
        (),
        TEXTS,
        "what secure_mode refuses, as in DISALLOW_PICKLE_FILES,DISALLOW_CHAT_TEMPLATE",
        platform=("SAGEMAKER_SECURITY_CONTROLS",),
        is_for_operator=True,
    )
    untrusted_channels: tuple[str, ...] = option(
        "untrusted_channels",
        (),
        TEXTS,
        "folders in which secure_mode looks for pickles and chat templates, with , between; nothing: the model's",
        platform=("SAGEMAKER_UNTRUSTED_CHANNELS",),
        is_for_operator=True,
    )
    download_dir: str = option(
        "download_dir",
        "",
        TEXT,
        "folder for models from S3 and for what requirements.txt installs; nothing: lmi/models in the user's cache",
        is_for_operator=True,
    )
    model_flags: dict[str, str] = field(default_factory=dict)  # of the command line, by key, for each of several models
