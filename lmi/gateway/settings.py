"""The settings of the gateway, each of which a flag of `lmi gateway` gives."""

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

import click

from lmi.gateway.container import Container
from lmi.gateway.eventstream import AsIs, Parts, parse_parts
from lmi.gateway.members import ENDPOINT_NAME
from lmi.gateway.named_endpoints import ANY
from lmi.gateway.stores import S3_SCHEME, parse_s3
from lmi.settings.option import docstrings

SECONDS = click.FloatRange(min=0, min_open=True)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def _named(text: str) -> str:
    if ENDPOINT_NAME.broken_rule(text):
        raise ValueError(
            f"needs a name of letters, digits and inner hyphens, at most 63, given {text or 'none'}"
        )

    return text


def _endpoint(text: str) -> tuple[str, str]:
    """Read `[NAME=]URL`."""
    name, _, url = text.rpartition("=")
    endpoint = _named(name) if name else ANY
    return endpoint, Container(url).url


def _component(text: str) -> tuple[tuple[str, str], str]:
    """Read `[NAME/]IC[=ADAPTER]`."""
    path, _, adapter = text.partition("=")
    endpoint, _, component = path.rpartition("/")
    endpoint_name = _named(endpoint) if endpoint else ANY
    return (endpoint_name, _named(component)), adapter


def _models(text: str) -> tuple[str, str]:
    """Read `[NAME=]SOURCE`. A folder whose path has an equals sign needs NAME=, or ./ before it."""
    name, equals, source = text.partition("=")
    if not equals or ENDPOINT_NAME.broken_rule(name):
        name = ANY
        source = text

    return name, _place(source)


def _place(text: str) -> str:
    """Read a folder, or the URL of a bucket or of a prefix in it."""
    if text.startswith(S3_SCHEME) and parse_s3(text)[0]:
        return text

    if not text or "://" in text:
        raise ValueError(f"must be a folder or s3://BUCKET[/PREFIX], given {text or 'nothing'}")

    return str(Path(text).absolute())


def _bucket(text: str) -> tuple[str, str]:
    """Read `NAME[=FOLDER]`."""
    name, _, folder = text.partition("=")
    if not re.fullmatch("[a-z0-9][a-z0-9.-]{1,62}", name):
        raise ValueError(f"needs the name of a bucket, given {name or 'none'}")

    return name, str(Path(folder).absolute()) if folder else ""


def _folder(text: str) -> Path:
    if Path(text).is_file():
        raise ValueError(f"must be a folder, given {text}")

    return Path(text).absolute()


def _collect(
    context: click.Context, param: click.Parameter, pairs: tuple[tuple[object, object], ...]
) -> Any:
    """Return the pairs of a repeated flag. Raises click.UsageError for a key that has
    two values.
    """
    values: dict[object, object] = {}
    for key, value in pairs:
        if values.setdefault(key, value) != value:
            raise click.UsageError(f"{param.opts[0]} {value} contradicts another {param.opts[0]}.")

    return values or None


def _flag(
    default: Any, parse: Callable[[str], object] | None = None, name: str = "", **more: Any
) -> Any:
    """Return a setting that a flag gives. `parse` raises ValueError with the rule, and `more` goes
    to click.

    Without `name` the flag has that of the field, without its unit. Its help stands below the
    field.
    """
    metadata = {"name": name, "parse": parse, "more": more}
    return field(default_factory=lambda: default, metadata=metadata)


