"""The flags of `lmi serve` and `lmi config`: a row of the table of options each, those of engines,
and files of flags.

A flag that no row has and an engine knows as an option is its `--set`: `--enable-lora` is
option.enable_lora=true. A file of `--config` is read as vLLM reads its own: a YAML object of flags,
whose values count unless a flag is given too.
"""

import difflib
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from lmi.errors import cause_line
from lmi.settings.annexes import MODELS
from lmi.settings.handler import announced
from lmi.settings.kinds import BOOLEAN, WORDS
from lmi.settings.option import Option
from lmi.settings.other_names import elsewhere, known_keys
from lmi.settings.values import OPTIONS, written

GROUPS = {"model": "The model", "server": "The server", "engine": "The engine"}
# The options that the short help shows.
COMMON = (
    "option.rolling_batch",
    "option.max_model_len",
    "option.max_rolling_batch_size",
    "option.dtype",
    "option.quantize",
    "option.tensor_parallel_degree",
    "option.served_model_name",
    "option.tool_call_parser",
    "option.reasoning_parser",
    "host",
    "port",
    "option.api_key",
    "log_level",
)
# what follows is a topic: a group, a word of options, or all of them
HELP = "--help="
ALL = "all"
TOPIC = "lmi.flags.topic"  # of the help, in what click keeps of a command that runs
MAX_WORDS_CHARS = 60  # of the values that stand beside a flag; more stand in its help
CONFIG = "--config"
MODEL_DIR = "--model-dir"
WITH_GATEWAY = "--with-gateway"
GATEWAY_VALUE = re.compile("[0-9]+|true|false")
# An engine's flag of such a name takes no value, unless the next word is true or false.
SWITCH = re.compile(
    "(allow|async|enable|disable|enforce|exclude|fully|interleave|return|skip|use)_|.*_(only|stack)$"
)
NEAR = (
    0.83  # a ratio of difflib: --prot is a slip for --port, --workers is not one for --min-workers
)


class OptionFlag(click.Option):
    """The flag of one option. Its help shows the values that it takes, its key and its default."""

    def __init__(self, name: str, row: Option) -> None:
        if row.kind is BOOLEAN:
            super().__init__([f"{row.flag}/--no-{row.flag[2:]}", name], default=None)
        else:
            words = "|".join(row.kind.words)
            metavar = words if 0 < len(words) <= MAX_WORDS_CHARS else row.kind.unit
            super().__init__([*row.flags, name], metavar=metavar, multiple=row.kind is MODELS)

        self.row = row
        del self.help  # the one below is made when it is shown

    @functools.cached_property
    def help(self) -> str:  # type: ignore[override]
        usual = written(self.row.key, self.row.default)
        words = self.row.kind.words
        values = f": {', '.join(words)}" if len("|".join(words)) > MAX_WORDS_CHARS else ""
        return f"{self.row.help}{values} [{self.row.key}{f'; default: {usual}' if usual else ''}]"

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in self.row.kind.words if word.startswith(incomplete)]


FLAGGED = {
    name: OptionFlag(name, row)
    for row in OPTIONS
    if row.has_flag and (name := "option_" + row.flag[2:].replace("-", "_"))
}
KEYS = {flag: option.row.key for option in FLAGGED.values() for flag in option.opts} | {
    MODEL_DIR: MODEL_DIR
}
OURS = {flag for option in FLAGGED.values() for flag in (*option.opts, *option.secondary_opts)}


