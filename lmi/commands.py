"""The commands beside `serve`: some show something, some ask a server. Each imports what it needs
when it runs.
"""

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from contextlib import closing, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import msgspec
import orjson

from lmi import __version__
from lmi.flags import OptionsCommand
from lmi.model_commands import list_models, pull, rm
from lmi.settings.handler import announced
from lmi.settings.resolve import resolve_folder
from lmi.settings.shown import Setting
from lmi.shared import log, machine

REPORTED_LIBRARIES = ("torch", "transformers", "tokenizers", "gunicorn", "uvicorn", "starlette")


@click.command(cls=OptionsCommand)
@click.option("--json", "is_json", is_flag=True, help="one JSON object")
@click.option(
    "--changed",
    "is_changed",
    is_flag=True,
    help="only options that have another value than their default",
)
def config(
    folder: str | None,
    flags: dict[str, str],
    files: dict[str, str],
    is_json: bool,
    is_changed: bool,
) -> None:
    """Show every option, its value and where it came from.

    It shows what each value shadows too, and starts nothing.
    """
    resolved = resolve_folder(folder, os.environ, flags, files=files)
    rows = [row for row in resolved.settings if row.source != "default" or not is_changed]
    if is_json:
        document = {
            "options": [msgspec.structs.asdict(row) for row in rows],
            "warnings": resolved.warnings,
            "notes": resolved.notes,
        }
        click.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
        return

    click.echo("\n".join(_table(rows)))
    for warning in resolved.warnings:
        click.echo(f"warning: {log.escape(warning)}", err=True)


def _table(settings: Sequence[Setting]) -> list[str]:
    """Return the settings as lines with aligned columns. The last column is not padded."""
    rows = [("option", "value", "source", "shadowed")]
    for setting in settings:
        shadowed = ", ".join(setting.shadowed)
        rows.append((setting.option, setting.value or "-", setting.source, shadowed))

    cells_of_rows = [tuple(map(log.escape, row)) for row in rows]
    widths = []
    for column in range(3):
        longest = max(len(cells[column]) for cells in cells_of_rows)
        widths.append(min(60, longest))

    lines = []
    for *padded_cells, last_cell in cells_of_rows:
        columns = [cell.ljust(width) for cell, width in zip(padded_cells, widths, strict=True)]
        lines.append("  ".join([*columns, last_cell]).rstrip())

    return lines


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def gateway(words: tuple[str, ...]) -> int:
    """Answer AWS's SageMaker API in front of a server."""
    from lmi.gateway.command import gateway

    code: int = gateway.main(words, "lmi gateway", standalone_mode=False)
    return code


def _asking(command: Any) -> Any:
    """Add to a command what says which server to ask."""
    url = click.option(
        "--url",
        default="http://127.0.0.1:8080",
        show_default=True,
        help="server that speaks OpenAI",
    )
    key = click.option(
        "--api-key", envvar="LMI_API_KEY", help="key of the server, else LMI_API_KEY"
    )
    return url(key(command))


def _with_parameters(command: Any) -> Any:
    """Add to a command the parameters of its requests. What is left out is the server's
    to choose.
    """
    temperature = click.option(
        "--temperature", type=float, help="how freely tokens are drawn; 0: never"
    )
    top_p = click.option(
        "--top-p", type=float, help="draw from the likeliest tokens with this probability together"
    )
    seed = click.option("--seed", type=int, help="the same one draws the same tokens again")
    return temperature(top_p(seed(command)))


FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
QUICK = click.option("-q", "--quick", metavar="TEXT", help="answer this and end")
MODEL = click.option(
    "--model", metavar="NAME", help="model that answers; left out: the first one of /v1/models"
)


@click.command()
@_asking
@MODEL
@_with_parameters
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    help="longest answer; left out: what the server has room for",
)
@click.option("--system-prompt", metavar="TEXT", help="first message")
@QUICK
def chat(system_prompt: str | None, quick: str | None, **talk: Any) -> None:
    """Talk to a server in the terminal."""
    from lmi.client.talk import Talk

    with closing(Talk(**talk)) as server:
        server.chat(system_prompt, quick)


@click.command()
@_asking
@MODEL
@_with_parameters
@click.option(
    "--max-tokens", type=click.IntRange(1), default=128, show_default=True, help="longest answer"
)
@QUICK
def complete(quick: str | None, **talk: Any) -> None:
    """Let a server continue texts in the terminal."""
    from lmi.client.talk import Talk

    with closing(Talk(**talk)) as server:
        server.complete(quick)


