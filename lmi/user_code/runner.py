"""The functions of user code, as djl-serving calls them, and what they return. It knows nothing of
sockets or HTTP.

Source: the reference's public documentation of handlers and formatters.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import AsyncIterable, Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from email.message import Message
from email.parser import HeaderParser
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lmi.user_code import answer
from lmi.user_code.answer import ResponseAnswer, TokenAnswer, as_bytes, call, synchronous
from lmi.user_code.calls import Head, Open
from lmi.user_code.options import UserCodeConfig, is_built_in

if TYPE_CHECKING:
    from djl_python import Input, Output

COMPAT = Path(__file__).parent / "compat"  # holds only djl_python
UNUSED_MARKS = "is_init_handler", "is_prediction_handler"

NOT_HEADERS = frozenset(
    "content-type content-length transfer-encoding connection x-request-id".split()
)
HEADER_NAME, HEADER_VALUE = (
    re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"),
    re.compile(r"[\t -~\x80-\xff]*"),
)
WITHOUT_BODY = (204, 205, 304)

log = logging.getLogger(__name__)


class UserCode:
    """The functions of one file. Raises the file's exceptions, and LookupError for a function that
    is missing.

    `folder` has the model's tokenizer. `name` is the model's name for clients.
    """

    def __init__(self, config: UserCodeConfig, *, folder: str = ".", name: str = "model") -> None:
        module = _import(Path(config.path))
        self._handler_name = config.handler or ""
        self._handle = _named(module, self._handler_name) if config.handler else None
        self._output_formatter = _find(module, config.output_formatter, "is_output_formatter")
        self._input_formatter = _find(module, config.input_formatter, "is_input_formatter")
        for mark in UNUSED_MARKS:
            if (unused := _find(module, None, mark)) is not None:
                why = "it is for scikit-learn and XGBoost"
                log.warning("%s: %s is never called here, %s", config.path, unused.__name__, why)

        self._properties = dict(config.properties)
        self._tokenizer = LazyTokenizer(folder)
        self._name = name

    def begin(self) -> None:
        """Call the handler without content and with the options, so that it loads what it needs.

        If `entryPoint` names a service of the reference (`djl_python....`), its exceptions are only
        logged, because the reference hides them too.
        """
        if self._handle is None:
            return

        from djl_python import Input

        try:
            for _ in read_results(call(self._handle, Input(self._properties))):
                pass
        except Exception as error:
            if not is_built_in(self._properties.get("entryPoint", "")):
                raise

            log.error(
                "the first call of %s, without content, failed", self._handler_name, exc_info=error
            )

    def handle(
        self, properties: Mapping[str, str], query: Mapping[str, str], body: bytes
    ) -> Generator[Head | bytes]:
        """Yield the response's head, then its pieces as they are made. Closing it closes the code's
        generators.
        """
        from djl_python import Output

        assert self._handle is not None
        result = call(self._handle, _input(properties, body, query))
        head = None
        is_streaming = hasattr(result, "__aiter__") or isinstance(result, Generator)
        with closing(read_results(result)) as results:
            for output in results:
                if not isinstance(output, Output):
                    said = f"must return an Output or None, not {type(output).__name__}"
                    raise TypeError(f"{self._handler_name} {said}")

                if head is None:
                    yield (head := read_head(output, is_streaming=is_streaming))

                yield from read_pieces(output)

        if head is None:
            yield Head(204, "", {})

    def read_input(self, properties: Mapping[str, str], body: bytes) -> tuple[Any, bytes]:
        """Return what the input formatter made of a body, None if that is a dict, and the JSON of
        the request.
        """
        from djl_python.encode_decode import decode

        formatter = self._input_formatter
        argument = _input(properties, body)
        assert formatter is not None
        name, annotation = answer.first_parameter(formatter)
        if annotation.lower() == "dict" or name == "decoded_payload":
            argument = decode(argument, argument.get_property("content-type"))

        options = {
            "tokenizer": self._tokenizer,
            "properties": dict(self._properties),
            "configs": answer.Attributes(self._properties),
            "output_formatter": None,
        }
        request = call(formatter, argument, **answer.accepted(formatter, options))
        if isinstance(request, dict):
            return None, json.dumps(request).encode()

        return request, json.dumps(_request_fields(request)).encode()

    def answers(self, opened: Open, request: Any, request_id: int) -> list[TokenAnswer]:
        """Return the answer to each prompt. `request` is the object that `read_input` returned,
        None without one.
        """
        formatter = self._output_formatter
        assert formatter is not None
        kind = ResponseAnswer if answer.takes_responses(formatter) else TokenAnswer
        asked = (
            answer.request_input(request, opened, request_id, each, self._tokenizer)
            for each in opened.prompts
        )
        return [kind(formatter, opened, each, self._name) for each in asked]

    def respond(self, body: bytes, request: Any) -> bytes:
        """Rewrite a response of another API. It stays as it is if the output formatter reads
        tokens.
        """
        assert self._output_formatter is not None
        if not answer.takes_responses(self._output_formatter):
            return body

        return answer.format_response(self._output_formatter, body, request, self._tokenizer)


def load(config: UserCodeConfig, *, folder: str, name: str) -> UserCode:
    """Import the file. It finds djl_python and the modules beside it, and runs in `folder`."""
    for place in (str(COMPAT), folder, str(Path(config.path).parent)):
        if place not in sys.path:
            sys.path.insert(0, place)

    os.chdir(folder)
    return UserCode(config, folder=folder, name=name)


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, f"{path} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    return module


def _named(module: ModuleType, name: str) -> Callable[..., Any]:
    function: object = getattr(module, name, None)
    if not callable(function):
        raise LookupError(f"{module.__file__} has no function {name}")

    return function


def _find(module: ModuleType, name: str | None, mark: str) -> Callable[..., Any] | None:
    """Return the function of that name. Without a name it is the one that a decorator of djl_python
    marked, if any.
    """
    if name:
        return _named(module, name)

    return next(
        (value for value in vars(module).values() if callable(value) and hasattr(value, mark)), None
    )


def _input(
    properties: Mapping[str, str], body: bytes, query: Mapping[str, str] | None = None
) -> Input:
    """Make an Input: the body under `data`, or each part of a multipart body under its name, and
    the query's names.
    """
    from djl_python import Input
    from djl_python.pair_list import PairList

    content_type = next(
        (value for name, value in properties.items() if name.lower() == "content-type"), ""
    )
    parts = read_parts(body, content_type) if is_multipart(content_type) else [("data", body)]
    return Input(
        properties,
        PairList([*parts, *((name, value.encode()) for name, value in (query or {}).items())]),
    )


def _request_fields(request: Any) -> dict[str, Any]:
    """Return a RequestInput as a body of the LMI schema."""
    parameters = dict(
        request.parameters if request.server_parameters is None else request.server_parameters
    )
    fields = {
        "inputs": getattr(request, "input_text", None),
        "stream": parameters.pop("stream", None),
    }
    if callable(parameters.get("output_formatter")):
        del parameters["output_formatter"]

    adapters = {"adapters": request.adapters} if getattr(request, "adapters", None) else {}
    return fields | {"parameters": parameters} | adapters


def read_results(result: Any) -> Generator[object]:
    """Yield a handler's result, or each item of its generator. An item is finalized after it was
    used.
    """
    if hasattr(result, "__aiter__"):
        result = synchronous(result)
    elif not isinstance(result, Generator):
        result = (item for item in (result,) if item is not None)

    with closing(result) as items:
        for item in items:
            try:
                yield item
            finally:
                if (finalize := getattr(item, "finalizer", None)) is not None:
                    finalize()

            if getattr(item, "is_last", False):
                return


def read_head(output: Output, *, is_streaming: bool) -> Head:
    """Return the head of an Output's response. Raises ValueError for values that HTTP
    cannot carry.
    """
    headers = {str(name): str(value) for name, value in output.properties.items()}
    given = next((value for name, value in headers.items() if name.lower() == "content-type"), None)
    status = _status(output.code)
    is_streaming = (
        is_streaming or output.stream_content is not None
    ) and status not in WITHOUT_BODY
    has_body = is_streaming or not output.content.is_empty()
    media_type = given or output.media_type or ("application/octet-stream" if has_body else "")
    others = {name: value for name, value in headers.items() if name.lower() not in NOT_HEADERS}
    for name, value in [
        ("content-type", media_type),
        *others.items(),
    ]:  # RFC 9110, sections 5.1 and 5.5
        if not HEADER_NAME.fullmatch(name):
            raise ValueError(f"an Output's property must have a header's name, given {name!r}")

        if not HEADER_VALUE.fullmatch(value):
            raise ValueError(
                f"an Output's property {name} must be one line of Latin-1 characters, given "
                f"{value!r}"
            )

    return Head(status, media_type, others, is_streaming)


def read_pieces(output: Output) -> Iterator[bytes]:
    """Yield the body, piece by piece if it is a stream."""
    if _status(output.code) in WITHOUT_BODY:
        return

    if output.stream_content is None:
        if (data := output.content.get()) is not None:
            yield data

        return

    write = output.stream_formatter or (lambda item: item)
    items = output.stream_content
    for item in synchronous(items) if isinstance(items, AsyncIterable) else items:
        yield as_bytes(write(item))


def _status(code: Any) -> int:
    with suppress(TypeError, ValueError):
        if 200 <= int(code) <= 599:
            return int(code)

    raise ValueError(f"an Output's code must be an HTTP status from 200 to 599, given {code!r}")


class LazyTokenizer:
    """Replaces transformers' tokenizer of a model folder. The first use raises the exceptions of
    loading it.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look for such names on this object
            raise AttributeError(name)

        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._tokenizer(*args, **named)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __bool__(self) -> bool:
        return True


