"""A package with only the argument classes of TensorRT-LLM, as published, so that options can be tested in a moment.

`tensorrt_llm/llmapi/llm_args.py` is written from the facts as source text with pydantic classes, as upstream's file is.
"""

from __future__ import annotations

import ast
import builtins
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from inspect import Parameter
from pathlib import Path
from types import ModuleType

from tests.handlers.trtllm import facts
from tests.handlers.trtllm.facts import Expression, Fact

OURS = "handlers.lmi_trtllm."
KNOWN = {*vars(builtins), "NoneType"}
INDENTED_PASS = "    pass\n"
HEAD = """\
from enum import Enum
from types import NoneType
from typing import Any, Dict, List, Literal, Optional, Union

from pydantic import BaseModel, ConfigDict


class Named(str, Enum):
    @classmethod
    def _missing_(cls, value):
        return cls.__members__.get(str(value).upper())  # the facts have names, and not their values


class StrictBaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True)
"""


def write_package(folder: Path, profile: str, prelude: str = "") -> Path:
    """Write the package into `folder`, and return its own folder. `prelude` is run as it is imported."""
    package = folder / "tensorrt_llm"
    (package / "llmapi").mkdir(parents=True)
    (package / "__init__.py").write_text(f"{prelude}\n")
    (package / "llmapi" / "__init__.py").write_text("from tensorrt_llm.llmapi.llm_args import TorchLlmArgs\n")
    (package / "llmapi" / "llm_args.py").write_text(argument_source(profile))
    return package


def argument_source(profile: str) -> str:
    """The source text of the file of LLM's arguments, less its comments and validators."""
    published = facts.load(profile)
    classes = {name.rsplit(".", 1)[1]: cls.parameters for name, cls in published.classes.items()}
    enums = {name.rsplit(".", 1)[1]: members for name, members in published.enums.items()}
    written: dict[str, str] = {}
    _write("TorchLlmArgs", classes, enums, written)
    *nested, arguments = written.values()
    return "\n\n".join([HEAD, *nested, "class BaseLlmArgs(StrictBaseModel):\n    pass\n", arguments])


def _write(name: str, classes: dict[str, list[Fact]], enums: dict[str, list[str]], written: dict[str, str]) -> None:
    """Write the text of a class after those that its fields have. A class of which nothing is published takes all."""
    if name in written:
        return
    if name in enums:
        written[name] = f"class {name}(Named):\n" + "".join(f"    {one} = {one!r}\n" for one in enums[name])
    elif name not in classes:
        written[name] = f"class {name}(StrictBaseModel):\n    model_config = ConfigDict(extra='allow')\n"
    else:
        for fact in classes[name]:
            for other in sorted(_names(fact.annotation or "Any")):
                _write(other, classes, enums, written)
        base = "BaseLlmArgs" if name == "TorchLlmArgs" else "StrictBaseModel"
        fields = "".join(f"    {_field(fact)}\n" for fact in classes[name])
        written[name] = f"class {name}({base}):\n{fields or INDENTED_PASS}"


def _names(annotation: str) -> set[str]:
    names = {node.id for node in ast.walk(ast.parse(annotation)) if isinstance(node, ast.Name)}
    return {name for name in names if name not in KNOWN and not hasattr(typing, name)}


def _field(fact: Fact) -> str:
    if fact.default is Parameter.empty:
        return f"{fact.name}: {fact.annotation or 'Any'}"
    given = fact.parameter.default
    default = given.repr if isinstance(given, Expression) else repr(given)
    return f"{fact.name}: {fact.annotation or 'Any'} = {default}"


@contextmanager
def arguments_module(folder: Path, profile: str) -> Iterator[ModuleType]:
    """`handlers.lmi_trtllm.arguments`, imported against the package of a profile. Afterwards nothing of it is left."""
    write_package(folder, profile)
    sys.path.insert(0, str(folder))
    try:
        yield import_module(f"{OURS}arguments")
    finally:
        sys.path.remove(str(folder))
        for name in [*sys.modules]:
            if name.partition(".")[0] == "tensorrt_llm" or name == f"{OURS}arguments":
                del sys.modules[name]
