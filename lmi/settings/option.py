"""What an option is: a field of the settings. The field has its key, its kind, and all else that is
known of it; the text below the field is its help.
"""

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, dataclass_transform

from msgspec import Struct

from lmi.settings.kinds import Kind

if TYPE_CHECKING:
    from lmi.shared.machine import Machine

Default = TypeVar("Default")
# The controls of secure mode that refuse options.
SCRIPTS = "DISALLOW_CUSTOM_INFERENCE_SCRIPTS"
PICKLES = "DISALLOW_PICKLE_FILES"
REMOTE_CODE = "DISALLOW_TRUST_REMOTE_CODE"
TEMPLATES = "DISALLOW_CHAT_TEMPLATE"


class Choice(NamedTuple):
    """A value that was chosen for an option, and why, which `lmi config` shows."""

    value: Any
    reason: str


class Option(Struct, frozen=True):
    """One option. If it is a `ClassVar` of the settings, it fills no field itself, but other values
    are chosen by it.
    """

    default: Any
    # The settings that declare it: server, model or engine.
    part: str
    # The field of Config that it fills, such as "server.port", or "" if it fills none directly.
    field: str
    # The class and the field that declare it.
    declared: tuple[type, str]
    # Its key in serving.properties.
    key: str
    kind: Kind
    # Further keys with the same meaning.
    aliases: Sequence[str] = ()
    # Environment names beside OPTION_… and SERVING_…. The first one that is set counts.
    env: Sequence[str] = ()
    # Names of SageMaker and of AWS's images, which beat the file. The first one that is set counts.
    platform: Sequence[str] = ()
    more_flags: Sequence[str] = ()
    # The kinds of variables whose values have another form.
    own_kinds: Mapping[str, Kind] = {}
    has_flag: bool = True
    # `EngineConfig.options` holds its text for every engine.
    is_for_engine: bool = False
    # If only some engines read it, what happens on those whose `Handler.uses` does not name it.
    otherwise: str = ""
    grants: str = ""
    """What it lets its author do beyond the model's answers, as a noun. If it lets him do anything,
    the file of a stranger cannot give it: see `strangers.py`. An option of the server has no such
    text, since each of them reaches beyond a model.
    """
    # Whether serving.properties, which may come with the model, cannot give it in secure mode.
    is_for_operator: bool = False
    # Whether it is a path, which must lie in a safe folder in secure mode.
    is_path: bool = False
    # Whether secure mode allows it.
    is_safe: bool = True
    # The control of secure mode that refuses it, but for the default and `harmless` values.
    refused_by: str = ""
    harmless: Callable[[Any], bool] = lambda value: False
    choose: "Callable[[Machine], Choice | None]" = lambda machine: None
    """Returns what counts on a machine where it was not given; None: the default."""

    @property
    def help(self) -> str:
        """The text below the field."""
        settings, name = self.declared
        return docstrings(settings.__module__)[settings.__name__, name]

    @property
    def flag(self) -> str:
        """Its first flag on the command line."""
        return _flag(self.key)

    @property
    def flags(self) -> list[str]:
        """All flags of the option: one for the key, one for each alias, and `more_flags`."""
        return list(dict.fromkeys([*map(_flag, (self.key, *self.aliases)), *self.more_flags]))


def option(default: Default, kind: Kind | None = None, names: str = "", **facts: Any) -> Default:
    """Make a field of the settings an option, whose default this returns.

    `kind` says what values it may have; without it the type of the field does (`kinds.OF_TYPE`).
    `names` has further keys, variables and flags of it. `facts` are further fields of Option.
    Without `key` among them the key is the field's name, without the unit `_s`, and behind
    `option.` if it is no option of the server.
    """
    facts["kind"] = kind
    for name in names.split():
        facts.setdefault(_field_of_name(name), []).append(name)

    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: default, metadata=facts)

    return dataclasses.field(default=default, metadata=facts)


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,)
)
class Settings:
    """The base of all settings: a subclass is a frozen dataclass.

    Every process imports all settings at its start. `dataclass(frozen=True)` would write and
    compile six methods for each class, and all of them would wait for that; these serve every
    class.
    """

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)

    def __init__(self, **values: Any) -> None:
        """Raises TypeError for a name that is no field, and for a field without a value."""
        unknown = set(values)
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            unknown.discard(field.name)
            if field.name in values:
                value = values[field.name]
            elif field.default is not dataclasses.MISSING:
                value = field.default
            elif field.default_factory is not dataclasses.MISSING:
                value = field.default_factory()
            else:
                raise TypeError(f"{type(self).__name__} needs a value of {field.name}")

            object.__setattr__(self, field.name, value)

        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {min(unknown)}")

    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented

        return all(
            getattr(self, field.name) == getattr(other, field.name)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if field.compare
        )

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"


def _field_of_name(name: str) -> str:
    """Return the field of Option that a further name of an option belongs to."""
    if name.startswith("SAGEMAKER_"):
        return "platform"

    if name.startswith("-"):
        return "more_flags"

    return "env" if name.isupper() else "aliases"


# A module is read once. Python itself keeps no texts of fields.
@cache
def docstrings(module: str) -> dict[tuple[str, str], str]:
    """Return the texts below the fields of a module's classes, by class and field."""
    texts: dict[tuple[str, str], str] = {}
    source = inspect.getsource(sys.modules[module])
    for settings in ast.parse(source).body:
        if not isinstance(settings, ast.ClassDef):
            continue

        for statement, following in pairwise(settings.body):
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[settings.name, name] = " ".join(text.split())

    return texts


def _flag(key: str) -> str:
    """Return the flag of a key: --model-name of option.model_name, --min-workers of minWorkers."""
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", key.removeprefix("option.")).lower()
    return "--" + words.replace("_", "-")
