"""Code of a model's own: `handle`, and formatters, as files written for djl-serving have them.

Runs in a process of its own (`lmi/custom/worker.py`), one call at a time. This module finds the functions in the file,
gives them the objects that they expect and reads what they return; it knows nothing of sockets or HTTP. Everything
that user code raises passes through as it is. Source: the reference's public documentation of handlers and formatters.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

COMPAT = Path(__file__).parent / "compat"
JSON = "application/json"
NOT_HEADERS = frozenset("content-type content-length transfer-encoding connection x-request-id".split())
HEADER_NAME, HEADER_VALUE = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"), re.compile(r"[\t -~\x80-\xff]*")
WITHOUT_BODY = (204, 205, 304)
NUM_LEGACY_PARAMETERS = 6  # token, first_token, last_token, details, generated_tokens, id
NO_TOKEN = (-1, "", None, True)

TokenFields = tuple[int, str, float | None, bool]


class Head(NamedTuple):
    """The beginning of an answer: what its status line and headers say. `media_type` "": it does not say."""

    status: int
    media_type: str
    headers: dict[str, str]
    is_streaming: bool = False


@dataclass(frozen=True)
class Functions:
    """Which functions of the file are used; None: the one with the decorator's mark, if there is one."""

    handler: str | None = None
    output_formatter: str | None = None
    input_formatter: str | None = None


class PythonModel:
    """The functions of one file. Raises what the file raises, LookupError for a function that is not there."""

    def __init__(self, path: str, functions: Functions) -> None:
        module = _import(Path(path))
        self._handle = _named(module, functions.handler) if functions.handler else None
        self._output_formatter = _find(module, functions.output_formatter, "is_output_formatter")
        self._input_formatter = _find(module, functions.input_formatter, "is_input_formatter")

    def begin(self, properties: Mapping[str, str]) -> None:
        """The call without content that lets a handler load what it needs."""
        if self._handle is not None:
            from djl_python import Input

            _finish(_call(self._handle, Input(properties)))

    def handle(self, properties: Mapping[str, str], query: Mapping[str, str], body: bytes) -> Iterator[Head | bytes]:
        """The answer to one request: its head, then its pieces as they are made. Close it when nobody listens."""
        from djl_python import Output

        assert self._handle is not None
        output = _call(self._handle, _input(properties, body, query))
        if output is None:
            yield Head(204, "", {})
            return
        if not isinstance(output, Output):
            raise TypeError(f"{self._handle.__name__} must return an Output or None, not {type(output).__name__}")
        try:
            yield _head(output)
            yield from _pieces(output)
        finally:
            _finish(output)

    def read_input(self, properties: Mapping[str, str], body: bytes) -> bytes:
        """The request that the input formatter makes of a body, as the JSON of the LMI schema."""
        from djl_python.encode_decode import decode

        formatter = self._input_formatter
        assert formatter is not None
        given = _input(properties, body)
        wants_dict = _first_annotation(formatter) in (dict, "dict") or _first_name(formatter) == "decoded_payload"
        argument = decode(given, given.get_property("content-type")) if wants_dict else given
        request = _call(formatter, argument, **_accepted(formatter, {"tokenizer": None, "output_formatter": None}))
        return json.dumps(request if isinstance(request, dict) else _request_fields(request)).encode()

    def answer(self, request_id: int, prompt: str, parameters: Mapping[str, Any]) -> CustomAnswer:
        assert self._output_formatter is not None
        return CustomAnswer(self._output_formatter, request_id, prompt, parameters)


class CustomAnswer:
    """One answer on its way through the output formatter."""

    def __init__(
        self, formatter: Callable[..., Any], request_id: int, prompt: str, parameters: Mapping[str, Any]
    ) -> None:
        from djl_python.request_io import Sequence, TextGenerationOutput, TextInput

        self._formatter = formatter
        self._is_legacy = _num_required(formatter) == NUM_LEGACY_PARAMETERS
        request = TextInput(request_id=request_id, parameters=dict(parameters), input_text=prompt)
        self._sequence = Sequence()
        self._output = TextGenerationOutput(request_id, request, sequences={0: self._sequence})
        self._prompt = prompt
        self._text: list[str] = []

    def feed(self, tokens: Iterable[TokenFields], finish_reason: str | None) -> bytes:
        """What the formatter writes for these tokens. It is called once for each, until all are read."""
        tokens = list(tokens) or ([NO_TOKEN] if finish_reason is not None else [])
        self._take(tokens, finish_reason)
        written = []
        while self._sequence.has_next_token():
            num_read = self._sequence._next
            written.append(_as_bytes(self._format()))
            if self._sequence._next == num_read:  # it looks at whole answers and reads no tokens
                self._sequence._next = len(self._sequence.tokens)
        return b"".join(written)

    def _take(self, tokens: list[TokenFields], finish_reason: str | None) -> None:
        from djl_python.request_io import Token

        for token_id, text, log_prob, is_special in tokens:
            self._sequence.tokens.append(Token(token_id, text, log_prob, is_special))
            self._sequence.cumulative_log_prob += log_prob or 0.0
        self._sequence.finish_reason = finish_reason
        self._output.finished = finish_reason is not None

    def _format(self) -> Any:
        if not self._is_legacy:
            return _call(self._formatter, self._output)
        token, is_first, is_last = self._sequence.get_next_token()
        self._text.append(token.text)
        details = {
            "finish_reason": self._sequence.finish_reason if is_last else None,
            "generated_tokens": self._sequence._next,
            "inputs": self._prompt,
            "tokens": [read.as_dict() for read in self._sequence.tokens[: self._sequence._next]],
        }
        return _call(self._formatter, token, is_first, is_last, details, "".join(self._text), self._output.request_id)


