"""The command `lmi gateway`: its flags, and what they say as settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from lmi.gateway.container import Container
from lmi.gateway.members import ENDPOINT_NAME
from lmi.gateway.parts import parse as parse_parts
from lmi.gateway.settings import ANY, Settings
from lmi.gateway.stores import S3_SCHEME, parse_s3

DEFAULTS = Settings()
Key = TypeVar("Key")
Value = TypeVar("Value")
SECONDS = click.FloatRange(min=0, min_open=True)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
LOG_LEVELS = click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--host", default=DEFAULTS.host, show_default=True, help="address to listen on")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULTS.port, show_default=True, help="0: any free one")
@click.option(
    "--endpoint",
    "endpoints",
    metavar="[NAME=]URL",
    multiple=True,
    help="a container and its endpoint's name; without NAME: every other name [http://127.0.0.1:8080]",
)
@click.option(
    "--component",
    "components",
    metavar="[NAME/]IC[=ADAPTER]",
    multiple=True,
    help="an inference component, and the adapter that it is in the container",
)
@click.option(
    "--models",
    metavar="[NAME=]SOURCE",
    multiple=True,
    help="a folder or s3:// URL of the models that TargetModel names, and their endpoint; without NAME: every other",
)
@click.option(
    "--models-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULTS.models_dir,
    show_default=True,
    help="where these models are laid out for the container, its model_store",
)
@click.option(
    "--parts",
    default="as-is",
    show_default=True,
    metavar="MODE",
    help="how streams are cut: as-is, as the container did; coalesce[:MS], all that comes within 50 ms; "
    "split[:BYTES], every 7 bytes",
)
@click.option(
    "--max-body",
    type=click.IntRange(min=1),
    default=DEFAULTS.max_body_bytes,
    show_default=True,
    metavar="BYTES",
    help="the limit of a request body",
)
@click.option(
    "--timeout",
    type=SECONDS,
    default=DEFAULTS.timeout_s,
    show_default=True,
    metavar="S",
    help="the limit of a whole answer",
)
@click.option(
    "--stream-timeout",
    type=SECONDS,
    default=DEFAULTS.stream_timeout_s,
    show_default=True,
    metavar="S",
    help="the limit of a streamed answer, to its last byte",
)
@click.option(
    "--async-output",
    default=DEFAULTS.async_output,
    metavar="FOLDER or s3://…",
    help=f"where answers of async invocations go [{DEFAULTS.async_output}]",
)
@click.option("--async-input", type=FOLDER, help="allows file:// locations below this folder as their input")
@click.option(
    "--async-concurrency",
    type=click.IntRange(1, 1000),
    default=DEFAULTS.async_concurrency,
    show_default=True,
    metavar="NUM",
    help="async invocations that run at a time",
)
@click.option("--s3-endpoint", metavar="URL", help="[AWS_ENDPOINT_URL_S3]")
@click.option("--check-signatures", is_flag=True, help="refuse requests not signed with the credentials here")
@click.option("--log-level", type=LOG_LEVELS, default=DEFAULTS.log_level)
@click.option("--log-format", type=click.Choice(["auto", "text", "json"]), default=DEFAULTS.log_format)
def gateway(**flags: Any) -> int:
    """Answer AWS's SageMaker API on this machine, in front of containers: for tests and laptops."""
    from lmi.gateway.worker import run

    return run(settings(**flags))


def settings(
    host: str,
    port: int,
    endpoints: tuple[str, ...],
    components: tuple[str, ...],
    models: tuple[str, ...],
    models_dir: Path,
    parts: str,
    max_body: int,
    timeout: float,
    stream_timeout: float,
    async_output: str,
    async_input: Path | None,
    async_concurrency: int,
    s3_endpoint: str | None,
    check_signatures: bool,
    log_level: str,
    log_format: str,
) -> Settings:
    """Return the settings that the flags give. Raises click.UsageError."""
    return Settings(
        host=host,
        port=port,
        endpoints=_collect("--endpoint", endpoints, _endpoint) or DEFAULTS.endpoints,
        components=_collect("--component", components, _component),
        models=_collect("--models", models, _models),
        models_dir=models_dir.absolute(),
        parts=_parse("--parts", parts, parse_parts),
        max_body_bytes=max_body,
        timeout_s=timeout,
        stream_timeout_s=stream_timeout,
        async_output=_parse("--async-output", async_output, _place),
        async_input=async_input,
        async_concurrency=async_concurrency,
        s3_endpoint=s3_endpoint,
        checks_signatures=check_signatures,
        log_level=log_level,
        log_format=log_format,
    )


def _collect(flag: str, texts: tuple[str, ...], parse: Callable[[str], tuple[Key, Value]]) -> dict[Key, Value]:
    """Return the pairs that a repeated flag gives. Raises click.UsageError for a key that comes twice."""
    found: dict[Key, Value] = {}
    for text in texts:
        key, value = _parse(flag, text, parse)
        if found.setdefault(key, value) != value:
            raise click.UsageError(f"{flag} {text} contradicts another {flag}.")
    return found


def _parse(flag: str, text: str, parse: Callable[[str], Value]) -> Value:
    try:
        return parse(text)
    except ValueError as error:
        raise click.UsageError(f"{flag} {error}") from None


def _endpoint(text: str) -> tuple[str, str]:
    """Read `[NAME=]URL`."""
    name, _, url = text.rpartition("=")
    return _name(name) if name else ANY, Container(url).url


def _component(text: str) -> tuple[tuple[str, str], str]:
    """Read `[NAME/]IC[=ADAPTER]`."""
    where, _, adapter = text.partition("=")
    endpoint, _, component = where.rpartition("/")
    return (_name(endpoint) if endpoint else ANY, _name(component)), adapter


def _models(text: str) -> tuple[str, str]:
    """Read `[NAME=]SOURCE`. A folder whose path has an equals sign needs NAME=, or ./ before it."""
    name, equals, source = text.partition("=")
    if not equals or not ENDPOINT_NAME.takes(name):
        name, source = ANY, text
    place = _place(source)
    if not place.startswith(S3_SCHEME) and not Path(place).is_dir():
        raise ValueError(f"must name a folder that exists or s3://BUCKET[/PREFIX], given {text}")
    return name, place


def _place(text: str) -> str:
    """Read a folder, or the URL of a bucket or of a prefix in it."""
    if text.startswith(S3_SCHEME):
        if not parse_s3(text)[0]:
            raise ValueError(f"must be a folder or s3://BUCKET[/PREFIX], given {text}")
        return text
    if not text or "://" in text:
        raise ValueError(f"must be a folder or s3://BUCKET[/PREFIX], given {text or 'nothing'}")
    return str(Path(text).absolute())


def _name(text: str) -> str:
    if not ENDPOINT_NAME.takes(text):
        raise ValueError(f"needs a name of letters, digits and inner hyphens, at most 63, given {text or 'none'}")
    return text
