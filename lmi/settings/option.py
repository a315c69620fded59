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
from typing import Any, TypeVar

from msgspec import Struct

from lmi.settings.kinds import Kind

Default = TypeVar("Default")
# The controls of secure mode that refuse options.
SCRIPTS = "DISALLOW_CUSTOM_INFERENCE_SCRIPTS"
PICKLES = "DISALLOW_PICKLE_FILES"
REMOTE_CODE = "DISALLOW_TRUST_REMOTE_CODE"
TEMPLATES = "DISALLOW_CHAT_TEMPLATE"


class Option(Struct, frozen=True):
    """One option. As a `ClassVar` of the settings it fills no field itself: others are chosen by
    it.
    """

    default: Any
    part: str  # server, model or engine: the settings that declare it
    # the field of Config that it fills, such as "server.port", or "" if it fills none directly
    field: str
    declared: tuple[type, str]  # the class and its field
    key: str  # in serving.properties
    kind: Kind
    aliases: Sequence[str] = ()  # further keys with the same meaning
    env: Sequence[
        str
    ] = ()  # environment names beside OPTION_… and SERVING_…; the first one given counts
    platform: Sequence[
        str
    ] = ()  # names of SageMaker and of AWS's images, which beat the file; the first one counts
    more_flags: Sequence[str] = ()
    own_kinds: Mapping[str, Kind] = {}  # of the variables whose values have another form
    has_flag: bool = True
    is_for_engine: bool = False  # EngineConfig.options holds its text for every engine
    otherwise: str = (
        ""  # only engines whose Handler.uses names it read it: what happens on the others
    )
    grants: str = ""
    """What its author can do beyond the model's answers, as a noun. The file of a stranger cannot
    give it: see `strangers.py`. An option of the server needs no word for it, since it always
    reaches beyond a model.
    """
    is_for_operator: bool = (
        False  # in secure mode serving.properties, which may come with the model, cannot give it
    )
    is_path: bool = False  # in secure mode it must lie in a safe folder
    is_safe: bool = True  # secure mode allows it
    refused_by: str = (
        ""  # the control of secure mode that refuses every value but the default and harmless ones
    )
    harmless: Callable[[Any], bool] = lambda value: False

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
        is_platform = name.startswith("SAGEMAKER_")
        is_flag = name.startswith("-")
        form = (
            "platform"
            if is_platform
            else "more_flags"
            if is_flag
            else "env"
            if name.isupper()
            else "aliases"
        )
        facts.setdefault(form, []).append(name)

    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: default, metadata=facts)

    return dataclasses.field(default=default, metadata=facts)


@cache  # of the source, since Python keeps no docstring of a field
def docstrings(module: str) -> dict[tuple[str, str], str]:
    """Return the docstrings of fields by class and field."""
    found = {}
    classes = [
        each
        for each in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(each, ast.ClassDef)
    ]
    for settings, one, after in ((each, *two) for each in classes for two in pairwise(each.body)):
        match one, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                found[settings.name, name] = " ".join(text.split())

    return found


def _flag(key: str) -> str:
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", key.removeprefix("option.")).lower()
    return "--" + words.replace("_", "-")
