"""Code of a model's own: `handle`, and formatters, as files written for djl-serving have them.

Runs in a process of its own (`lmi/custom/worker.py`), one call at a time. This module finds the functions in the file,
gives them the objects that they expect and reads what they return; it knows nothing of sockets or HTTP. Everything
that user code raises passes through as it is. Source: the reference's public documentation of handlers and formatters.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from handlers.attributes import Attributes
from handlers.lazy_tokenizer import LazyTokenizer
from handlers.multipart import is_multipart, read_parts
from handlers.python_answer import Answers, Opened, as_bytes, format_response, takes_responses
from handlers.signatures import accepted, call, first_annotation, first_name, synchronous

COMPAT = Path(__file__).parent / "compat"
NOT_HEADERS = frozenset("content-type content-length transfer-encoding connection x-request-id".split())
HEADER_NAME, HEADER_VALUE = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"), re.compile(r"[\t -~\x80-\xff]*")
WITHOUT_BODY = (204, 205, 304)
UNUSED_MARKS = dict.fromkeys(("is_init_handler", "is_prediction_handler"), "it is for scikit-learn and XGBoost")
BUILT_IN = "djl_python."  # begins an entryPoint that names a service of the reference

log = logging.getLogger(__name__)


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
    """The functions of one file. Raises what the file raises, LookupError for a function that is not there.

    `properties` are the options of the model, `folder` has its tokenizer, `name` is what clients call it.
    """

    def __init__(
        self,
        path: str,
        functions: Functions,
        properties: Mapping[str, str] | None = None,
        *,
        folder: str = ".",
        name: str = "model",
    ) -> None:
        module = _import(Path(path))
        self._handle = _named(module, functions.handler) if functions.handler else None
        self._handler_name = functions.handler or ""
        self._output_formatter = _find(module, functions.output_formatter, "is_output_formatter")
        self._input_formatter = _find(module, functions.input_formatter, "is_input_formatter")
        for mark in UNUSED_MARKS:
            if (unused := _find(module, None, mark)) is not None:
                log.warning("%s: %s is never called here, %s", path, unused.__name__, UNUSED_MARKS[mark])
        self._properties = dict(properties or {})
        self._tokenizer = LazyTokenizer(folder)
        self._name = name

    def begin(self) -> None:
        """The call without content, but with the options, that lets a handler load what it needs.

        Beside a service of the reference (`entryPoint=djl_python....`) a handler need not expect it: the reference
        hides what it raises there, so it is logged, and the requests call the handler as they would have.
        """
        if self._handle is None:
            return
        from djl_python import Input

        try:
            for _ in _outputs(call(self._handle, Input(self._properties))):
                pass
        except Exception as error:
            if not self._properties.get("entryPoint", "").startswith(BUILT_IN):
                raise
            log.error("the first call of %s, without content, failed", self._handler_name, exc_info=error)

    def handle(self, properties: Mapping[str, str], query: Mapping[str, str], body: bytes) -> Iterator[Head | bytes]:
        """The answer to one request: its head, then its pieces as they are made. Close it when nobody listens."""
        assert self._handle is not None
        result = call(self._handle, _input(properties, body, query))
        with closing(_outputs(result)) as outputs:
            first = next(outputs, None)
            if first is None:
                yield Head(204, "", {})
                return
            _check_type(first, self._handler_name)
            yield _head(first, is_streaming=hasattr(result, "__aiter__"))
            yield from _pieces(first)
            for output in outputs:
                _check_type(output, self._handler_name)
                yield from _pieces(output)

    def read_input(self, properties: Mapping[str, str], body: bytes) -> tuple[Any, bytes]:
        """What the input formatter makes of a body: its own object, None where it is the body's own, and the JSON."""
        from djl_python.encode_decode import decode

        formatter = self._input_formatter
        assert formatter is not None
        given = _input(properties, body)
        wants_dict = first_annotation(formatter).lower() == "dict" or first_name(formatter) == "decoded_payload"
        argument = decode(given, given.get_property("content-type")) if wants_dict else given
        options = {
            "tokenizer": self._tokenizer,
            "properties": dict(self._properties),
            "configs": Attributes(self._properties),
            "output_formatter": None,
        }
        request = call(formatter, argument, **accepted(formatter, options))
        if isinstance(request, dict):
            return None, json.dumps(request).encode()
        return request, json.dumps(_request_fields(request)).encode()

    def answers(self, opened: Opened, request: Any) -> Answers:
        """The answers to one body, whose `request` `read_input` has returned."""
        assert self._output_formatter is not None
        return Answers(self._output_formatter, opened, request, self._name, self._tokenizer)

    def respond(self, body: bytes, request: Any) -> bytes:
        """A response of another form, through an output formatter that takes such; else it stays as it is."""
        assert self._output_formatter is not None
        if not takes_responses(self._output_formatter):
            return body
        return format_response(self._output_formatter, json.loads(body), request, self._tokenizer)


