"""The command `lmi gateway`: its settings, each of which a flag gives."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import click

from lmi.gateway.container import Container
from lmi.gateway.endpoints import ANY
from lmi.gateway.eventstream import AsIs, Parts, parse_parts
from lmi.gateway.exchange import ENDPOINT_NAME
from lmi.gateway.stores import S3_SCHEME, parse_s3

SECONDS = click.FloatRange(min=0, min_open=True)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
LOG_LEVELS = click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False)


def _named(text: str) -> str:
    if not ENDPOINT_NAME.takes(text):
        raise ValueError(f"needs a name of letters, digits and inner hyphens, at most 63, given {text or 'none'}")
    return text


def _endpoint(text: str) -> tuple[str, str]:
    """Read `[NAME=]URL`."""
    name, _, url = text.rpartition("=")
    return _named(name) if name else ANY, Container(url).url


def _component(text: str) -> tuple[tuple[str, str], str]:
    """Read `[NAME/]IC[=ADAPTER]`."""
    where, _, adapter = text.partition("=")
    endpoint, _, component = where.rpartition("/")
    return (_named(endpoint) if endpoint else ANY, _named(component)), adapter


def _models(text: str) -> tuple[str, str]:
    """Read `[NAME=]SOURCE`. A folder whose path has an equals sign needs NAME=, or ./ before it."""
    name, equals, source = text.partition("=")
    if not equals or not ENDPOINT_NAME.takes(name):
        name, source = ANY, text
    return name, _place(source)


def _place(text: str) -> str:
    """Read a folder, or the URL of a bucket or of a prefix in it."""
    if text.startswith(S3_SCHEME) and parse_s3(text)[0]:
        return text
    if not text or "://" in text:
        raise ValueError(f"must be a folder or s3://BUCKET[/PREFIX], given {text or 'nothing'}")
    return str(Path(text).absolute())


def _folder(text: str) -> Path:
    if Path(text).is_file():
        raise ValueError(f"must be a folder, given {text}")
    return Path(text).absolute()


def _collect(context: click.Context, param: click.Parameter, pairs: tuple[tuple[object, object], ...]) -> Any:
    """Return the pairs of a repeated flag. Raises click.UsageError for a key that has two values."""
    found: dict[object, object] = {}
    for key, value in pairs:
        if found.setdefault(key, value) != value:
            raise click.UsageError(f"{param.opts[0]} {value} contradicts another {param.opts[0]}.")
    return found or None


def _flag(name: str, default: object, help: str = "", parse: Callable[[str], object] | None = None, **more: Any) -> Any:
    """Return a setting that a flag gives. `parse` raises ValueError with the rule, and `more` goes to click."""
    is_plain = isinstance(default, str | int | float | Path) and default is not False
    more["help"] = f"{help} [{default}]" if is_plain else help

    def read(text: str) -> object:
        assert parse is not None
        try:
            return parse(text)
        except ValueError as error:
            raise click.UsageError(f"{name} {error}") from None

    more |= {} if parse is None else {"type": read}
    return field(default_factory=lambda: default, metadata={"name": name, "more": more})


def _pairs(name: str, default: object, help: str, metavar: str, parse: Callable[[str], object]) -> Any:
    return _flag(name, default, help, metavar=metavar, parse=parse, multiple=True, callback=_collect)


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """What the flags say. Containers, adapters and sources of models are by endpoint, ANY is every other name."""

    host: str = _flag("--host", "127.0.0.1", "address to listen on")
    port: int = _flag("--port", 8081, "0: any free one", type=click.IntRange(0, 65535))
    endpoints: Mapping[str, str] = _pairs(
        "--endpoint",
        {ANY: "http://127.0.0.1:8080"},
        "a container and its endpoint's name; without NAME: every other name [http://127.0.0.1:8080]",
        "[NAME=]URL",
        _endpoint,
    )
    components: Mapping[tuple[str, str], str] = _pairs(
        "--component",
        {},
        "an inference component, and the adapter that it is in the container; without any, every component is taken",
        "[NAME/]IC[=ADAPTER]",
        _component,
    )
    models: Mapping[str, str] = _pairs(
        "--models",
        {},
        "a folder or s3:// URL of the models that TargetModel names, and their endpoint; without NAME: every other",
        "[NAME=]SOURCE",
        _models,
    )
    models_dir: Path = _flag(
        "--models-dir",
        Path("/opt/ml/models"),
        "where these models are stored for the container, its model_store",
        parse=_folder,
        metavar="FOLDER",
    )
    parts: Parts = _flag(
        "--parts",
        AsIs(),
        "how streams are cut: as-is (this is the default), as the container did; coalesce[:MS], all that comes within "
        "50 ms; split[:BYTES], every 7 bytes",
        parse=parse_parts,
        metavar="MODE",
    )
    max_body_bytes: int = _flag(
        "--max-body", 25 << 20, "the limit of a request body", type=click.IntRange(min=1), metavar="BYTES"
    )
    timeout_s: float = _flag("--timeout", 60.0, "the limit of a whole answer", type=SECONDS, metavar="S")
    stream_timeout_s: float = _flag(
        "--stream-timeout", 480.0, "the limit of a streamed answer, to its last byte", type=SECONDS, metavar="S"
    )
    async_output: str = _flag(
        "--async-output",
        f"{tempfile.gettempdir()}/lmi-async",
        "where answers of async invocations go",
        parse=_place,
        metavar="FOLDER or s3://…",
    )
    async_input: Path | None = _flag(
        "--async-input", None, "allows file:// locations below this folder as their input", type=FOLDER
    )
    async_concurrency: int = _flag(
        "--async-concurrency", 4, "async invocations that run at a time", type=click.IntRange(1, 1000), metavar="NUM"
    )
    s3_endpoint: str | None = _flag("--s3-endpoint", None, "[AWS_ENDPOINT_URL_S3]", metavar="URL")
    checks_signatures: bool = _flag(
        "--check-signatures", False, "refuse requests not signed with the credentials here", is_flag=True
    )
    log_level: str = _flag("--log-level", "INFO", type=LOG_LEVELS)
    log_format: str = _flag("--log-format", "auto", type=click.Choice(["auto", "text", "json"]))


def settings(**flags: Any) -> GatewaySettings:
    """Return the settings that the flags give. A flag that is not given is None. Raises click.UsageError."""
    found = GatewaySettings(**{name: value for name, value in flags.items() if value is not None})
    for source in found.models.values():
        if not source.startswith(S3_SCHEME) and not Path(source).is_dir():
            raise click.UsageError(f"--models must name a folder that exists or s3://BUCKET[/PREFIX], given {source}")
    return found


@click.command(
    params=[click.Option([one.metadata["name"], one.name], **one.metadata["more"]) for one in fields(GatewaySettings)],
    context_settings={"help_option_names": ["-h", "--help"]},
)
def gateway(**flags: Any) -> int:
    """Answer AWS's SageMaker API on this machine, in front of containers: for tests and laptops."""
    from lmi.gateway.worker import run

    return run(settings(**flags))
