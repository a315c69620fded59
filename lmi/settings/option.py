"""What an option is: a field of the settings, with its key, the kind of its values, and all else that is known of it.

Flags, `lmi config`, environment names, secure mode, the example and messages come from what the fields say.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from msgspec import Struct

from lmi.settings.kinds import Kind

ROW = "option"  # the name of an Option in a field's metadata
Default = TypeVar("Default")
# The controls of secure mode that refuse options.
SCRIPTS, PICKLES = "DISALLOW_CUSTOM_INFERENCE_SCRIPTS", "DISALLOW_PICKLE_FILES"
REMOTE_CODE, TEMPLATES = "DISALLOW_TRUST_REMOTE_CODE", "DISALLOW_CHAT_TEMPLATE"


class Option(Struct, frozen=True):
    """One option. As a `ClassVar` of the settings it fills no field itself: others are chosen by it."""

    default: Any
    kind: Kind
    help: str
    key: str = ""  # in serving.properties; left out: the field's name, after `option.` if it is not of ServerConfig
    aliases: tuple[str, ...] = ()  # further keys with the same meaning
    env: tuple[str, ...] = ()  # environment names beside OPTION_… and SERVING_…; the first one given counts
    platform: tuple[str, ...] = ()  # SAGEMAKER_… names, which beat the file; the first one given counts
    own_kinds: Mapping[str, Kind] = {}  # of the variables whose values have another form
    has_flag: bool = True
    more_flags: tuple[str, ...] = ()
    is_for_engine: bool = False  # EngineConfig.options holds its text for every engine
    otherwise: str = ""  # only engines whose Handler.uses names it read it: what happens on the others
    is_for_operator: bool = False  # in secure mode serving.properties, which may come with the model, cannot give it
    is_path: bool = False  # in secure mode it must lie in a safe folder
    is_safe: bool = True  # secure mode allows it
    refused_by: str = ""  # the control of secure mode that refuses every value but the default and harmless ones
    harmless: Callable[[Any], bool] = lambda value: False
    part: str = ""  # server, model or engine: the settings that declare it
    field: str = ""  # the field of Config that it fills, such as "server.port", or "" if it fills none directly

    @property
    def flag(self) -> str:
        return _flag(self.key)

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags of the option: one for the key, one for each alias, and `more_flags`."""
        return tuple(dict.fromkeys([*map(_flag, (self.key, *self.aliases)), *self.more_flags]))


def option(default: Default, kind: Kind, help: str, **facts: Any) -> Default:
    """Return the default of a field, which then is an option. `facts` are further fields of Option."""
    row: dict[str, Any] = {"metadata": {ROW: Option(default, kind, help, **facts)}}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: default, **row)
    return dataclasses.field(default=default, **row)


def _flag(key: str) -> str:
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", key.removeprefix("option.")).lower()
    return "--" + words.replace("_", "-")
