"""The table of options, read from the fields of the settings."""

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

from lmi.settings.config import EngineConfig, ModelConfig, ServerConfig
from lmi.settings.kinds import OF_TYPE, Kind
from lmi.settings.option import Option

MODEL = "option.model_id"
DRAFT = "option.speculative_draft_model"


def _options(part: str, settings: type) -> Iterator[Option]:
    """Yield the options of a class of settings and then those of its bases, in the order of their
    fields.
    """
    declared: dict[str, Field[Any]] = vars(settings)["__dataclass_fields__"]
    # A ClassVar is no field that is filled.
    filled = {field.name for field in fields(settings)}
    prefix = "" if part == "server" else "option."
    for base in settings.__mro__:
        for name in vars(base).get("__annotations__", ()):
            declaration = declared[name]
            facts = dict(declaration.metadata)
            if not facts:
                continue

            facts["kind"] = facts["kind"] or _kind_of_type(str(declaration.type))
            facts.setdefault("key", prefix + name.removesuffix("_s"))
            default = {} if declaration.default is MISSING else declaration.default
            path = f"{part}.{name}" if name in filled else ""
            yield Option(default=default, part=part, field=path, declared=(base, name), **facts)


def _kind_of_type(annotation: str) -> Kind:
    """Return the kind of values that a field's type allows, by the text of its annotation."""
    type_name = annotation.removeprefix("ClassVar[").removesuffix("]")
    if type_name in OF_TYPE:
        return OF_TYPE[type_name]

    return OF_TYPE[type_name.removesuffix(" | None")]


# The table: every field that is an option.
OPTIONS = (
    *_options("server", ServerConfig),
    *_options("model", ModelConfig),
    *_options("engine", EngineConfig),
)
BY_KEY = {key: option for option in OPTIONS for key in (option.key, *option.aliases)}


def find(key: str) -> Option | None:
    """Return the option of a key or alias of serving.properties, or None if it is not in the
    table.
    """
    return BY_KEY.get(key)


def is_of_server(key: str) -> bool:
    """Return whether an option belongs to the whole server, and not to a model of it."""
    option = find(key)
    return option is not None and option.part == "server"
