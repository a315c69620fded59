"""Compares an importable `tensorrt_llm` with the facts that the handler was written from.

A name or default that the facts have and the package lacks or changes is a difference. What only
the package has is none: the facts describe a part of it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from inspect import Parameter, Signature
from typing import Any

from tests.handlers.trtllm.facts import Callable, Class, Expression, Facts

OPEN = {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}


def export_differences(facts: Facts) -> Iterator[str]:
    for module, names in facts.exports.items():
        loaded = importlib.import_module(module)
        yield from (f"{module} has no {name}" for name in names if not hasattr(loaded, name))


def enum_differences(facts: Facts) -> Iterator[str]:
    for name, members in facts.enums.items():
        real = found(name)
        yield from (f"{name} has no {member}" for member in members if not hasattr(real, member))


def function_differences(facts: Facts) -> Iterator[str]:
    for name, fact in facts.functions.items():
        yield from callable_differences(name, fact, found(name))


def class_differences(name: str, fact: Class) -> Iterator[str]:
    real = found(name)
    bases = {base.__name__ for base in real.__mro__}
    yield from (f"{name} is no {base}" for base in fact.bases if base not in bases)
    if fact.parameters:
        yield from constructor_differences(name, fact, real)

    for method, expected in fact.methods.items():
        if hasattr(real, method):
            yield from callable_differences(f"{name}.{method}", expected, getattr(real, method))
        else:
            yield f"{name} has no method {method}"

    instance_names = names_of_instances(real)
    yield from (
        f"{name} has no attribute {attribute}"
        for attribute in fact.attributes
        if attribute not in instance_names
    )


def constructor_differences(name: str, fact: Class, real: type) -> Iterator[str]:
    """Of a pydantic model by its fields, of any other class by its signature, as far as
    it has one.
    """
    fields = getattr(real, "model_fields", None)
    if fields is None:
        constructor = signature_of(real)
        if constructor is not None:
            yield from parameter_differences(
                name, Signature([parameter.parameter for parameter in fact.parameters]), constructor
            )

        return

    if fact.extra == "forbid" and real.model_config.get("extra") != "forbid":  # type: ignore[attr-defined]
        yield f"{name} takes unknown fields"

    field_names = {alias for key, field in fields.items() for alias in (key, field.alias) if alias}
    yield from (
        f"{name} has no field {parameter.name}"
        for parameter in fact.parameters
        if parameter.name not in field_names
    )
    for parameter in fact.parameters:
        if parameter.name in fields and is_other(
            parameter.parameter.default, fields[parameter.name].get_default()
        ):
            yield f"{name}.{parameter.name} is {fields[parameter.name].get_default()!r} by default, not {parameter.default!r}"  # noqa: E501


def callable_differences(name: str, fact: Callable, real: Any) -> Iterator[str]:
    if fact.is_async != inspect.iscoroutinefunction(inspect.unwrap(real)):
        yield f"{name} is {'no' if fact.is_async else 'a'} coroutine function"

    if (signature := signature_of(real)) is not None:
        yield from parameter_differences(name, fact.signature, signature)


def parameter_differences(name: str, expected: Signature, real: Signature) -> Iterator[str]:
    """Every parameter of the facts can be given to the real callable in the same way and has the
    same default.
    """
    takes = {parameter.kind for parameter in real.parameters.values()}
    for key, parameter in expected.parameters.items():
        real_parameter = real.parameters.get(key)
        if real_parameter is None:
            if parameter.kind not in takes & OPEN and Parameter.VAR_KEYWORD not in takes:
                yield f"{name} has no parameter {key}"
        elif not is_givable(parameter, real_parameter):
            kind = real_parameter.kind.name.lower()
            yield f"{name}: {key} is {kind}, not {parameter.kind.name.lower()}"
        elif is_other(parameter.default, real_parameter.default):
            default = real_parameter.default
            yield f"{name}: {key} is {default!r} by default, not {parameter.default!r}"

    for key, real_parameter in real.parameters.items():
        if (
            key not in expected.parameters
            and real_parameter.default is Parameter.empty
            and real_parameter.kind not in OPEN
        ):
            yield f"{name} also needs {key}"


def is_givable(parameter: Parameter, other: Parameter) -> bool:
    """Positional or by keyword takes both; otherwise the kinds are the same."""
    return other.kind in (parameter.kind, Parameter.POSITIONAL_OR_KEYWORD)


def is_other(expected: Any, real: Any) -> bool:
    """Whether a default that the facts know is another one in the package."""
    if (
        expected is Parameter.empty
        or isinstance(expected, Expression)
        or type(real).__name__ == "PydanticUndefinedType"
    ):
        return False

    return (
        bool(real != expected)
        and getattr(real, "value", real) != expected
        and str(real) != str(expected)
    )


def names_of_instances(real: type) -> set[str]:
    """What instances have: members, fields, and what the methods of the class and its
    bases assign.
    """
    names = set(dir(real)) | set(getattr(real, "model_fields", ()))
    if dataclasses.is_dataclass(real):
        names |= {field.name for field in dataclasses.fields(real)}

    for base in real.__mro__[:-1]:
        names |= set(getattr(base, "__annotations__", ()))
        try:
            names |= set(re.findall(r"\bself\.(\w+)", inspect.getsource(base)))
        except (OSError, TypeError):
            # Compiled, or made without a file
            continue

    return names


def signature_of(real: Any) -> Signature | None:
    """The signature, or None of what is compiled and does not say it."""
    try:
        return inspect.signature(real)
    except (TypeError, ValueError):
        return None


def found(name: str) -> Any:
    """The object of a dotted name, through the longest module in it."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            member = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise

            continue

        for part in parts[end:]:
            member = getattr(member, part)

        return member

    raise ModuleNotFoundError(f"No module named {parts[0]!r}", name=parts[0])
