"""The command `lmi`, and the commands `serve` and `djl-serving` with which container platforms start an image.

Every flag of `lmi serve` and `lmi config` is a row of the table of options. A start that fails prints each fault on one
line of stderr, then one JSON object if stderr is not a terminal, and ends with the exit code of its error.
"""

from __future__ import annotations

import difflib
import functools
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import click
import orjson

from lmi import __version__
from lmi.errors import StartError
from lmi.settings.handler import announced
from lmi.settings.kinds import BOOLEAN, MODELS
from lmi.settings.option import Option
from lmi.settings.options import OPTIONS, elsewhere, known_keys
from lmi.settings.resolve import resolve_folder
from lmi.settings.values import Setting
from lmi.shared import log, sink

REPORTED_LIBRARIES = ("torch", "transformers", "tokenizers", "gunicorn", "uvicorn", "starlette")
FLAGGED = {"option_" + option.flag[2:].replace("-", "_"): option for option in OPTIONS if option.has_flag}
Command = Callable[..., Any]
ABOUT = ("-h", "--help", "--version")  # flags of `lmi` itself
WITH_GATEWAY, GATEWAY_VALUE = "--with-gateway", re.compile("[0-9]+|true|false")
NEAR = 0.83  # a ratio of difflib: --prot is a slip for --port, --workers is not one for --min-workers


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script `lmi`. In a container it is the entry point, so the first word may be `lmi` too."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run(words[1:] if words[:1] == ["lmi"] else words))


def serve_main() -> None:
    """The console script `serve`, which SageMaker starts."""
    words = sys.argv[1:]
    sys.exit(run(words if words[:1] == ["serve"] else ["serve", *words]))


def djl_serving_main() -> None:
    """The console script `djl-serving`, which LMI's images start."""
    sys.exit(run(["djl-serving", *sys.argv[1:]]))


def run(arguments: list[str]) -> int:
    """Run one command. Returns the exit code."""
    sink.open_missing()
    try:
        return lmi.main(_with_command(_with_values(arguments)), "lmi", standalone_mode=False) or 0
    except click.NoSuchOption as error:
        where = error.ctx.command_path if error.ctx else "lmi"
        click.echo(f"{where}: {_unknown(error.option_name)} See {where} --help.", err=True)
        return error.exit_code
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "lmi"
        said = " ".join(error.format_message().split()).rstrip(".")
        click.echo(f"{where}: {said}. See {where} --help.", err=True)
        return error.exit_code
    except click.Abort:
        return 130
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except StartError as error:
        return _fail(error)


def _with_values(arguments: list[str]) -> list[str]:
    """Return the arguments with a value for the flag that may have none, unless the next word is its value."""
    return [
        f"{WITH_GATEWAY}=true" if word == WITH_GATEWAY and not GATEWAY_VALUE.fullmatch(after) else word
        for word, after in zip_longest(arguments, arguments[1:], fillvalue="")
    ]


def _with_command(arguments: list[str]) -> list[str]:
    """Return the arguments with `serve` before them if they begin with no command, as where there are none at all.

    Platforms start a container without a word, or with flags alone. Raises UsageError for an unknown word.
    """
    first = arguments[0] if arguments else "-"
    if first in ABOUT or first in lmi.commands:
        return arguments
    if first.startswith("-"):
        return ["serve", *arguments]
    words = ", ".join(lmi.commands)
    raise click.UsageError(f"No such command {log.escape(first)}. Commands are {words}; no command means serve.")


def _unknown(flag: str) -> str:
    """Return the message about an unknown flag, with a hint at an option's key or at a flag of nearly that name."""
    if elsewhere(flag):
        return f"{flag}: {elsewhere(flag)}."
    key = flag.removeprefix("--").replace("-", "_")
    known = {*known_keys(), *(name for handler in announced().values() for name in handler.option_keys() or ())}
    named = [name for name in (key, f"option.{key}") if name in known]
    if named:
        return f"{flag} is not a flag, say --set {named[0]}=VALUE."
    flags = [flag for option in FLAGGED.values() for flag in option.flags]
    near = difflib.get_close_matches(flag, [*flags, "--model-dir", "--set", "--json"], 1, NEAR)
    return f"No such option {flag}." + (f" Did you mean {near[0]}?" if near else "")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="lmi %(version)s")
def lmi() -> None:
    """Serve a large language model behind the contracts that its clients already speak."""


def _with_options(command: Command) -> Command:
    """Add DIR and a flag for each option to a command, which receives them as `folder` and `flags`."""

    @functools.wraps(command)
    def collected(folder: str | None, model_dir: str | None, settings: tuple[str, ...], **others: Any) -> Any:
        if folder and model_dir and folder != model_dir:
            raise click.UsageError(f"DIR is {folder} and --model-dir is {model_dir}.")
        flags = {option.key: _text(others.pop(name)) for name, option in FLAGGED.items()}
        given = {key: text for key, text in flags.items() if text is not None}
        for key, text in map(_pair, settings):
            if given.setdefault(key, text) != text:
                raise click.UsageError(f"{key} is given as {given[key]} and as {text}.")
        return command(folder=folder or model_dir, flags=given, **others)

    wrapped: Command = collected
    for name, option in reversed(FLAGGED.items()):
        wrapped = _flag(name, option)(wrapped)
    wrapped = click.option(
        "--set", "settings", multiple=True, metavar="KEY=VALUE", help="any key of serving.properties"
    )(wrapped)
    wrapped = click.option("--model-dir", metavar="DIR", help="the same as DIR")(wrapped)
    wrapped = click.argument("folder", required=False, metavar="[DIR]")(wrapped)
    return wrapped


