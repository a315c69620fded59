"""The settings of a server: its front ends, its supervisor, and what all its models share."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass, field
from typing import ClassVar
from urllib.parse import urlsplit

from lmi.settings import annexes
from lmi.settings.kinds import ABSOLUTE_PATH, SIZE, WORDS, Kind, choice, integer, matching, word
from lmi.settings.option import option

GATEWAY_PORT = 8081


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


def _address(text: str) -> tuple[str, int]:
    parts = urlsplit(text)
    if parts.scheme != "http" or not parts.hostname or not parts.port or parts.path not in ("", "/"):
        raise ValueError
    return parts.hostname, parts.port


def _port_range(first: str, last: str) -> tuple[int, int]:
    if not 1 <= int(first) <= int(last) <= 65535:
        raise ValueError
    return int(first), int(last)


PORT = integer(1, 65535)
ADDRESS = Kind("http://HOST:PORT", _address)
GATEWAY = Kind(
    f"a port 1..65535, true (port {GATEWAY_PORT}) or false",
    word({each: GATEWAY_PORT if means else None for each, means in WORDS.items() if each.isalpha()}, PORT.parse),
    unit="[PORT]",
)
PORT_RANGE = matching("FIRST-LAST, two ports", r"([0-9]{1,5})-([0-9]{1,5})", _port_range, "FIRST-LAST")
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
class ServerConfig(
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
    """Settings of the front ends and the supervisor: those here, then those of the bases in their order."""

    host: str = option("127.0.0.1", matching("a host name or address", r"[A-Za-z0-9.:_-]{1,253}"))
    """address to listen on; nothing: this machine only, in a container every address"""
    port: int = option(
        8080, integer(0, 65535), names="SAGEMAKER_BIND_TO_PORT", own_kinds={"SAGEMAKER_BIND_TO_PORT": PORT}
    )
    """port; 0: any free one"""
    management_port: int | None = option(None, PORT)
    """port of metrics, docs and the routes that change models and adapters; `port` answers them 404 then"""
    inference_address: ClassVar = option(None, ADDRESS)
    """host and port in one"""
    gateway_port: int | None = option(None, GATEWAY, key="with_gateway")
    """port on loopback for AWS's SageMaker API in front of the server; without PORT: 8081"""
    ssl_certfile: str | None = option(None, ABSOLUTE_PATH, is_path=True)
    """file with this server's certificate and those that signed it, in PEM; the port speaks HTTPS then"""
    ssl_keyfile: str | None = option(None, ABSOLUTE_PATH, is_path=True)
    """file with the certificate's key, without a password; nothing: ssl_certfile has it too"""
    user: User | None = option(
        None,
        Kind("a user that this machine knows, UID or UID:GID, and not root", User.of),
        key="option.user",
        is_for_operator=True,
    )
    """user that front ends, the gateway and user code run as where root starts the server; nothing: the same user"""
    safe_port_range: tuple[int, int] | None = option(None, PORT_RANGE, names="SAGEMAKER_SAFE_PORT_RANGE")
    """ports for every listener beside the server's own port, such as an engine's rendezvous"""
    frontend_workers: int = option(1, integer(1, 256))
    """front-end processes"""
    job_queue_size: int = option(1000, names="MAX_CONCURRENT_REQUESTS")
    """waiting sequences of the model; more are answered 503"""
    model_flags: dict[str, str] = field(default_factory=dict)  # of the command line, by key, for each of several models

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"
