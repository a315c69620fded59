"""Calls the functions of user code, and looks at their parameters to see what they take."""

import asyncio
import inspect
from collections.abc import AsyncIterable, Awaitable, Callable, Generator
from typing import Any, NamedTuple

# All calls run in one event loop, to which locks and clients that the code keeps belong.
_runner = asyncio.Runner()


class FirstParameter(NamedTuple):
    """The first parameter of a function, with "" for what it lacks."""

    name: str = ""
    # The class alone: `Input` for `inputs.Input`, and `list` for `list[Input]`.
    annotation: str = ""


def call(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Return the result of the function, awaited if it is awaitable."""
    result = function(*args, **keywords)
    if not inspect.isawaitable(result):
        return result

    return _runner.run(_awaited(result))


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
    positional_kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    number = 0
    for parameter in _parameters(function):
        is_positional = parameter.kind in positional_kinds
        number += is_positional and parameter.default is parameter.empty

    return number


def first_parameter(function: Callable[..., Any]) -> FirstParameter:
    """Return what the first parameter of a function is called and annotated with."""
    parameters = _parameters(function)
    if not parameters:
        return FirstParameter()

    parameter = parameters[0]
    annotation = parameter.annotation
    if annotation is parameter.empty:
        text = ""
    elif isinstance(annotation, str):
        text = annotation
    else:
        text = str(getattr(annotation, "__name__", ""))

    without_arguments = text.partition("[")[0]
    return FirstParameter(parameter.name, without_arguments.rpartition(".")[2])


def accepted(function: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return those of the keyword arguments that a function takes beside its first parameter."""
    parameters = _parameters(function)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if takes_all:
        remaining = dict(keywords)
        if parameters:
            remaining.pop(parameters[0].name, None)

        return remaining

    names = [parameter.name for parameter in parameters[1:]]
    return {name: keywords[name] for name in names if name in keywords}


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result
