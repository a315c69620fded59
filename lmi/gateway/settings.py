"""What the flags of `lmi gateway` say."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lmi.gateway.parts import AsIs, Parts

ANY = ""  # in place of an endpoint's name


@dataclass(frozen=True, kw_only=True)
class Settings:
    host: str = "127.0.0.1"
    port: int = 8081
    endpoints: Mapping[str, str] = field(default_factory=lambda: {ANY: "http://127.0.0.1:8080"})  # URLs of containers
    components: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """The adapter, "" for none, by endpoint and inference component. Without any, every component is taken."""
    models: Mapping[str, str] = field(default_factory=dict)  # sources of multi-model endpoints, by endpoint
    models_dir: Path = Path("/opt/ml/models")  # where the containers see them
    parts: Parts = AsIs()
    max_body_bytes: int = 25 << 20
    timeout_s: float = 60.0
    stream_timeout_s: float = 480.0
    async_output: str = field(default_factory=lambda: f"{tempfile.gettempdir()}/lmi-async")  # a folder or s3:// URL
    async_input: Path | None = None
    async_concurrency: int = 4
    s3_endpoint: str | None = None  # boto3 finds its own
    checks_signatures: bool = False
    log_level: str = "INFO"
    log_format: str = "auto"
