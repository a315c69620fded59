"""Makes the package's classes: their fields and signatures are the facts, and what they do is this
folder's.

A call that the facts do not know is a TypeError, as upstream. An attribute that they do not know is
an AttributeError.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from copy import deepcopy
from inspect import Parameter, Signature
from typing import Any

from tests.handlers.trtllm.double import llm, results, values
from tests.handlers.trtllm.double.kinds import is_dataclass, is_written
from tests.handlers.trtllm.double.lines import LINES, Line
from tests.handlers.trtllm.facts import Expression, Facts, load

BEHAVIOURS: dict[str, type] = {
    "LLM": llm.LLM,
    "RequestOutput": results.RequestOutput,
    "SamplingParams": values.SamplingParams,
    "GuidedDecodingParams": values.GuidedDecodingParams,
    "LoRARequest": values.LoRARequest,
    "KvCacheRetentionConfig": values.KvCacheRetentionConfig,
}


class Maker:
    """The classes of one profile, each made once."""

    def __init__(self, profile: str) -> None:
        self.line: Line = LINES[profile]
        self.facts: Facts = load(self.line.name)
        self._by_short_name = {name.rpartition(".")[2]: name for name in self.facts.classes}
        self._made: dict[str, type] = {}

    def made(self, short_name: str) -> Any:
        """A class by the last part of its name. One that is written as text is read from its
        module.
        """
        name = self._by_short_name[short_name]
        if is_written(self.facts.cls(name)) or is_dataclass(self.facts, short_name):
            return getattr(importlib.import_module(self.facts.cls(name).module), short_name)

        if short_name not in self._made:
            self._made[short_name] = self._make(name, short_name)

        return self._made[short_name]

    def unknown(self, name: str) -> type:
        """A class that upstream exports and the facts do not describe: it can be imported and
        nothing else.
        """

        def refuse(self: object, *args: object, **more: object) -> None:
            raise NotImplementedError(f"the facts do not describe {name}")

        return type(name, (), {"__init__": refuse})

    def _make(self, name: str, short_name: str) -> type:
        fact = self.facts.cls(name)
        behaviour = BEHAVIOURS.get(short_name, object)
        if fact.bases:
            [base] = fact.bases
            return type(
                short_name, (vars(sys.modules["builtins"])[base],), {"__module__": fact.module}
            )

        names_known = fact.names | fact.keywords
        body: dict[str, Any] = {
            field_name: value
            for field_name, value in vars(behaviour).items()
            if field_name in names_known or (field_name[0] == "_" and field_name not in HIDDEN)
        }
        for method, field_name in fact.methods.items():
            if method in body and not method.startswith("__"):
                body[method] = _with_signature(field_name.signature, body[method])

        body |= {
            "__module__": fact.module,
            "__qualname__": short_name,
            "_maker": self,
            "_known": names_known,
        }
        if short_name != "RequestOutput":
            body["__init__"] = _constructor(self.facts.signature(name), short_name)

        body["__setattr__"] = _refuse_unknown
        new_class = type(short_name, (), body)
        for inner in (
            field_name for field_name in self.facts.classes if field_name.startswith(f"{name}.")
        ):
            setattr(new_class, inner.rpartition(".")[2], self.made(inner.rpartition(".")[2]))

        return new_class


HIDDEN = {
    "__module__",
    "__dict__",
    "__weakref__",
    "__doc__",
    "__annotations__",
    "__qualname__",
    "__firstlineno__",
}


def _constructor(signature: Signature, name: str) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **more: Any) -> None:
        bound_arguments = _bound(signature, name, args, more)
        if hasattr(self, "_begin"):
            self._begin(bound_arguments)
            return

        for parameter_name, value in bound_arguments.items():
            setattr(self, parameter_name, value)

        if hasattr(self, "__post_init__"):
            self.__post_init__()

    return __init__


def _with_signature(signature: Signature, function: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which takes arguments as the facts say, and gets them by name."""
    if list(signature.parameters) == ["self"]:
        return function

    def method(self: Any, *args: Any, **more: Any) -> Any:
        bound_arguments = _bound(signature, function.__name__, (self, *args), more)
        del bound_arguments["self"]
        return function(self, **bound_arguments)

    method.__signature__ = signature  # type: ignore[attr-defined]
    return method


def _bound(
    signature: Signature, name: str, args: tuple[Any, ...], more: dict[str, Any]
) -> dict[str, Any]:
    try:
        bound = signature.bind(*args, **more)
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None

    arguments_given = dict(bound.arguments)
    for parameter_name, parameter in signature.parameters.items():
        if parameter_name not in arguments_given and parameter.default is not Parameter.empty:
            arguments_given[parameter_name] = (
                None if isinstance(parameter.default, Expression) else deepcopy(parameter.default)
            )

    return arguments_given


def _refuse_unknown(self: Any, name: str, value: object) -> None:
    if not name.startswith("_") and name not in self._known:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    object.__setattr__(self, name, value)