def load(path: str, functions: Functions, properties: Mapping[str, str], folder: str, name: str) -> PythonModel:
    """The file with djl_python's names importable, its own folder too, and `folder` as the current one."""
    for place in (str(COMPAT), folder, str(Path(path).parent)):
        if place not in sys.path:
            sys.path.insert(0, place)
    os.chdir(folder)
    return PythonModel(path, functions, properties, folder=folder, name=name)


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
    """The body under `data`, or each part of a multipart one under its name, and each name of the query."""
    from djl_python import Input
    from djl_python.pair_list import PairList

    content_type = next((value for name, value in properties.items() if name.lower() == "content-type"), "")
    parts = read_parts(body, content_type) if is_multipart(content_type) else [("data", body)]
    return Input(properties, PairList([*parts, *((name, value.encode()) for name, value in (query or {}).items())]))


def _outputs(result: Any) -> Generator[Any, None, None]:
    """What a handler has returned, or each thing that its asynchronous generator yields, finished when it was used."""
    items: Any = synchronous(result) if hasattr(result, "__aiter__") else iter(() if result is None else (result,))
    with closing(items) if hasattr(items, "close") else nullcontext():
        for item in items:
            try:
                yield item
            finally:
                _finish(item)
            if getattr(item, "is_last", False):
                return


def _check_type(output: Any, name: str) -> None:
    from djl_python import Output

    if not isinstance(output, Output):
        raise TypeError(f"{name} must return an Output or None, not {type(output).__name__}")


def _head(output: Any, *, is_streaming: bool) -> Head:
    """Raises ValueError for what HTTP cannot carry."""
    headers = {str(name): str(value) for name, value in output.properties.items()}
    given = next((value for name, value in headers.items() if name.lower() == "content-type"), None)
    media_type = given or output.media_type or ""
    others = {name: value for name, value in headers.items() if name.lower() not in NOT_HEADERS}
    status = _status(output.code)
    for name, value in [("content-type", media_type), *others.items()]:
        _check_header(name, value)
    is_streaming = is_streaming or output.stream_content is not None
    return Head(status, media_type, others, is_streaming and status not in WITHOUT_BODY)


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
    for item in synchronous(items) if hasattr(items, "__aiter__") else items:
        yield as_bytes(write(item))


def _finish(output: Any) -> None:
    if output is not None and getattr(output, "finalizer", None) is not None:
        output.finalizer()


def _request_fields(request: Any) -> dict[str, Any]:
    """A RequestInput in the words of the LMI schema."""
    parameters = dict(request.parameters if request.server_parameters is None else request.server_parameters)
    fields = {"inputs": getattr(request, "input_text", None), "stream": parameters.pop("stream", None)}
    if callable(parameters.get("output_formatter")):
        del parameters["output_formatter"]
    adapters = {"adapters": request.adapters} if getattr(request, "adapters", None) else {}
    return fields | {"parameters": parameters} | adapters
