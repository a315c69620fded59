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
from lmi.settings.shown import text_in_file
from lmi.settings.table import OPTIONS

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
# What follows is a topic: a group, a word of options, or all of them.
HELP = "--help="
ALL = "all"
# Click keeps the topic of the help by this name while a command runs.
TOPIC = "lmi.flags.topic"
# Values stand beside a flag up to so many characters. More stand in its help.
MAX_WORDS_CHARS = 60
CONFIG = "--config"
MODEL_DIR = "--model-dir"
WITH_GATEWAY = "--with-gateway"
GATEWAY_VALUE = re.compile("[0-9]+|true|false")
# An engine's flag of such a name takes no value, unless the next word is true or false.
SWITCH = re.compile(
    "(allow|async|enable|disable|enforce|exclude|fully|interleave|return|skip|use)_|.*_(only|stack)$"
)
# A ratio of difflib: --prot is a slip for --port, --workers is not one for --min-workers.
NEAR = 0.83


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
        # The help below is made when it is shown.
        del self.help

    @functools.cached_property
    def help(self) -> str:  # type: ignore[override]
        text = self.row.help
        words = self.row.kind.words
        if len("|".join(words)) > MAX_WORDS_CHARS:
            text += f": {', '.join(words)}"

        default = text_in_file(self.row.key, self.row.default)
        if default:
            return f"{text} [{self.row.key}; default: {default}]"

        return f"{text} [{self.row.key}]"

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in self.row.kind.words if word.startswith(incomplete)]


def _option_flags() -> dict[str, OptionFlag]:
    flags = {}
    for row in OPTIONS:
        if row.has_flag:
            name = "option_" + row.flag[2:].replace("-", "_")
            flags[name] = OptionFlag(name, row)

    return flags


