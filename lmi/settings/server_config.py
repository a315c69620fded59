"""The settings of a server: its front ends, its supervisor, and what all its models share."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass, field
from typing import ClassVar

from lmi.settings import kinds
from lmi.settings.kinds import Kind, choice, integer, matching
from lmi.settings.option import Option, option


@dataclass(frozen=True, slots=True)
class User:
    """The user that front ends, the gateway and user code run as where root starts the server."""

    text: str  # as it was given
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, text: str) -> User:
        """Return the user that a NAME, UID or UID:GID means. Raises ValueError for root and for unknown names."""
        user, _, group = text.partition(":")
        try:
            known = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
        except KeyError:
            known = None
        if known is None and not user.isdecimal():
            raise ValueError
        uid = int(user) if known is None else known.pw_uid
        gid = int(group) if group else uid if known is None else known.pw_gid
        if not (0 < uid < 2**32 - 1 and 0 < gid < 2**32 - 1):
            raise ValueError
        name, home = (str(uid), "") if known is None else (known.pw_name, known.pw_dir)
        groups = (gid,) if known is None or group else tuple(os.getgrouplist(name, gid))
        return cls(text, name, uid, gid, groups, home if os.path.isdir(home) else "/tmp")

    @property
    def environ(self) -> dict[str, str]:
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def become(self) -> None:
        """Make this process one of the user. The kernel forgets the signal of its parent's death."""
        os.setgroups(self.groups)
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the front ends and the supervisor."""

    host: str = option(
        "127.0.0.1",
        matching("a host name or address", r"[A-Za-z0-9.:_-]{1,253}"),
        "address to listen on; nothing: this machine only, in a container every address",
    )
    port: int = option(
        8080,
        integer(0, 65535),
        "port; 0: any free one",
        platform=("SAGEMAKER_BIND_TO_PORT",),
        own_kinds={"SAGEMAKER_BIND_TO_PORT": integer(1, 65535)},
    )
    management_port: int | None = option(
        None,
        integer(1, 65535),
        "port of metrics, docs and the routes that change models and adapters; `port` answers them 404 then",
    )
    inference_address: ClassVar = Option(None, kinds.ADDRESS, "host and port in one")
    gateway_port: int | None = option(
        None,
        kinds.GATEWAY,
        "port on loopback for AWS's SageMaker API in front of the server; without PORT: 8081",
        key="with_gateway",
    )
    ssl_certfile: str | None = option(
        None,
        kinds.ABSOLUTE_PATH,
        "file with this server's certificate and those that signed it, in PEM; the port speaks HTTPS then",
        is_path=True,
    )
    ssl_keyfile: str | None = option(
        None,
        kinds.ABSOLUTE_PATH,
        "file with the certificate's key, without a password; nothing: ssl_certfile has it too",
        is_path=True,
    )
    user: User | None = option(
        None,
        Kind("a user that this machine knows, UID or UID:GID, and not root", User.of),
        "user that front ends, the gateway and user code run as where root starts the server; nothing: the same user",
        key="option.user",
        is_for_operator=True,
    )
    safe_port_range: tuple[int, int] | None = option(
        None,
        kinds.PORT_RANGE,
        "ports for every listener beside the server's own port, such as an engine's rendezvous",
        platform=("SAGEMAKER_SAFE_PORT_RANGE",),
    )
    frontend_workers: int = option(1, integer(1, 256), "front-end processes")
    job_queue_size: int = option(
        1000, integer(1), "waiting sequences of the model; more are answered 503", env=("MAX_CONCURRENT_REQUESTS",)
    )
    api_keys: tuple[str, ...] = option(
        (),
        kinds.KEYS,
        "keys of which a request needs one, as Authorization: Bearer KEY or x-api-key; only digests of them are kept",
        key="option.api_key",
        env=("LMI_API_KEY",),
    )
    api_key_file: str | None = option(
        None, kinds.ABSOLUTE_PATH, "file with further keys, one on each line", key="option.api_key_file", is_path=True
    )
    cors_allowed_origins: tuple[str, ...] = option(
        (),
        kinds.ORIGINS,
        "origins whose pages may call this server from a browser, as in https://app.example; *: all",
        aliases=("allowed_origins",),
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        kinds.HOSTS,
        "names under which requests may come, as in llm.example, beside those without a dot; *: any. Nothing: any, "
        "but on loopback only those without a dot",
    )
    max_queue_wait_s: float = option(
        10.0,
        kinds.SECONDS,
        "seconds that a request may be expected to wait before it starts; one that would wait longer gets 503 at once. "
        "On SageMaker 60 at most, but for batch transforms and with buffer_streams",
        key="max_queue_wait",
    )
    trust_fairness_id: bool = option(
        False,
        kinds.BOOLEAN,
        "requests with another x-llm-d-inference-fairness-id count as another client, and clients share the engine",
    )
    max_request_sequences: int = option(
        512, integer(1), "sequences of one request: its prompts times n or best_of; more are refused"
    )
    max_request_size: int = option(
        64 << 20,
        kinds.SIZE,
        "bytes of a request's body; more are answered 413",
        platform=("SAGEMAKER_MAX_REQUEST_SIZE", "SAGEMAKER_MAX_PAYLOAD_IN_MB"),
        own_kinds={"SAGEMAKER_MAX_PAYLOAD_IN_MB": kinds.MEGABYTES},
    )
    max_body_memory: int = option(
        256 << 20, kinds.SIZE, "bytes of all request bodies in one front end; more are answered 503"
    )
    predict_timeout_s: float | None = option(
        None,
        kinds.SECONDS_OR_NONE,
        "seconds for a whole request, then 504",
        key="predict_timeout",
        aliases=("option.predict_timeout",),
        env=("PREDICT_TIMEOUT",),
        platform=("SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS", "SAGEMAKER_MODEL_SERVER_TIMEOUT"),
    )
    drain_timeout_s: float = option(25.0, kinds.SECONDS, "seconds for open answers after SIGTERM", key="drain_timeout")
    stall_timeout_s: float = option(
        30.0, kinds.SECONDS, "seconds that a client may leave its answer unread", key="stall_timeout"
    )
    header_timeout_s: float = option(10.0, kinds.SECONDS, "seconds for a request's head", key="header_timeout")
    body_timeout_s: float = option(60.0, kinds.SECONDS, "seconds for a request's body", key="body_timeout")
    allow_multi_status: bool = option(False, kinds.BOOLEAN, "/ping may answer 207")
    ascii_streams: bool = option(False, kinds.BOOLEAN, "records of a stream have only ASCII, \\uXXXX for the rest")
    buffer_streams: bool = option(False, kinds.BOOLEAN, "a stream is sent whole, as asynchronous endpoints need")
    max_payload_mb: int = option(
        6,
        integer(0),
        "largest request of a batch transform, which /execution-parameters reports; 0: no limit",
        key="max_payload_in_mb",
        platform=("SAGEMAKER_MAX_PAYLOAD_IN_MB",),
    )
    max_concurrent_transforms: int | None = option(
        None,
        integer(1),
        "requests of a batch transform at once, which /execution-parameters reports",
        platform=("SAGEMAKER_MAX_CONCURRENT_TRANSFORMS",),
    )
    batch_strategy: str = option(
        "SINGLE_RECORD",
        kinds.BATCH_STRATEGY,
        "records in a request of a batch transform, which /execution-parameters reports",
        platform=("SAGEMAKER_BATCH_STRATEGY",),
    )
    enable_sessions: bool = option(
        True,
        kinds.BOOLEAN,
        "clients may open sessions",
        key="option.enable_stateful_sessions",
        platform=("SAGEMAKER_ENABLE_STATEFUL_SESSIONS",),
    )
    sessions_expiration_s: float = option(
        1200.0,
        kinds.SECONDS,
        "seconds after which a session ends, used or not",
        key="option.sessions_expiration",
        platform=("SAGEMAKER_SESSIONS_EXPIRATION",),
    )
    sessions_path: str | None = option(
        None,
        kinds.ABSOLUTE_PATH,
        "folder of the sessions; one of your own outlives the server; nothing: a temporary one",
        key="option.sessions_path",
        platform=("SAGEMAKER_SESSIONS_PATH",),
        is_path=True,
    )
    max_sessions: int = option(
        20_000,
        integer(1),
        "sessions that are open at once; a client may have as many as are free, so one alone has half of them",
        key="option.max_sessions",
    )
    management: bool = option(
        True, kinds.BOOLEAN, "routes that change models and adapters; false: they are answered 404"
    )
    max_adapters: int = option(
        128,
        integer(1),
        "registered adapters of a model; more are answered 507",
        platform=("SAGEMAKER_MAX_NUMBER_OF_ADAPTERS_IN_MEMORY",),
    )
    adapter_roots: tuple[str, ...] = option(
        (),
        kinds.FOLDERS,
        "folders below which the src of an adapter may lie, beside the model's folder and /opt/ml",
        is_for_operator=True,
    )
    log_level: str = option(
        "INFO",
        kinds.LOG_LEVEL,
        "least level that is logged: DEBUG, INFO, WARNING, ERROR, or Python's numbers",
        platform=("SAGEMAKER_CONTAINER_LOG_LEVEL",),
    )
    log_format: str = option("auto", choice("auto", "text", "json"), "auto: text on a terminal, else json")
    throughput_interval_s: float | None = option(
        10.0,
        kinds.SECONDS_OR_NONE,
        "seconds between two lines of the log about throughput, while the engines work; none: no such lines",
        key="log_throughput_interval",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        kinds.COLLECTOR,
        "collector of OpenTelemetry traces, over HTTP; nothing: there are none",
        key="option.otlp_traces_endpoint",
        env=("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        own_kinds={"OTEL_EXPORTER_OTLP_ENDPOINT": kinds.COLLECTOR_BASE},
        is_for_operator=True,
    )
    batch_transform: ClassVar = Option(
        None,
        kinds.BOOLEAN,
        "the server runs for a batch transform, where max_queue_wait may be over 60",
        platform=("SAGEMAKER_BATCH",),
        has_flag=False,
    )
    multi_model: bool = option(
        False, kinds.BOOLEAN, "start without a model; POST /models loads one", platform=("SAGEMAKER_MULTI_MODEL",)
    )
    max_models: int = option(64, integer(1, 10_000), "models that are loaded at once with multi_model")
    model_store: str = option(
        "/opt/ml/models", kinds.ABSOLUTE_PATH, "folder that models of multi_model must be in", is_for_operator=True
    )
    reserved_memory_mb: int = option(
        500, integer(0), "megabytes of memory that a further model of multi_model must leave free"
    )
    secure_mode: bool = option(
        False,
        kinds.BOOLEAN,
        "refuse what security_controls name, and every option and path that is not known to be safe",
        platform=("SAGEMAKER_SECURE_MODE",),
        is_for_operator=True,
    )
    security_controls: tuple[str, ...] = option(
        (),
        kinds.TEXTS,
        "what secure_mode refuses, as in DISALLOW_PICKLE_FILES,DISALLOW_CHAT_TEMPLATE",
        platform=("SAGEMAKER_SECURITY_CONTROLS",),
        is_for_operator=True,
    )
    untrusted_channels: tuple[str, ...] = option(
        (),
        kinds.TEXTS,
        "folders in which secure_mode looks for pickles and chat templates, with , between; nothing: the model's",
        platform=("SAGEMAKER_UNTRUSTED_CHANNELS",),
        is_for_operator=True,
    )
    download_dir: str = option(
        "",
        kinds.TEXT,
        "folder for models from S3 and for what requirements.txt installs; nothing: lmi/models in the user's cache",
        is_for_operator=True,
    )
    model_flags: dict[str, str] = field(default_factory=dict)  # of the command line, by key, for each of several models

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"