def is_multipart(content_type: str) -> bool:
    return content_type.strip().lower().startswith("multipart/form-data")


def read_parts(body: bytes, content_type: str) -> list[tuple[str, bytes]]:
    """Return the name and bytes of each part, including files, in order. Raises ValueError for a
    malformed body.
    """
    boundary = _message("content-type: " + content_type).get_boundary()
    if not boundary:
        raise ValueError("the content type of a multipart body must name its boundary")

    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"))
    if len(pieces) == 1:
        raise ValueError(f"the multipart body has no line with its boundary, {boundary!r}")

    if not pieces[-1].startswith(b"--"):
        raise ValueError("the multipart body ends before its last boundary")

    parts = []
    for piece in pieces[1:-1]:
        padding, line_end, part = piece.partition(b"\r\n")
        if not line_end or padding.strip(b" \t"):
            raise ValueError("a boundary of the multipart body does not end its line")

        head, head_end, content = (b"\r\n" + part).partition(b"\r\n\r\n")
        name = _message(head.decode(errors="replace").lstrip()).get_param(
            "name", header="content-disposition"
        )
        if not head_end or not isinstance(name, str):
            raise ValueError("a part of the multipart body has no name")

        parts.append((name, content))

    return parts


def _message(head: str) -> Message:
    return HeaderParser().parsestr(head)
