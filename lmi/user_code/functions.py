"""How the functions of user code are called, and what their parameters say that they take."""

import asyncio
import inspect
from collections.abc import AsyncIterable, Awaitable, Callable, Generator
from typing import Any

# All calls run in one event loop, to which locks and clients that the code keeps belong.
_runner = asyncio.Runner()


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


def first_parameter(function: Callable[..., Any]) -> tuple[str, str]:
    """Return the name of the first parameter, and the last name of its annotation, or "" for each.

    The last name of `inputs.Input` is `Input`.
    """
    parameters = _parameters(function)
    if not parameters:
        return "", ""

    parameter = parameters[0]
    annotation = parameter.annotation
    if annotation is parameter.empty:
        text = ""
    elif isinstance(annotation, str):
        text = annotation
    else:
        text = str(getattr(annotation, "__name__", ""))

    # `list[Input]` is named by `list`, and `inputs.Input` by `Input`.
    without_arguments = text.partition("[")[0]
    return parameter.name, without_arguments.rpartition(".")[2]


def accepted(function: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that the function takes besides its first parameter."""
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
