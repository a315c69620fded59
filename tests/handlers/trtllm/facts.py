"""What upstream publishes about TensorRT-LLM's Python surface: names, kinds, defaults, members; no
code.

    facts = load("main-2025-10")
    facts.signature("tensorrt_llm.LLM.generate_async").bind(llm, inputs, sampling_params=params)

`facts/{1.2,main}.json` were extracted once from the sources that they name, each with its commit.
Nobody has compared them with an installed package yet; `test_wheel.py` does, where there is one.
"""

from __future__ import annotations

import functools
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import msgspec

PROFILES = ("main-2025-10", "main-2026-08")
FOLDER = Path(__file__).with_name("facts")
KINDS = {kind.name.lower(): kind for kind in (
    Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL,
    Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD,
)}  # fmt: skip


class Source(msgspec.Struct, frozen=True):
    path: str
    # None for a later text of the same line, whose commit the store of texts does not say
    commit: str | None
    # Of the commit, as far as it is known
    date: str | None
    repository: str = "NVIDIA/TensorRT-LLM"


class Expression(msgspec.Struct, frozen=True):
    """A default that JSON cannot hold, as upstream writes it."""

    repr: str


class Fact(msgspec.Struct, frozen=True):
    """One parameter of a callable."""

    name: str
    kind: str
    default: Any = Parameter.empty
    annotation: str | None = None

    @property
    def parameter(self) -> Parameter:
        default = Expression(self.default["repr"]) if _is_expression(self.default) else self.default
        annotation = Parameter.empty if self.annotation is None else self.annotation
        return Parameter(self.name, KINDS[self.kind], default=default, annotation=annotation)


class Callable(msgspec.Struct, frozen=True):
    parameters: list[Fact]
    is_async: bool = False

    @property
    def signature(self) -> Signature:
        return signature(self.parameters)


class Class(msgspec.Struct, frozen=True):
    """`parameters` are those of the constructor, without self; of a method, with it."""

    module: str
    source: int
    parameters: list[Fact]
    methods: dict[str, Callable]
    attributes: list[str]
    # "forbid" where the constructor refuses an unknown keyword itself
    extra: str | None
    bases: list[str]

    @property
    def names(self) -> frozenset[str]:
        """All that an instance has."""
        return frozenset(self.attributes) | self.methods.keys()

    @property
    def keywords(self) -> frozenset[str]:
        return frozenset(fact.name for fact in self.parameters)


class Facts(msgspec.Struct, frozen=True):
    """One profile. Classes are named by the shortest public import that upstream has for them."""

    version: str
    sources: list[Source]
    classes: dict[str, Class]
    functions: dict[str, Callable]
    enums: dict[str, list[str]]
    exports: dict[str, list[str]]

    def cls(self, name: str) -> Class:
        return self.classes[name]

    def signature(self, name: str) -> Signature:
        """Of a class's constructor (no self), of "Class.method" (with self) or of a function.
        Raises KeyError.
        """
        if name in self.classes:
            return signature(self.classes[name].parameters)

        if name in self.functions:
            return self.functions[name].signature

        owner, _, method = name.rpartition(".")
        return self.classes[owner].methods[method].signature

    def find(self, module: str, name: str) -> str | None:
        """The class that `from module import name` gives, by its name here; None if it is not
        described.
        """
        for full_name, cls in self.classes.items():
            if full_name == f"{module}.{name}" or (
                cls.module == module and full_name.rsplit(".", 1)[1] == name
            ):
                return full_name

        by_name = [full_name for full_name in self.classes if full_name.rsplit(".", 1)[1] == name]
        return by_name[0] if name in self.exports.get(module, ()) and by_name else None


def _is_expression(default: object) -> bool:
    return isinstance(default, dict) and default.keys() == {"repr"}


def signature(parameters: list[Fact]) -> Signature:
    return Signature([fact.parameter for fact in parameters])


@functools.cache
def load(profile: str) -> Facts:
    """The facts of "main-2025-10" or "main-2026-08"."""
    return msgspec.json.decode((FOLDER / f"{profile}.json").read_bytes(), type=Facts)
