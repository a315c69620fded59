"""Writes the fake package `tensorrt_llm`: thin modules with the facts' classes, and the models of
arguments as text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.handlers.trtllm.double.kinds import is_dataclass, is_written
from tests.handlers.trtllm.double.lines import LINES
from tests.handlers.trtllm.facts import Class, Fact, Facts, load

# The folder from which `tests` is imported
ROOT = Path(__file__).parents[4]
ARGUMENTS = "tensorrt_llm.llmapi.llm_args"
MADE = """
import sys

if {root!r} not in sys.path:
    sys.path.append({root!r})

from tests.handlers.trtllm.double.made import Maker

MAKER = Maker({profile!r})
"""
TYPING = "from typing import Any, Dict, List, Literal, Optional, Tuple, Union\n"
MODELS = """
from enum import Enum
{typing}
from pydantic import BaseModel, ConfigDict


class StrictBaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())
"""
TYPES = {"Any", "Dict", "List", "Literal", "Optional", "Tuple", "Union"}
TYPES |= {"int", "float", "str", "bool", "dict", "list", "tuple", "bytes", "object", "None"}


def write_double(folder: Path, profile: str) -> Path:
    """Write the package of a line, as "main-2025-10", into a folder. Returns the folder, for
    sys.path or PYTHONPATH.
    """
    facts = load(LINES[profile].name)
    version = LINES[profile].version
    texts = dict(_modules(facts, profile, version))
    for name, text in texts.items():
        is_package = any(full_name.startswith(f"{name}.") for full_name in texts)
        path = folder.joinpath(*name.split("."))
        path = path / "__init__.py" if is_package else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip())

    about = folder / f"tensorrt_llm-{version}.dist-info" / "METADATA"
    about.parent.mkdir(parents=True, exist_ok=True)
    about.write_text(f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {version}\n")
    return folder


def _modules(facts: Facts, profile: str, version: str) -> Iterator[tuple[str, str]]:
    """The name and the text of each module."""
    names = {*facts.exports, *(fact.module for fact in facts.classes.values()), ARGUMENTS}
    names |= {name.rpartition(".")[0] for name in facts.enums}
    parents = {
        ".".join(name.split(".")[:end]) for name in names for end in range(1, name.count(".") + 1)
    }
    yield "tensorrt_llm._made", MADE.format(root=str(ROOT), profile=profile)
    for name in names | parents:
        text = _arguments(facts) if name == ARGUMENTS else _plain(facts, name)
        yield (
            name,
            f"from tensorrt_llm._made import MAKER\n{text}"
            + f"__version__ = {version!r}\n" * ("." not in name),
        )


def _plain(facts: Facts, module: str) -> str:
    """A module: the classes that it defines, and those that it exports from others."""
    homes = {name.rpartition(".")[2]: fact.module for name, fact in facts.classes.items()}
    enums = {name.rpartition(".")[2]: _home_of_enum(name) for name in facts.enums}
    exported = [name for name in facts.exports.get(module, ()) if name[:1].isupper()]
    homed = [name for name, home in homes.items() if home == module and facts.find(module, name)]
    text = "".join(_enum(name, facts) for name in enums if enums[name] == module)
    functions = [name.rpartition(".") for name in facts.functions]
    text += "".join(
        f"def {name}():\n    return MAKER.line.{name}\n\n\n"
        for home, _, name in functions
        if home == module
    )
    for name in dict.fromkeys([*homed, *exported]):
        home = (homes | enums).get(name)
        if home == module and is_dataclass(facts, name):
            text += _dataclass(name, facts)
        elif home == module and name in homes:
            text += f"{name} = MAKER.made({name!r})\n"
        elif home is not None and home != module:
            text += f"from {home} import {name}\n"
        elif home is None:
            text += f"{name} = MAKER.unknown({name!r})\n"

    return text


def _home_of_enum(name: str) -> str:
    module = name.rpartition(".")[0]
    return ARGUMENTS if module == "tensorrt_llm.llmapi" else module


def _enum(name: str, facts: Facts) -> str:
    [members] = [
        members_found for full, members_found in facts.enums.items() if full.endswith(f".{name}")
    ]
    lines = "".join(f"    {member} = {member!r}\n" for member in members)
    return f"\n\nfrom enum import Enum\nclass {name}(str, Enum):\n{lines}\n\n"


def _dataclass(name: str, facts: Facts) -> str:
    [fact] = [fact for full, fact in facts.classes.items() if full.endswith(f".{name}")]
    fields = "".join(f"    {_field(parameter, TYPES)}\n" for parameter in fact.parameters)
    if fact.extra == "forbid":
        return f"{MODELS.format(typing=TYPING)}\n\nclass {name}(StrictBaseModel):\n{fields}\n\n"

    for literal, kind in (("[]", "list"), ("{}", "dict")):
        fields = fields.replace(f"= {literal}\n", f"= field(default_factory={kind})\n")

    return (
        f"{TYPING}from dataclasses import dataclass, "
        f"field\n\n\n@dataclass(kw_only=True)\nclass "
        f"{name}:\n{fields}\n\n"
    )


def _arguments(facts: Facts) -> str:
    """The text of the strict models, those that others name first."""
    models = {
        name.rpartition(".")[2]: fact for name, fact in facts.classes.items() if is_written(fact)
    }
    enums = [name.rpartition(".")[2] for name in facts.enums if _home_of_enum(name) == ARGUMENTS]
    text = MODELS.format(typing=TYPING) + "".join(_enum(name, facts) for name in enums)
    plain = [
        name.rpartition(".")[2]
        for name in facts.classes
        if is_dataclass(facts, name.rpartition(".")[2])
    ]
    text += "".join(
        f"from {fact.module} import {class_name}\n"
        for class_name in plain
        for n, fact in facts.classes.items()
        if n.endswith(f".{class_name}")
    )
    for name in _ordered(models):
        fields = "".join(
            f"    {_field(class_name, TYPES | {*models, *enums, *plain})}\n"
            for class_name in models[name].parameters
        )
        base = (
            models[name].bases[0]
            if models[name].bases[:1] and models[name].bases[0] in models
            else "StrictBaseModel"
        )
        text += f"\n\nclass {name}({base}):\n{fields or '    pass' + chr(10)}"

    facts_shown = {
        name.rpartition(".")[2]: fact
        for name, fact in facts.classes.items()
        if not is_written(fact)
    }
    names_here = [name for name, fact in facts_shown.items() if fact.module == ARGUMENTS]
    return text + "".join(f"\n\n{name} = MAKER.made({name!r})\n" for name in names_here)


def _ordered(models: dict[str, Class]) -> list[str]:
    done: list[str] = []

    def add(name: str) -> None:
        if name in done:
            return

        names_used = {
            name_used for field in models[name].parameters for name_used in _names(field.annotation)
        } | {*models[name].bases}
        for model_name in sorted((names_used & models.keys()) - {name}):
            add(model_name)

        done.append(name)

    for name in models:
        add(name)

    return done


def _field(fact: Fact, known: Iterable[str]) -> str:
    """The line of a field, e.g. `max_beam_width: Optional[int] = None`. A type that is not
    described is Any.
    """
    names = _names(fact.annotation)
    kind = fact.annotation if fact.annotation and names <= {*known} else "Any"
    default: Any = fact.parameter.default
    if default is fact.parameter.empty:
        return f"{fact.name}: {kind}"

    default_text = repr(default) if not hasattr(default, "repr") else default.repr
    if hasattr(default, "repr") and not _names(default_text) <= {*known}:
        default_text = "None"
        kind = "Any"

    return f"{fact.name}: {kind} = {default_text}"


def _names(text: str | None) -> set[str]:
    tree = ast.parse(text or "None")
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | (
        {"."} if any(isinstance(node, ast.Attribute) for node in ast.walk(tree)) else set()
    )
