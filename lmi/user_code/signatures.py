"""Reads the parameters of user functions, and calls the functions, asynchronous or not."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, Awaitable, Callable, Generator
from typing import Any

_runner = asyncio.Runner()  # one event loop for all calls: locks and clients that the code keeps belong to it


def call(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Return the result of the function, awaited if it is awaitable."""
    result = function(*args, **named)
    return _runner.run(_awaited(result)) if inspect.isawaitable(result) else result


def synchronous(items: AsyncIterable[Any]) -> Generator[Any]:
    """Yield the items of an asynchronous iterator. Closing the generator closes the iterator."""
    iterator = aiter(items)
    try:
        while True:
            try:
                yield _runner.run(_awaited(anext(iterator)))
            except StopAsyncIteration:
                return
    finally:
        if hasattr(iterator, "aclose"):
            _runner.run(_awaited(iterator.aclose()))


def num_required(function: Callable[..., Any]) -> int:
    """Return the number of positional parameters without a default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in _parameters(function))


def first_annotation(function: Callable[..., Any]) -> str:
    """Return the last name of the first parameter's annotation (`Input` for `inputs.Input`), "" if there is none."""
    for parameter in _parameters(function)[:1]:
        if parameter.annotation is not parameter.empty:
            annotation = parameter.annotation
            name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
            return str(name).partition("[")[0].rpartition(".")[2]
    return ""


def first_name(function: Callable[..., Any]) -> str | None:
    return next((parameter.name for parameter in _parameters(function)), None)


def accepted(function: Callable[..., Any], named: dict[str, Any]) -> dict[str, Any]:
    """Return the named arguments that the function takes besides its first parameter."""
    parameters = _parameters(function)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    first = {parameter.name for parameter in parameters[:1]}
    if takes_all:
        return {name: value for name, value in named.items() if name not in first}
    return {p.name: named[p.name] for p in parameters[1:] if p.name in named}


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result
