"""Chooses the defaults of requests: the values of the model's maker, or the operator's in their
place.

`generation_config` and `override_generation_config` have vLLM's meaning, so `do_sample` of a file
does not count. A file that comes with a model is a stranger's. So it is read up to a size only, and
its values that no request may have are left out with a warning, while those of the operator are
faults. Source: vLLM 0.32, `ModelConfig.get_diff_sampling_param`.
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

# It returns what is wrong with a value, or "".
Fault = Callable[[object], str]


def _number(low: float, high: float) -> Fault:
    return partial(range_fault, low=low, high=high, low_open=False)


def _integer(minimum: int) -> Fault:
    return partial(int_fault, minimum=minimum, maximum=MAX_INT)


# The rules of values, which are those of requests.
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
    """Refuse a named file that cannot be read, and each of the operator's values that no request
    may have.
    """
    values = resolution.values
    file = _named_file(values)
    if file is not None:
        try:
            _read(file)
        except ValueError as error:
            values.refuse(FILE_KEY, f"{GENERATION_CONFIG.allowed} ({error})")

    overrides = _overrides(values)
    for broken_value in _broken_values(overrides):
        values.refuse(OVERRIDE, f"for {broken_value.name} {broken_value.rule}")

    unknown = [name for name in overrides if name not in FAULTS]
    if unknown:
        values.warn(
            f"{values.how_given(OVERRIDE).place}: {', '.join(map(shorten, unknown))}: no effect, "
            f"only {', '.join(FAULTS)}"
        )


def choose_defaults(resolution: Resolution) -> None:
    """Choose the defaults of the model, and note them for the operator. User code has none."""
    if resolution.is_user_code:
        resolution.generation_defaults = GenerationDefaults()
        return

    values = resolution.values
    named_file = _named_file(values)
    file_values = _values_of_file(values, named_file or resolution.path / FILE_NAME)
    overrides = _parameters(_overrides(values))

    sources: list[str] = []
    if file_values:
        sources.append(str(named_file) if named_file else FILE_NAME)

    if overrides:
        sources.append(OVERRIDE)

    merged = {**file_values, **overrides}
    # What the operator names bounds every request, but the file of the model's maker bounds none.
    limits = merged if named_file else overrides
    defaults = GenerationDefaults(
        **merged,
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
    """Return the file that the option names, or the one in a folder that it names. None: it names
    none.
    """
    text = values.final(FILE_KEY)
    if text in ("auto", *OWN_DEFAULTS):
        return None

    files: list[Path] = []
    for base in (values.start.folder or values.start.cwd, values.start.cwd):
        path = base / local_path(text)
        files.append(path / FILE_NAME if path.is_dir() else path)

    return next((file for file in files if file.is_file()), files[0])


def _overrides(values: Values) -> dict[str, Any]:
    """Return the operator's values, which are not checked yet."""
    text = values.final(OVERRIDE)
    overrides: dict[str, Any] = orjson.loads(text) if text else {}
    return overrides


def _values_of_file(values: Values, file: Path) -> dict[str, Any]:
    """Return the values of a file that count. Warns of those that no request may have."""
    if values.final(FILE_KEY) in OWN_DEFAULTS or not file.is_file():
        return {}

    try:
        content = _read(file)
    except ValueError as error:
        values.warn(f"{file}: {error}, so the model has no defaults of its own")
        return {}

    parameters = _parameters(content)
    for broken_value in _broken_values(content):
        name, rule, value = broken_value
        values.warn(f"{file}: {name} must be {rule}, given {shorten(value)}, so it does not count")
        del parameters[name]

    return parameters


def _parameters(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of requests among the members of an object. null means left out."""
    return {name: content[name] for name in FAULTS if content.get(name) is not None}


class _BrokenValue(NamedTuple):
    """A value that breaks the rule of its parameter."""

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