def _flag(name: str, option: Option) -> Command:
    help = f"{option.help} [{option.key}]"
    if option.kind is BOOLEAN:
        return click.option(f"{option.flag}/--no-{option.flag[2:]}", name, default=None, help=help)
    metavar = "[PORT]" if option.flag == WITH_GATEWAY else "VALUE"
    return click.option(*option.flags, name, metavar=metavar, multiple=option.kind is MODELS, help=help)


def _text(value: bool | str | tuple[str, ...] | None) -> str | None:
    if isinstance(value, tuple):
        return ",".join(value) or None
    return str(value).lower() if isinstance(value, bool) else value


def _pair(setting: str) -> tuple[str, str]:
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise click.UsageError(f"--set takes KEY=VALUE, given {setting}.")
    return key.strip(), text.strip()


@lmi.command()
@_with_options
def serve(folder: str | None, flags: dict[str, str]) -> int:
    """Serve the model in DIR.

    DIR is a folder with serving.properties or config.json, OWNER/NAME of a hub, s3://BUCKET/PREFIX, or demo.
    Without DIR: /opt/ml/model when it holds something, else the current folder when it has one of these files, else the
    built-in demo model.
    """
    return _serve(folder, flags)


@lmi.command("djl-serving")
@click.option("-s", "--model-store", "folder", metavar="DIR", help="folder of the model")
@click.option("-m", "--models", multiple=True, metavar="NAME=PATH", help="folder and name of the model")
def djl_serving(folder: str | None, models: tuple[str, ...]) -> int:
    """Serve as the LMI container's own start command does."""
    named = _text(models)
    return _serve(folder, {"load_models": named} if named else {})


@lmi.command()
@_with_options
@click.option("--json", "is_json", is_flag=True, help="one JSON object")
def config(folder: str | None, flags: dict[str, str], is_json: bool) -> None:
    """Show every option, its value and where it came from.

    It shows what each value shadows too, and starts nothing.
    """
    resolved = resolve_folder(folder, os.environ, flags)
    if is_json:
        rows = [
            {"option": row.option, "value": row.value, "source": row.source, "shadowed": row.shadowed}
            for row in resolved.settings
        ]
        document = {"options": rows, "warnings": resolved.warnings, "notes": resolved.notes}
        click.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
        return
    click.echo("\n".join(_table(resolved.settings)))
    for warning in resolved.warnings:
        click.echo(f"warning: {log.escape(warning)}", err=True)


@lmi.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def gateway(words: tuple[str, ...]) -> int:
    """Answer AWS's SageMaker API in front of a server."""
    from lmi.gateway.command import gateway

    code: int = gateway.main(words, "lmi gateway", standalone_mode=False)
    return code


@lmi.command("version")
def show_version() -> None:
    """Show the versions of lmi and of what it runs on."""
    click.echo(f"lmi {__version__}")
    click.echo(f"python {platform.python_version()}")
    handlers = announced()
    for name in (*REPORTED_LIBRARIES, *(one for handler in handlers.values() for one in handler.distributions)):
        click.echo(f"{name} {_version_of(name)}")
    for name, handler in handlers.items():
        if about := handler.describe():
            click.echo(f"{name} {about}")


def _version_of(distribution: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _serve(folder: str | None, flags: dict[str, str]) -> int:
    from lmi.supervisor import stages, supervisor

    sink.never_wait()
    resolved = resolve_folder(folder, os.environ, flags)
    server = resolved.config.server
    log.setup("supervisor", server.log_level, server.log_format)
    if resolved.request is None:
        stages.say(resolved)
    return supervisor.run(resolved, lambda fetched: resolve_folder(folder, os.environ, flags, fetched=fetched))


def _table(settings: Sequence[Setting]) -> list[str]:
    """Return the settings as lines with aligned columns. The last column is not padded."""
    heads = ("option", "value", "source", "shadowed")
    rows = [heads, *((row.option, row.value or "-", row.source, ", ".join(row.shadowed)) for row in settings)]
    cells = [tuple(log.escape(cell) for cell in row) for row in rows]
    widths = [min(60, max(len(row[column]) for row in cells)) for column in range(3)]
    return ["  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]).rstrip() for row in cells]


def _fail(error: StartError) -> int:
    """Print why a start failed: each fault on one line, before the JSON object. Returns the exit code."""
    from lmi.supervisor.banner import Failure, say_failed

    if not log.is_text("auto"):
        for line in str(error).split("\n"):
            click.echo(f"lmi: {log.escape(line)}", err=True)
    say_failed(Failure.of(error, "configuration"), "auto")
    return error.exit_code
