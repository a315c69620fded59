"""The settings of a server: its front ends, its supervisor, and what all its models share."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmi.settings import annexes
from lmi.settings.kinds import SIZE, Kind, choice, integer, matching
from lmi.settings.listeners import PORT, ListenersConfig
from lmi.settings.option import option

MEGABYTES = Kind("a whole number of megabytes; 0: 1 GiB", lambda text: integer(0, 1 << 20).parse(text) << 20 or 1 << 30)
NUMBERED_LEVELS = {"0": "DEBUG", "10": "DEBUG", "20": "INFO", "30": "WARNING", "40": "ERROR", "50": "ERROR"}
LOG_LEVEL = choice(
    *("DEBUG", "INFO", "WARNING", "ERROR"), **NUMBERED_LEVELS, **{"warn": "WARNING", "critical": "ERROR"}
)


@dataclass(frozen=True, kw_only=True)
class RequestsConfig:
    """How large requests may be, how long they may take, and how they are answered."""

    max_queue_wait_s: float = option(10.0)
    """seconds that a request may be expected to wait before it starts; one that would wait longer gets 503 at once. On
    SageMaker 60 at most, but for batch transforms and with buffer_streams"""
    trust_fairness_id: bool = option(False)
    """requests with another x-llm-d-inference-fairness-id count as another client, and clients share the engine"""
    max_request_sequences: int = option(512)
    """sequences of one request: its prompts times n or best_of; more are refused"""
    max_request_size: int = option(
        64 << 20,
        SIZE,
        names="SAGEMAKER_MAX_REQUEST_SIZE SAGEMAKER_MAX_PAYLOAD_IN_MB",
        own_kinds={"SAGEMAKER_MAX_PAYLOAD_IN_MB": MEGABYTES},
    )
    """bytes of a request's body; more are answered 413"""
    max_body_memory: int = option(256 << 20, SIZE)
    """bytes of all request bodies in one front end; more are answered 503"""
    predict_timeout_s: float | None = option(
        None,
        names="option.predict_timeout PREDICT_TIMEOUT SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS "
        "SAGEMAKER_MODEL_SERVER_TIMEOUT",
    )
    """seconds for a whole request, then 504"""
    drain_timeout_s: float = option(25.0)
    """seconds for open answers after SIGTERM"""
    stall_timeout_s: float = option(30.0)
    """seconds that a client may leave its answer unread"""
    header_timeout_s: float = option(10.0)
    """seconds for a request's head"""
    body_timeout_s: float = option(60.0)
    """seconds for a request's body"""
    allow_multi_status: bool = option(False)
    """/ping may answer 207"""
    ascii_streams: bool = option(False)
    """records of a stream have only ASCII, \\uXXXX for the rest"""
    buffer_streams: bool = option(False)
    """a stream is sent whole, as asynchronous endpoints need"""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What the server logs."""

    log_level: str = option("INFO", LOG_LEVEL, names="SAGEMAKER_CONTAINER_LOG_LEVEL")
    """least level that is logged: DEBUG, INFO, WARNING, ERROR, or Python's numbers"""
    log_format: str = option("auto", choice("auto", "text", "json"))
    """auto: text on a terminal, else json"""
    throughput_interval_s: float | None = option(10.0, key="log_throughput_interval")
    """seconds between two lines of the log about throughput, while the engines work; none: no such lines"""


@dataclass(frozen=True, kw_only=True)
class AddressConfig:
    """Where the server listens."""

    host: str = option("127.0.0.1", matching("a host name or address", r"[A-Za-z0-9.:_-]{1,253}"))
    """address to listen on; nothing: this machine only, in a container every address"""
    port: int = option(
        8080, integer(0, 65535), names="SAGEMAKER_BIND_TO_PORT", own_kinds={"SAGEMAKER_BIND_TO_PORT": PORT}
    )
    """port; 0: any free one"""


@dataclass(frozen=True, kw_only=True)
class FrontEndsConfig:
    """How many front ends there are, and how much waits for them."""

    frontend_workers: int = option(1, integer(1, 256))
    """front-end processes"""
    job_queue_size: int = option(1000, names="MAX_CONCURRENT_REQUESTS")
    """waiting sequences of the model; more are answered 503"""


@dataclass(frozen=True, kw_only=True)
class ServerConfig(
    AddressConfig,
    ListenersConfig,
    FrontEndsConfig,
    annexes.AccessConfig,
    RequestsConfig,
    annexes.TransformLimitsConfig,
    annexes.SessionsConfig,
    annexes.AdaptersConfig,
    LogConfig,
    annexes.TracingConfig,
    annexes.PurposeConfig,
    annexes.SecureModeConfig,
    annexes.SourcesConfig,
):
    """Settings of the front ends and the supervisor: those of the bases in their order."""

    model_flags: dict[str, str] = field(default_factory=dict)  # of the command line, by key, for each of several models
