"""What an option is: a field of the settings, with its key, its kind, its help below it, and all
else known of it.
"""

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

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
    """A value that was chosen for an option, and the reason, which `lmi config` shows."""

    value: Any
    reason: str


class Option(Struct, frozen=True):
    """One option. As a `ClassVar` of the settings it fills no field itself: others are chosen by
    it.
    """

    default: Any
    # The settings that declare it: server, model or engine.
    part: str
    # The field of Config that it fills, such as "server.port", or "" if it fills none directly.
    field: str
    # The class and its field.
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
    # What happens on the engines whose `Handler.uses` does not name it, where only some read it.
    otherwise: str = ""
    grants: str = ""
    """What its author can do beyond the model's answers, as a noun. The file of a stranger cannot
    give it: see `strangers.py`. An option of the server needs no word for it, since it always
    reaches beyond a model.
    """
    # Whether in secure mode serving.properties, which may come with the model, cannot give it.
    is_for_operator: bool = False
    # Whether in secure mode it must lie in a safe folder.
    is_path: bool = False
    # Whether secure mode allows it.
    is_safe: bool = True
    # The control of secure mode that refuses every value but the default and harmless ones.
    refused_by: str = ""
    harmless: Callable[[Any], bool] = lambda value: False
    choose: "Callable[[Machine], Choice | None]" = lambda machine: None
    """Returns what counts on a machine where it was not given; None: the default."""

    @property
    def help(self) -> str:
        settings, name = self.declared
        return docstrings(settings.__module__)[settings.__name__, name]

    @property
    def flag(self) -> str:
        return _flag(self.key)

    @property
    def flags(self) -> list[str]:
        """All flags of the option: one for the key, one for each alias, and `more_flags`."""
        return list(dict.fromkeys([*map(_flag, (self.key, *self.aliases)), *self.more_flags]))


def option(default: Default, kind: Kind | None = None, names: str = "", **facts: Any) -> Default:
    """Return the default of a field, which then is an option. `facts` are further fields of Option.

    Without `kind` the field's type says what values there are (`kinds.OF_TYPE`). Without `key` it
    is the field's name without the unit `_s`, after `option.` if it is not of the server. `names`
    has keys, variables and flags.
    """
    facts["kind"] = kind
    for name in names.split():
        facts.setdefault(_field_of_name(name), []).append(name)

    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: default, metadata=facts)

    return dataclasses.field(default=default, metadata=facts)


def _field_of_name(name: str) -> str:
    """Return the field of Option that a further name of an option belongs to."""
    if name.startswith("SAGEMAKER_"):
        return "platform"

    if name.startswith("-"):
        return "more_flags"

    return "env" if name.isupper() else "aliases"


# The source is read, since Python keeps no docstring of a field, and once for each module.
@cache
def docstrings(module: str) -> dict[tuple[str, str], str]:
    """Return the docstrings of fields by class and field."""
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
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", key.removeprefix("option.")).lower()
    return "--" + words.replace("_", "-")
