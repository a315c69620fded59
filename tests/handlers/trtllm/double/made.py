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

        known = fact.names | fact.keywords
        body: dict[str, Any] = {
            one: value
            for one, value in vars(behaviour).items()
            if one in known or (one[0] == "_" and one not in HIDDEN)
        }
        for method, one in fact.methods.items():
            if method in body and not method.startswith("__"):
                body[method] = _with_signature(one.signature, body[method])

        body |= {
            "__module__": fact.module,
            "__qualname__": short_name,
            "_maker": self,
            "_known": known,
        }
        if short_name != "RequestOutput":
            body["__init__"] = _constructor(self.facts.signature(name), short_name)

        body["__setattr__"] = _refuse_unknown
        made = type(short_name, (), body)
        for inner in (one for one in self.facts.classes if one.startswith(f"{name}.")):
            setattr(made, inner.rpartition(".")[2], self.made(inner.rpartition(".")[2]))

        return made


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
        given = _bound(signature, name, args, more)
        if hasattr(self, "_begin"):
            self._begin(given)
            return

        for one, value in given.items():
            setattr(self, one, value)

        if hasattr(self, "__post_init__"):
            self.__post_init__()

    return __init__


def _with_signature(signature: Signature, function: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which takes arguments as the facts say, and gets them by name."""
    if list(signature.parameters) == ["self"]:
        return function

    def method(self: Any, *args: Any, **more: Any) -> Any:
        given = _bound(signature, function.__name__, (self, *args), more)
        del given["self"]
        return function(self, **given)

    method.__signature__ = signature  # type: ignore[attr-defined]
    return method


def _bound(
    signature: Signature, name: str, args: tuple[Any, ...], more: dict[str, Any]
) -> dict[str, Any]:
    try:
        bound = signature.bind(*args, **more)
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None

    given = dict(bound.arguments)
    for one, parameter in signature.parameters.items():
        if one not in given and parameter.default is not Parameter.empty:
            given[one] = (
                None if isinstance(parameter.default, Expression) else deepcopy(parameter.default)
            )

    return given


def _refuse_unknown(self: Any, name: str, value: object) -> None:
    if not name.startswith("_") and name not in self._known:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    object.__setattr__(self, name, value)