@click.command("run-batch")
@click.option(
    "-i", "--input-file", "source", type=FILE, required=True, help="requests, one on each line"
)
@click.option(
    "-o", "--output-file", "target", type=Path, required=True, help="answers, in any order"
)
@_asking
@click.option(
    "--concurrency", type=click.IntRange(1), default=16, show_default=True, help="requests at once"
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    default=3600.0,
    show_default=True,
    help="for each answer, from its request to its end",
)
def run_batch(
    source: Path,
    target: Path,
    url: str,
    api_key: str | None,
    concurrency: int,
    timeout_s: float,
) -> int:
    """Answer the requests of a file in OpenAI's batch form."""
    import asyncio

    from lmi.client import batch

    with source.open("rb") as requests, target.open("wb") as answers:
        answering = batch.run_batch(requests, answers, url, api_key, concurrency, timeout_s)
        num_failed = asyncio.run(answering)

    if num_failed:
        click.echo(
            f"lmi run-batch: {num_failed} requests have no answer of 200; {target} says why",
            err=True,
        )

    return 1 if num_failed else 0


@click.command(context_settings={"show_default": True})
@click.argument("urls", nargs=-1, required=True, metavar="URL [URL]")
@click.option("--api-key", envvar="LMI_API_KEY", help="key of the servers, else LMI_API_KEY")
@click.option(
    "--dialect", type=click.Choice(["chat", "completions", "lmi", "tgi", "triton"]), default="chat"
)
@click.option(
    "--model",
    metavar="NAME",
    default="",
    help="left out: the first one of /v1/models, where one is needed",
)
@click.option(
    "--requests", "num_requests", type=click.IntRange(1), default=100, help="requests of a round"
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    help="rounds for each server; left out: 1, or 3 of two servers",
)
@click.option(
    "--warmup",
    "num_warmup",
    type=click.IntRange(0),
    default=8,
    help="requests before, which do not count",
)
@click.option(
    "--streams",
    "num_streams",
    type=click.IntRange(1),
    default=8,
    help="closed loop: clients at once",
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    help="open loop: requests/s, of a Poisson process",
)
@click.option("--whole", "is_whole", is_flag=True, help="ask for whole answers, not for streams")
@click.option(
    "--prompts", type=FILE, help="a prompt on each line, or an object with prompt and max_tokens"
)
@click.option(
    "--prompt-words",
    "num_words",
    type=click.IntRange(1),
    default=100,
    help="length of made prompts",
)
@click.option(
    "--shared-words",
    "num_shared_words",
    type=click.IntRange(0),
    default=0,
    help="of them a shared beginning",
)
@click.option(
    "--prefixes",
    "num_prefixes",
    type=click.IntRange(1),
    default=1,
    help="different shared beginnings",
)
@click.option("--max-tokens", type=click.IntRange(1), default=64, help="longest answer")
@click.option(
    "--body",
    metavar="JSON",
    default="{}",
    help='further fields of each request: {"ignore_eos": true}',
)
@click.option(
    "--target-ttft-ms", type=click.FloatRange(0), help="goodput: longest time to the first token"
)
@click.option(
    "--target-itl-ms", type=click.FloatRange(0), help="goodput: longest mean time between tokens"
)
@click.option(
    "--target-e2e-ms", type=click.FloatRange(0), help="goodput: longest time of a whole answer"
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    default=600,
    help="of a request, in s",
)
@click.option("--seed", default=0, help="of prompts and arrivals")
@click.option("--json", "json_file", type=Path, metavar="FILE", help="write all figures and times")
@click.option("--html", "html_file", type=Path, metavar="FILE", help="write a page with plots")
@click.option(
    "--png", "png_file", type=Path, metavar="FILE", help="write the plots as a picture, with Pillow"
)
def bench(**settings: Any) -> int:
    """Load a server, or two in turns, and show how fast it answers.

    Servers speak OpenAI (chat, completions), LMI, TGI or Triton's generate extension.
    """
    from lmi.client.bench import command

    return command.bench(settings)


@click.command("version")
def show_version() -> None:
    """Show the versions of lmi and of what it runs on."""
    click.echo(f"lmi {__version__}")
    click.echo(f"python {platform.python_version()}")
    click.echo("\n".join(_machine()))

    handlers = announced()
    distributions = list(REPORTED_LIBRARIES)
    for handler in handlers.values():
        distributions += handler.distributions

    for name in distributions:
        try:
            click.echo(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            click.echo(f"{name} not installed")

    for name, handler in handlers.items():
        about = handler.describe()
        if about:
            click.echo(f"{name} {about}")


def _machine() -> list[str]:
    """Return lines about the system, the processor, memory and GPUs."""
    lines = [
        f"os {platform.platform()}",
        f"cpu {_processor()}, {machine.num_usable_cores()} cores",
        f"memory {machine.memory_bytes() / 2**30:.1f} GiB",
    ]
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        lines += [f"gpu {gpu}" for gpu in gpus.splitlines()]

    return lines


def _processor() -> str:
    """Return the name of the first processor, or of its kind where Linux does not name it."""
    file = Path("/proc/cpuinfo")
    if file.exists():
        name = re.search(r"^model name\s*: (.+)$", file.read_text(), re.MULTILINE)
        if name is not None:
            return name[1]

    return platform.machine()


COMMANDS = (
    config,
    pull,
    list_models,
    rm,
    gateway,
    chat,
    complete,
    run_batch,
    bench,
    show_version,
)