def load(path: str, functions: Functions, folder: str) -> PythonModel:
    """The file with djl_python's names importable, its own folder too, and `folder` as the current one."""
    for place in (str(COMPAT), folder, str(Path(path).parent)):
        if place not in sys.path:
            sys.path.insert(0, place)
    os.chdir(folder)
    return PythonModel(path, functions)


def _import(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, f"{path} is no Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module


def _named(module: Any, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if not callable(function):
        raise LookupError(f"{module.__file__} has no function {name}")
    return function  # type: ignore[no-any-return]


def _find(module: Any, name: str | None, mark: str) -> Callable[..., Any] | None:
    if name is not None:
        return _named(module, name)
    return next((value for value in vars(module).values() if callable(value) and hasattr(value, mark)), None)


def _input(properties: Mapping[str, str], body: bytes, query: Mapping[str, str] | None = None) -> Any:
    """The body under `data`, each name of the query beside it."""
    from djl_python import Input
    from djl_python.pair_list import PairList

    return Input(
        properties, PairList([("data", body), *((name, value.encode()) for name, value in (query or {}).items())])
    )


def _call(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    result = function(*args, **named)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def _head(output: Any) -> Head:
    """Raises ValueError for what HTTP cannot carry."""
    headers = {str(name): str(value) for name, value in output.properties.items()}
    given = next((value for name, value in headers.items() if name.lower() == "content-type"), None)
    media_type = given or output.media_type or ""
    others = {name: value for name, value in headers.items() if name.lower() not in NOT_HEADERS}
    status = _status(output.code)
    for name, value in [("content-type", media_type), *others.items()]:
        _check_header(name, value)
    return Head(status, media_type, others, output.stream_content is not None and status not in WITHOUT_BODY)


def _status(code: Any) -> int:
    with suppress(TypeError, ValueError):
        if 200 <= int(code) <= 599:
            return int(code)
    raise ValueError(f"an Output's code must be an HTTP status from 200 to 599, given {code!r}")


def _check_header(name: str, value: str) -> None:
    """Source: RFC 9110, sections 5.1 and 5.5."""
    if not HEADER_NAME.fullmatch(name):
        raise ValueError(f"an Output's property must have a header's name, given {name!r}")
    if not HEADER_VALUE.fullmatch(value):
        raise ValueError(f"an Output's property {name} must be one line of Latin-1 characters, given {value!r}")


def _pieces(output: Any) -> Iterator[bytes]:
    if _status(output.code) in WITHOUT_BODY:
        return
    if output.stream_content is None:
        if (data := output.content.get()) is not None:
            yield data
        return
    write = output.stream_formatter or (lambda item: item)
    items = output.stream_content
    for item in _synchronous(items) if hasattr(items, "__aiter__") else items:
        yield _as_bytes(write(item))


def _synchronous(items: Any) -> Iterator[Any]:
    """An asynchronous iterator's items, on an event loop of its own."""
    iterator = aiter(items)
    with asyncio.Runner() as runner:
        while True:
            try:
                yield runner.run(_awaited(anext(iterator)))
            except StopAsyncIteration:
                return


def _finish(output: Any) -> None:
    if output is not None and getattr(output, "finalizer", None) is not None:
        output.finalizer()


def _as_bytes(written: Any) -> bytes:
    if written is None:
        return b""
    if isinstance(written, bytes | bytearray | memoryview):
        return bytes(written)
    return written.encode() if isinstance(written, str) else json.dumps(written, ensure_ascii=False).encode()


def _request_fields(request: Any) -> dict[str, Any]:
    """A RequestInput in the words of the LMI schema."""
    parameters = dict(request.parameters if request.server_parameters is None else request.server_parameters)
    fields = {"inputs": getattr(request, "input_text", None), "stream": parameters.pop("stream", None)}
    if callable(parameters.get("output_formatter")):
        del parameters["output_formatter"]
    return fields | {"parameters": parameters}


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _num_required(function: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in _parameters(function))


def _first_annotation(function: Callable[..., Any]) -> Any:
    return next((parameter.annotation for parameter in _parameters(function)), None)


def _first_name(function: Callable[..., Any]) -> str | None:
    return next((parameter.name for parameter in _parameters(function)), None)


def _accepted(function: Callable[..., Any], named: dict[str, Any]) -> dict[str, Any]:
    """Those that the function takes by name."""
    parameters = _parameters(function)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return named if takes_all else {p.name: named[p.name] for p in parameters[1:] if p.name in named}
