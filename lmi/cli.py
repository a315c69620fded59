"""The command `lmi`, and the commands `serve` and `djl-serving` with which container platforms
start an image.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial

import click

from lmi import __version__
from lmi.commands import COMMANDS
from lmi.errors import StartError
from lmi.flags import FLAGGED, OptionsCommand, text_of, unknown
from lmi.settings.resolve import resolve_folder
from lmi.shared import log, sink

# The flags of `lmi` itself.
ABOUT = ("-h", "--help", "--version")


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script `lmi`. In a container it is the entry point, so the first word may be
    `lmi` too.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["lmi"]:
        del words[0]

    sys.exit(run(words))


def serve_main() -> None:
    """The console script `serve`, which SageMaker starts."""
    words = sys.argv[1:]
    if words[:1] != ["serve"]:
        words = ["serve", *words]

    sys.exit(run(words))


def djl_serving_main() -> None:
    """The console script `djl-serving`, which LMI's images start."""
    sys.exit(run(["djl-serving", *sys.argv[1:]]))


def run(arguments: list[str]) -> int:
    """Run one command. Returns the exit code."""
    sink.open_missing()

    try:
        return lmi.main(_with_command(arguments), "lmi", standalone_mode=False) or 0
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "lmi"
        click.echo(f"{command}: {_fault(error)} See {command} --help.", err=True)
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"lmi: {log.escape(error.message)}", err=True)
        return error.exit_code
    except click.Abort:
        return 130
    except BrokenPipeError:
        # The reader of the output has closed it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except StartError as error:
        return _fail(error)


def _fault(error: click.UsageError) -> str:
    """Return what is wrong with the words of a command, as one sentence or more."""
    if isinstance(error, click.NoSuchOption):
        return _unknown(error)

    message = " ".join(error.format_message().split())
    return message.rstrip(".") + "."


def _unknown(error: click.NoSuchOption) -> str:
    """Return the message about an unknown flag of any command. Only some commands have a flag for
    each option.
    """
    if error.ctx is None or isinstance(error.ctx.command, OptionsCommand):
        return unknown(error.option_name)

    flag = error.option_name
    message = f"No such option {flag}."
    option = FLAGGED.get("option_" + flag.lstrip("-").replace("-", "_"))
    if option is not None and error.ctx.command is djl_serving:
        prefix = "OPTION" if option.row.key.startswith("option.") else "SERVING"
        variable = f"{prefix}_{flag.lstrip('-').replace('-', '_').upper()}"
        return (
            f"{message} These are djl-serving's own words: lmi serve takes {flag}, or {variable} "
            f"sets it."
        )

    if error.possibilities:
        message += f" Did you mean {error.possibilities[0]}?"

    return message


def _with_command(arguments: list[str]) -> list[str]:
    """Return the arguments with `serve` before them if they begin with no command, as where there
    are none at all.

    Platforms start a container without a word, or with flags alone. Raises UsageError for an
    unknown word.
    """
    first = arguments[0] if arguments else "-"
    if first in ABOUT or first in lmi.commands:
        return arguments

    if first.startswith("-"):
        return ["serve", *arguments]

    words = ", ".join(lmi.commands)
    raise click.UsageError(
        f"No such command {log.escape(first)}. Commands are {words}; no command means serve."
    )


FIRST_EXAMPLES = """\b
Examples:
  lmi serve demo
  lmi serve smollm2
  lmi serve OWNER/NAME --max-model-len 32k
  lmi chat -q 'Who are you?'
  lmi bench http://127.0.0.1:8080 --streams 16"""


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=FIRST_EXAMPLES)
@click.version_option(__version__, message="lmi %(version)s")
def lmi() -> None:
    """Serve a large language model behind the contracts that its clients already speak."""


EXAMPLES = """\b
Examples:
  lmi serve demo
  lmi serve OWNER/NAME --port 8000 --max-model-len 32k --enable-lora
  lmi serve path/to/model --config FILE.yaml --set option.seed=7"""


@lmi.command(cls=OptionsCommand, epilog=EXAMPLES)
def serve(folder: str | None, flags: dict[str, str], files: dict[str, str]) -> int:
    """Serve the model in DIR.

    DIR is a folder with serving.properties or config.json, a GGUF file, a name that lmi list shows
    (smollm2), OWNER/NAME of a hub (of its GGUF files OWNER/NAME:Q4_K_M or OWNER/NAME/FILE.gguf),
    s3://BUCKET/PREFIX, s3://BUCKET/FILE.gguf or https://HOST/FILE.gguf, or demo. Without DIR:
    /opt/ml/model when it holds something, else the current folder when it has one of these files,
    else the built-in demo model.
    """
    return _serve(folder, flags, files)


@lmi.command("djl-serving")
@click.option("-s", "--model-store", "folder", metavar="DIR", help="folder of the model")
@click.option(
    "-m", "--models", multiple=True, metavar="NAME=PATH", help="folder and name of the model"
)
def djl_serving(folder: str | None, models: tuple[str, ...]) -> int:
    """Serve as the LMI container's own start command does."""
    flags = {}
    load_models = text_of(models)
    if load_models:
        flags["load_models"] = load_models

    return _serve(folder, flags, {})


for command in COMMANDS:
    lmi.add_command(command)


def _serve(folder: str | None, flags: dict[str, str], files: dict[str, str]) -> int:
    from lmi.supervisor import stages, supervisor

    sink.never_wait()
    settle = partial(resolve_folder, folder, os.environ, flags, files=files)
    resolved = settle()
    server = resolved.config.server
    log.setup("supervisor", server.log_level, server.log_format)
    if resolved.request is None:
        stages.say(resolved)

    return supervisor.run(resolved, lambda fetched: settle(fetched=fetched))


def _fail(error: StartError) -> int:
    """Print why a start failed: each fault on one line, before the JSON object. Returns the exit
    code.
    """
    from lmi.supervisor.child import Failure
    from lmi.supervisor.messages import say_failed

    if not log.is_text("auto"):
        for line in str(error).split("\n"):
            click.echo(f"lmi: {log.escape(line)}", err=True)

    say_failed(Failure.of(error, "configuration"), "auto")
    return error.exit_code