FLAGGED = _option_flags()
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
        config_help = "flags of a YAML file: max-num-seqs: 8"
        settings_help = "any key of serving.properties"
        first = [
            click.Argument(["folder"], required=False, metavar="[DIR]"),
            click.Option([MODEL_DIR], metavar="DIR", help="the same as DIR"),
            click.Option([CONFIG], multiple=True, metavar="FILE", help=config_help),
            click.Option(
                ["--set", "settings"], multiple=True, metavar="KEY=VALUE", help=settings_help
            ),
        ]

        super().__init__(name, params=[*first, *params, *FLAGGED.values()], **attributes)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        topic = next((word.removeprefix(HELP) for word in args if word.startswith(HELP)), None)
        if topic is not None and not ctx.resilient_parsing:
            ctx.meta[TOPIC] = topic
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

        further_args = super().parse_args(ctx, _with_values(ctx, args))
        if not ctx.resilient_parsing:
            ctx.params = _collected(**ctx.params)

        return further_args

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options, or those of the topic that was asked for. Raises UsageError if
        it has none.
        """
        topic = ctx.meta.get(TOPIC)
        flags = []
        options_of_command = []
        for parameter in self.get_params(ctx):
            if isinstance(parameter, OptionFlag):
                flags.append(parameter)
            elif isinstance(parameter, click.Option):
                options_of_command.append(parameter)

        flags_of_topic = [flag for flag in flags if _is_about(flag, topic)]
        if not flags_of_topic:
            raise click.UsageError(
                f"{HELP}{topic}: no option is about it, topics are {', '.join((ALL, *GROUPS))}.",
                ctx,
            )

        if topic in (None, ALL):
            _write_section(ctx, formatter, "Options", options_of_command)

        for part, title in GROUPS.items():
            section = [flag for flag in flags_of_topic if flag.row.part == part]
            _write_section(ctx, formatter, title, section)

        if topic is None:
            formatter.write_paragraph()
            formatter.write_text(
                f"These are {len(flags_of_topic)} of {len(flags)} options. {HELP}{ALL} shows every "
                f"one, {', '.join(HELP + part for part in GROUPS)} those of a group, {HELP}WORD "
                f"those that have the word."
            )


def _is_about(flag: OptionFlag, topic: str | None) -> bool:
    """Whether the help on a topic shows a flag. No topic is the short help. Any word that names no
    group is searched for in names and help.
    """
    if topic is None:
        return flag.row.key in COMMON

    if topic in GROUPS:
        return flag.row.part == topic

    if topic == ALL:
        return True

    word = topic.strip("-").replace("_", "-").lower()
    texts = (*flag.opts, *flag.secondary_opts, flag.row.key, flag.row.help)
    return any(word in text.replace("_", "-").lower() for text in texts)


def _write_section(
    ctx: click.Context, formatter: click.HelpFormatter, title: str, options: Sequence[click.Option]
) -> None:
    """Write a section of the help, or nothing if it has no options."""
    records = []
    for option in options:
        record = option.get_help_record(ctx)
        if record is not None:
            records.append(record)

    if records:
        with formatter.section(title):
            formatter.write_dl(records)


def _collected(
    folder: str | None,
    model_dir: str | None,
    config: tuple[str, ...],
    settings: tuple[str, ...],
    **further_params: Any,
) -> dict[str, Any]:
    """Return the parameters of a command, with the texts of flags and files by key."""
    flags = {}
    for name, option in FLAGGED.items():
        text = text_of(further_params.pop(name))
        if text is not None:
            flags[option.row.key] = text

    for setting in settings:
        key, equals, text = map(str.strip, setting.partition("="))
        if not equals or not key:
            raise click.UsageError(f"--set takes KEY=VALUE, given {setting}.")

        if flags.setdefault(key, text) != text:
            raise click.UsageError(f"{key} is given as {flags[key]} and as {text}.")

    if model_dir:
        flags[MODEL_DIR] = model_dir

    # A flag counts before the files, and a later file before an earlier one.
    keys_of_flags = frozenset(flags)
    files = {}
    for path in config:
        for key, text in _read(path).items():
            if key not in keys_of_flags:
                flags[key] = text
                files[key] = path

    model_dir = flags.pop(MODEL_DIR, None)
    if folder and model_dir and folder != model_dir:
        raise click.UsageError(f"DIR is {folder} and --model-dir is {model_dir}.")

    return {"folder": folder or model_dir, "flags": flags, "files": files, **further_params}


def text_of(value: bool | str | tuple[str, ...] | None) -> str | None:
    """Return what click has read as the text of an option, or None if the flag was not given."""
    if isinstance(value, tuple):
        return ",".join(value) or None

    return str(value).lower() if isinstance(value, bool) else value


def unknown(flag: str) -> str:
    """Return the message about an unknown flag, with a hint at a flag of nearly that name."""
    if elsewhere(flag):
        return f"{flag}: {elsewhere(flag)}."

    message = f"No such option {flag}."
    flags = [*OURS, MODEL_DIR, "--set", "--json", "--changed"]
    near_flags = difflib.get_close_matches(flag, flags, 1, NEAR)
    if near_flags:
        message += f" Did you mean {near_flags[0]}?"

    return message


def _read(path: str) -> dict[str, str]:
    """Return the values of a YAML file by key, without what is null. Raises UsageError."""
    import yaml

    try:
        flags = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise click.UsageError(f"{CONFIG} {path}: {cause_line(error)}") from None

    if not isinstance(flags, dict) or not all(isinstance(name, str) for name in flags):
        raise click.UsageError(f"{CONFIG} {path}: holds no object of flags and values")

    texts = {}
    for name, value in flags.items():
        if value is not None:
            key = _key_of_name(name)
            texts[key] = _text_in_file(value)

    return texts


def _key_of_name(name: str) -> str:
    """Return the key of a name in a file: a key itself, or a flag without its dashes. Raises
    NoSuchOption.
    """
    if "." in name:
        return name

    flag = f"--{name}".replace("_", "-")
    key = KEYS.get(flag) or _key_of_engine(flag)
    if not key:
        raise click.NoSuchOption(flag)

    return key


def _text_in_file(value: object) -> str:
    """Return a value of a file as the text of a flag. A list of plain values has commas between."""
    if isinstance(value, list) and not any(isinstance(part, dict | list) for part in value):
        return ",".join(map(str, value))

    if isinstance(value, bool | dict | list):
        return json.dumps(value, default=str)

    return str(value)


def _value_of_flag(ctx: click.Context, name: str, key: str, later_words: list[str]) -> str:
    """Return the value of an engine's flag, and take it out of the words behind the flag. A switch
    needs none.
    """
    next_word = later_words[0] if later_words else ""
    is_no = name.startswith("--no-")
    is_switch = is_no or SWITCH.match(key.removeprefix("option."))
    if is_switch and next_word not in WORDS:
        return str(not is_no).lower()

    if re.match("-[^0-9.]", next_word):
        raise click.UsageError(f"Option {name} requires an argument.", ctx)

    return _next_word(ctx, name, later_words)


def _next_word(ctx: click.Context, name: str, later_words: list[str]) -> str:
    """Take the first of the words behind a flag. Raises UsageError if there is none."""
    if not later_words:
        raise click.UsageError(f"Option {name} requires an argument.", ctx)

    return later_words.pop(0)


def _with_values(ctx: click.Context, words: list[str]) -> list[str]:
    """Return the words of the command line with a value for --with-gateway if it has none, and with
    a --set for each flag of an engine. Raises UsageError for a flag without its value.
    """
    result = []
    later_words = list(words)
    # The parts of dotted flags, by key.
    parts: dict[str, dict[str, Any]] = {}
    while later_words:
        word = later_words.pop(0)
        next_word = later_words[0] if later_words else ""
        if word == WITH_GATEWAY and not GATEWAY_VALUE.fullmatch(next_word):
            result.append(f"{WITH_GATEWAY}=true")
            continue

        name, equals, text = word.partition("=")
        is_flag = name.startswith("--")
        key = ""
        if is_flag and name not in OURS:
            key = _key_of_engine(name)

        if key:
            if not equals:
                text = _value_of_flag(ctx, name, key, later_words)

            result.append(f"--set={key}={text}")
            continue

        if is_flag and "." in name:
            key = _key_of_engine(name.partition(".")[0])

        if key:
            if not equals:
                text = _next_word(ctx, name, later_words)

            _put(parts.setdefault(key, {}), name.split(".")[1:], text)
        else:
            result.append(word)

    for key, value in parts.items():
        result.append(f"--set={key}={json.dumps(value)}")

    return result


def _put(value: dict[str, Any], path: list[str], text: str) -> None:
    """Set what vLLM's `--flag.a.b TEXT` means in the object of `--flag`: a value in JSON, or else
    the text.
    """
    for name in path[:-1]:
        inner = value.setdefault(name.replace("-", "_"), {})
        value = inner if isinstance(inner, dict) else {}

    last_name = path[-1].replace("-", "_")
    try:
        value[last_name] = json.loads(text)
    except ValueError:
        value[last_name] = text


def _key_of_engine(flag: str) -> str:
    """Return the key of an option that no row has, or "" if no engine knows it or this server has
    nothing like it.
    """
    if elsewhere(flag):
        return ""

    keys = set(known_keys())
    for handler in announced().values():
        keys.update(handler.option_keys() or ())

    for prefix in ("--", "--no-"):
        name = flag.removeprefix(prefix).replace("-", "_")
        for key in (name, f"option.{name}"):
            if key in keys:
                return key

    return ""
