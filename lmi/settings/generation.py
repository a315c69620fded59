"""Chooses what counts where a request is silent: the values of the model's maker, and the
operator's in their place.

`generation_config` and `override_generation_config` have vLLM's meaning, so `do_sample` of a file
does not count. What comes with a model is a stranger's: its file is read up to a size, and a value
of it that no request may have is told and left out. The operator's own values have to be right.
Source: vLLM 0.32, `ModelConfig.get_diff_sampling_param`.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from lmi.errors import cause_line, shorten
from lmi.executor import MAX_PENALTY, MAX_TEMPERATURE, REPETITION_PENALTIES
from lmi.executor.checks import MAX_INT, int_fault, range_fault
from lmi.settings.annexes import GENERATION_CONFIG, OWN_DEFAULTS
from lmi.settings.config import GenerationDefaults
from lmi.settings.kinds import local_path
from lmi.settings.steps import Resolution
from lmi.settings.values import Values
from lmi.shared.model_files import read_bounded

FILE_KEY = "option.generation_config"
OVERRIDE = "option.override_generation_config"
FILE_NAME = "generation_config.json"
MAX_FILE_BYTES = 1 << 20

Fault = Callable[[object], str]


def _number(low: float, high: float) -> Fault:
    return partial(range_fault, low=low, high=high, low_open=False)


def _integer(minimum: int) -> Fault:
    return partial(int_fault, minimum=minimum, maximum=MAX_INT)


# The rules by which requests are checked.
FAULTS: dict[str, Fault] = {
    "temperature": _number(0, MAX_TEMPERATURE),
    "top_p": _number(0, 1),
    "top_k": _integer(-1),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(*REPETITION_PENALTIES),
    "presence_penalty": _number(-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": _number(-MAX_PENALTY, MAX_PENALTY),
    "max_new_tokens": _integer(1),
}


def check_options(resolution: Resolution) -> None:
    """Refuse a path without a readable file, and each value of the override that no request may
    have.
    """
    values = resolution.values
    file = _named_file(values)
    if file is not None:
        try:
            _read(file)
        except ValueError as error:
            values.refuse(FILE_KEY, f"{GENERATION_CONFIG.allowed} ({error})")

    overrides = _overrides(values)
    for broken in _broken_values(overrides):
        values.refuse(OVERRIDE, f"for {broken.name} {broken.rule}")

    unknown = [name for name in overrides if name not in FAULTS]
    if unknown:
        values.warn(
            f"{values.how_given(OVERRIDE).place}: {', '.join(map(shorten, unknown))}: no effect, "
            f"only {', '.join(FAULTS)}"
        )


def choose_defaults(resolution: Resolution) -> None:
    """Choose the defaults of the model, none for user code. The operator gets a note of what
    counts.
    """
    if resolution.is_user_code:
        resolution.generation_defaults = GenerationDefaults()
        return

    values = resolution.values
    named_file = _named_file(values)
    of_file = _of_file(values, named_file or resolution.path / FILE_NAME)
    overrides = _parameters(_overrides(values))

    sources: list[str] = []
    if of_file:
        sources.append(str(named_file) if named_file else FILE_NAME)

    if overrides:
        sources.append(OVERRIDE)

    # The file of the model's maker bounds no request.
    limits = {**of_file, **overrides} if named_file else overrides
    defaults = GenerationDefaults(
        **{**of_file, **overrides},
        server_max_new_tokens=limits.get("max_new_tokens"),
        source=", ".join(sources),
    )
    if sources:
        where = "where a request to OpenAI's or Anthropic's APIs is silent"
        values.note(
            f"{defaults.source}: {defaults} {where}; {FILE_KEY}=lmi leaves the file's values out"
        )

    resolution.generation_defaults = defaults


def _named_file(values: Values) -> Path | None:
    """Return the file that the option names, or the one in the folder that it names, if any."""
    text = values.final(FILE_KEY)
    if text in ("auto", *OWN_DEFAULTS):
        return None

    files: list[Path] = []
    for base in (values.start.folder or values.start.cwd, values.start.cwd):
        path = base / local_path(text)
        files.append(path / FILE_NAME if path.is_dir() else path)

    return next((file for file in files if file.is_file()), files[0])


def _overrides(values: Values) -> dict[str, Any]:
    """Return the operator's own values, unchecked."""
    text = values.final(OVERRIDE)
    overrides: dict[str, Any] = orjson.loads(text) if text else {}
    return overrides


def _of_file(values: Values, file: Path) -> dict[str, Any]:
    """Return the values of a file that may count, with a warning for each of the others."""
    if values.final(FILE_KEY) in OWN_DEFAULTS or not file.is_file():
        return {}

    try:
        content = _read(file)
    except ValueError as error:
        values.warn(f"{file}: {error}, so the model has no defaults of its own")
        return {}

    parameters = _parameters(content)
    for broken in _broken_values(content):
        values.warn(
            f"{file}: {broken.name} must be {broken.rule}, given {shorten(broken.value)}, so it "
            "does not count"
        )
        del parameters[broken.name]

    return parameters


def _parameters(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of requests in an object. null means left out."""
    return {name: content[name] for name in FAULTS if content.get(name) is not None}


class _BrokenValue(NamedTuple):
    name: str
    rule: str
    value: Any


def _broken_values(content: Mapping[str, Any]) -> Iterator[_BrokenValue]:
    """Yield each parameter that breaks its rule."""
    for name, value in _parameters(content).items():
        rule = FAULTS[name](value)
        if rule:
            yield _BrokenValue(name, rule, value)


def _read(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ValueError with the reason."""
    if not file.is_file():
        raise ValueError(f"{file} is no file")

    try:
        value = orjson.loads(read_bounded(file, MAX_FILE_BYTES))
    except (OSError, ValueError) as error:
        raise ValueError(cause_line(error)) from None

    if not isinstance(value, dict):
        raise ValueError("holds no JSON object")

    return value