class OptionsCommand(click.Command):
    """A command with DIR and a flag for each option, which its function receives as `folder` and
    `flags`, by key.

    `files` has the file of --config that a value came from, by key. The help shows common options,
    and those of a topic with --help=TOPIC.
    """

    def __init__(self, name: str, *, params: list[click.Parameter], **attributes: Any) -> None:
        first = [
            click.Argument(["folder"], required=False, metavar="[DIR]"),
            click.Option([MODEL_DIR], metavar="DIR", help="the same as DIR"),
            click.Option(
                [CONFIG],
                multiple=True,
                metavar="FILE",
                help="flags of a YAML file: max-num-seqs: 8",
            ),
            click.Option(
                ["--set", "settings"],
                multiple=True,
                metavar="KEY=VALUE",
                help="any key of serving.properties",
            ),
        ]
        super().__init__(name, params=[*first, *params, *FLAGGED.values()], **attributes)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        topic = next((word.removeprefix(HELP) for word in args if word.startswith(HELP)), None)
        if topic is not None and not ctx.resilient_parsing:
            ctx.meta[TOPIC] = topic
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

        rest = super().parse_args(ctx, _with_values(ctx, args))
        if not ctx.resilient_parsing:
            ctx.params = _collected(**ctx.params)

        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options, or those of the topic that was asked for. Raises UsageError if
        it has none.
        """
        topic = ctx.meta.get(TOPIC)
        parameters = [
            parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)
        ]
        own = [parameter for parameter in parameters if not isinstance(parameter, OptionFlag)]
        flags = [parameter for parameter in parameters if isinstance(parameter, OptionFlag)]
        shown = [flag for flag in flags if _is_about(flag, topic)]
        if not shown:
            raise click.UsageError(
                f"{HELP}{topic}: no option is about it, topics are {', '.join((ALL, *GROUPS))}.",
                ctx,
            )

        if topic in (None, ALL):
            _write_section(ctx, formatter, "Options", own)

        for part, title in GROUPS.items():
            _write_section(ctx, formatter, title, [flag for flag in shown if flag.row.part == part])

        if topic is None:
            formatter.write_paragraph()
            formatter.write_text(
                f"These are {len(shown)} of {len(flags)} options. {HELP}{ALL} shows every one, "
                f"{', '.join(HELP + part for part in GROUPS)} those of a group, {HELP}WORD those "
                f"that have the word."
            )


def _is_about(flag: OptionFlag, topic: str | None) -> bool:
    """Whether the help of a topic shows a flag: None is that of the short help, a word is searched
    for.
    """
    if topic is None:
        return flag.row.key in COMMON

    if topic in GROUPS:
        return flag.row.part == topic

    word = topic.strip("-").replace("_", "-").lower()
    texts = (*flag.opts, *flag.secondary_opts, flag.row.key, flag.row.help)
    return topic == ALL or any(word in text.replace("_", "-").lower() for text in texts)


def _write_section(
    ctx: click.Context, formatter: click.HelpFormatter, title: str, options: Sequence[click.Option]
) -> None:
    """Write a section of the help, or nothing if it has no options."""
    records = [record for option in options if (record := option.get_help_record(ctx)) is not None]
    if records:
        with formatter.section(title):
            formatter.write_dl(records)


def _collected(
    folder: str | None,
    model_dir: str | None,
    config: tuple[str, ...],
    settings: tuple[str, ...],
    **others: Any,
) -> dict[str, Any]:
    """Return the parameters of a command, with the texts of flags and files by key."""
    flags = {option.row.key: text_of(others.pop(name)) for name, option in FLAGGED.items()}
    given = {key: text for key, text in flags.items() if text is not None}
    for setting in settings:
        key, equals, text = map(str.strip, setting.partition("="))
        if not equals or not key:
            raise click.UsageError(f"--set takes KEY=VALUE, given {setting}.")

        if given.setdefault(key, text) != text:
            raise click.UsageError(f"{key} is given as {given[key]} and as {text}.")

    given |= {MODEL_DIR: model_dir} if model_dir else {}
    of_files = {key: (text, path) for path in config for key, text in _read(path).items()}
    files = {key: path for key, (_, path) in of_files.items() if key not in given}
    given |= {key: of_files[key][0] for key in files}
    model_dir = given.pop(MODEL_DIR, None)
    if folder and model_dir and folder != model_dir:
        raise click.UsageError(f"DIR is {folder} and --model-dir is {model_dir}.")

    return {"folder": folder or model_dir, "flags": given, "files": files, **others}


def text_of(value: bool | str | tuple[str, ...] | None) -> str | None:
    """Return what click has read as the text of an option, or None if the flag was not given."""
    if isinstance(value, tuple):
        return ",".join(value) or None

    return str(value).lower() if isinstance(value, bool) else value


def unknown(flag: str) -> str:
    """Return the message about an unknown flag, with a hint at a flag of nearly that name."""
    if elsewhere(flag):
        return f"{flag}: {elsewhere(flag)}."

    near = difflib.get_close_matches(
        flag, [*OURS, MODEL_DIR, "--set", "--json", "--changed"], 1, NEAR
    )
    return f"No such option {flag}." + (f" Did you mean {near[0]}?" if near else "")


def _read(path: str) -> dict[str, str]:
    """Return the values of a YAML file by key, without what is null. Raises UsageError."""
    import yaml

    try:
        read = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise click.UsageError(f"{CONFIG} {path}: {cause_line(error)}") from None

    if not isinstance(read, dict) or not all(isinstance(name, str) for name in read):
        raise click.UsageError(f"{CONFIG} {path}: holds no object of flags and values")

    texts = {}
    for name, value in read.items():
        flag = f"--{name}".replace("_", "-")
        if value is not None:
            key = name if "." in name else KEYS.get(flag) or _key_of_engine(flag)
            if not key:
                raise click.NoSuchOption(flag)

            if isinstance(value, list) and not any(isinstance(each, dict | list) for each in value):
                value = ",".join(map(str, value))

            is_json = isinstance(value, bool | dict | list)
            texts[key] = json.dumps(value, default=str) if is_json else str(value)

    return texts


def _with_values(ctx: click.Context, words: list[str]) -> list[str]:
    """Return the words with a value for --with-gateway where it has none, and a --set for each flag
    of an engine.
    """
    result = []
    rest = list(words)
    parts: dict[str, dict[str, Any]] = {}  # of dotted flags, by key
    while rest:
        word = rest.pop(0)
        after = rest[0] if rest else ""
        name, equals, text = word.partition("=")
        if word == WITH_GATEWAY and not GATEWAY_VALUE.fullmatch(after):
            result.append(f"{WITH_GATEWAY}=true")
        elif name.startswith("--") and name not in OURS and (key := _key_of_engine(name)):
            is_no = name.startswith("--no-")
            if (
                not equals
                and (is_no or SWITCH.match(key.removeprefix("option.")))
                and after not in WORDS
            ):
                text = str(not is_no).lower()
            elif not equals:
                if not rest or re.match("-[^0-9.]", after):
                    raise click.UsageError(f"Option {name} requires an argument.", ctx)

                text = rest.pop(0)

            result.append(f"--set={key}={text}")
        elif (
            name.startswith("--")
            and "." in name
            and (key := _key_of_engine(name.partition(".")[0]))
        ):
            if not equals:
                if not rest:
                    raise click.UsageError(f"Option {name} requires an argument.", ctx)

                text = rest.pop(0)

            _put(parts.setdefault(key, {}), name.split(".")[1:], text)
        else:
            result.append(word)

    return [*result, *(f"--set={key}={json.dumps(value)}" for key, value in parts.items())]


def _put(value: dict[str, Any], path: list[str], text: str) -> None:
    """Set what vLLM's `--flag.a.b TEXT` means in the object of `--flag`: a value in JSON, or else
    the text.
    """
    for name in path[:-1]:
        inner = value.setdefault(name.replace("-", "_"), {})
        value = inner if isinstance(inner, dict) else {}

    try:
        value[path[-1].replace("-", "_")] = json.loads(text)
    except ValueError:
        value[path[-1].replace("-", "_")] = text


def _key_of_engine(flag: str) -> str:
    """Return the key of an option that no row has, or "" if no engine knows it or this server has
    nothing like it.
    """
    if elsewhere(flag):
        return ""

    known = {
        *known_keys(),
        *(key for handler in announced().values() for key in handler.option_keys() or ()),
    }
    for name in (flag.removeprefix("--"), flag.removeprefix("--no-")):
        name = name.replace("-", "_")
        if found := [key for key in (name, f"option.{name}") if key in known]:
            return found[0]

    return ""
