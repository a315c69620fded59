"""What the flags of `lmi gateway` say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lmi.gateway.parts import AsIs, Parts

ANY = ""  # in place of an endpoint's name


@dataclass(frozen=True, kw_only=True)
class Settings:
    host: str = "127.0.0.1"
    port: int = 8081
    endpoints: Mapping[str, str] = field(default_factory=lambda: {ANY: "http://127.0.0.1:8080"})  # URLs of containers
    components: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """The adapter, "" for none, by endpoint and inference component. Without any, every component is taken."""
    parts: Parts = AsIs()
    max_body_bytes: int = 25 << 20
    timeout_s: float = 60.0
    stream_timeout_s: float = 480.0
    checks_signatures: bool = False
    log_level: str = "INFO"
    log_format: str = "auto"