def _pairs(default: object, name: str, metavar: str, parse: Callable[[str], object]) -> Any:
    return _flag(default, parse, name, metavar=metavar, multiple=True, callback=_collect)


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """What the flags say. Containers, adapters and sources of models are by endpoint, ANY is every
    other name.
    """

    host: str = _flag("127.0.0.1")
    """address to listen on"""
    port: int = _flag(8081, type=click.IntRange(0, 65535))
    """0: any free one"""
    endpoints: Mapping[str, str] = _pairs(
        {ANY: "http://127.0.0.1:8080"}, "--endpoint", "[NAME=]URL", _endpoint
    )
    """a container and its endpoint's name; without NAME: every other name
    [http://127.0.0.1:8080]
    """
    components: Mapping[tuple[str, str], str] = _pairs(
        {}, "--component", "[NAME/]IC[=ADAPTER]", _component
    )
    """an inference component, and the adapter that it is in the container; without any, every
    component is taken
    """
    models: Mapping[str, str] = _pairs({}, "--models", "[NAME=]SOURCE", _models)
    """a folder or s3:// URL of the models that TargetModel names, and their endpoint; without NAME:
    every other
    """
    models_dir: Path = _flag(Path("/opt/ml/models"), _folder, metavar="FOLDER")
    """where these models are stored for the container, its model_store"""
    parts: Parts = _flag(AsIs(), parse_parts, metavar="MODE")
    """how streams are cut: as-is (this is the default), as the container did; coalesce[:MS], all
    that comes within 50 ms; split[:BYTES], every 7 bytes
    """
    max_body_bytes: int = _flag(
        25 << 20, name="--max-body", type=click.IntRange(min=1), metavar="BYTES"
    )
    """the limit of a request body"""
    timeout_s: float = _flag(60.0, type=SECONDS, metavar="S")
    """the limit of a whole answer"""
    stream_timeout_s: float = _flag(480.0, type=SECONDS, metavar="S")
    """the limit of a streamed answer, to its last byte"""
    async_output: str = _flag(
        f"{tempfile.gettempdir()}/lmi-async", _place, metavar="FOLDER or s3://…"
    )
    """where answers of async invocations go"""
    async_input: Path | None = _flag(
        None, type=click.Path(exists=True, file_okay=False, path_type=Path)
    )
    """allows file:// locations below this folder as their input"""
    async_concurrency: int = _flag(4, type=click.IntRange(1, 1000), metavar="NUM")
    """async invocations that run at a time"""
    async_queue: Path | None = _flag(None, _folder, metavar="FOLDER")
    """keeps accepted invocations here until each has its answer, so that the next gateway goes on
    with them [async below --control-dir, without it none]
    """
    async_buckets: Mapping[str, str] = _pairs({}, "--async-bucket", "NAME[=FOLDER]", _bucket)
    """a bucket that S3OutputPath and S3FailurePath may name; with FOLDER: this folder stands for it
    """
    s3_endpoint: str | None = _flag(None, metavar="URL")
    """[AWS_ENDPOINT_URL_S3]"""
    checks_signatures: bool = _flag(False, name="--check-signatures", is_flag=True)
    """refuse requests not signed with the credentials here"""
    control_dir: Path | None = _flag(None, _folder, metavar="FOLDER")
    """lets clients create models and endpoints, whose containers are lmi serve processes; its state
    and logs are kept here
    """
    buckets: Mapping[str, str] = _pairs({}, "--bucket", "NAME[=FOLDER]", _bucket)
    """a bucket that models of --control-dir may come from; with FOLDER: this folder stands for it
    """
    images: Sequence[str] = _flag((), name="--image", metavar="PATTERN", multiple=True)
    """images that these models may name, * stands for anything; without any: all. Each is lmi serve
    """
    trusts_models: bool = _flag(False, name="--trust-models", is_flag=True)
    """run these containers outside of secure mode and with every variable: their code is run as you
    """
    max_containers: int = _flag(8, type=click.IntRange(1, 1000), metavar="NUM")
    """the limit of these containers"""
    http2_port: int | None = _flag(None, type=click.IntRange(0, 65535))
    """serves streams in both directions here, over HTTP/2, as AWS does on port 8443; without TLS
    its clients begin with HTTP/2; 0: any free one
    """
    ssl_certfile: Path | None = _flag(None, type=_FILE, metavar="FILE")
    """certificate of --http2-port and those that signed it, in PEM; AWS's clients need one"""
    ssl_keyfile: Path | None = _flag(None, type=_FILE, metavar="FILE")
    """its key, without a password; without it: it is in --ssl-certfile"""
    log_level: str = _flag(
        "INFO", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False)
    )
    log_format: str = _flag("auto", type=click.Choice(["auto", "text", "json"]))


def settings(**flags: Any) -> GatewaySettings:
    """Return the settings that the flags give. A flag that is not given is None. Raises
    click.UsageError.
    """
    values = {name: value for name, value in flags.items() if value is not None}
    gateway_settings = GatewaySettings(**values)
    for source in gateway_settings.models.values():
        if not source.startswith(S3_SCHEME) and not Path(source).is_dir():
            raise click.UsageError(
                f"--models must name a folder that exists or s3://BUCKET[/PREFIX], given {source}"
            )

    _check_buckets("--bucket", gateway_settings.buckets)
    _check_buckets("--async-bucket", gateway_settings.async_buckets)
    endpoints_of_flags = ("endpoints", "components", "models")
    if gateway_settings.control_dir is not None and values.keys() & set(endpoints_of_flags):
        raise click.UsageError(
            "--control-dir goes without --endpoint, --component and --models: its clients create "
            "endpoints"
        )

    _check_tls(gateway_settings)
    return gateway_settings


def _check_tls(gateway_settings: GatewaySettings) -> None:
    """Raise click.UsageError for a part of TLS without what it is for."""
    if gateway_settings.ssl_certfile is not None and gateway_settings.http2_port is None:
        raise click.UsageError("--ssl-certfile is for --http2-port, which is missing")

    if gateway_settings.ssl_keyfile is not None and gateway_settings.ssl_certfile is None:
        raise click.UsageError("--ssl-keyfile is for --ssl-certfile, which is missing")


def _check_buckets(flag: str, buckets: Mapping[str, str]) -> None:
    """Raise click.UsageError for a folder that is not there."""
    for folder in buckets.values():
        if folder and not Path(folder).is_dir():
            raise click.UsageError(f"{flag} must name a folder that exists, given {folder}")


def _option(setting: Field[Any], default: object) -> click.Option:
    name = setting.metadata["name"] or "--" + setting.name.removesuffix("_s").replace("_", "-")
    parse = setting.metadata["parse"]

    def read(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise click.UsageError(f"{name} {error}") from None

    attributes = dict(setting.metadata["more"])
    if parse:
        attributes["type"] = read

    help = docstrings(__name__).get((GatewaySettings.__name__, setting.name), "")
    if isinstance(default, str | int | float | Path) and default is not False:
        help = f"{help} [{default}]"

    return click.Option([name, setting.name], help=help, **attributes)


def options() -> list[click.Parameter]:
    """Return the flags of `lmi gateway`."""
    defaults = GatewaySettings()
    return [_option(setting, getattr(defaults, setting.name)) for setting in fields(defaults)]
