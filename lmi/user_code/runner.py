"""User code: `handle` and formatters, in a file as djl-serving runs it.

UserCode finds the functions in the file, gives them the objects that they expect and reads what they return. It knows
nothing of sockets or HTTP, and passes on the code's exceptions. Source: the reference's public documentation of
handlers and formatters.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from email.message import Message
from email.parser import HeaderParser
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lmi.settings.config import UserCodeConfig
from lmi.settings.kinds import is_built_in
from lmi.user_code.answer import Attributes, UserAnswers, format_response, takes_responses
from lmi.user_code.messages import Open
from lmi.user_code.response import ResponseHead, check_output, read_head, read_pieces, read_results
from lmi.user_code.signatures import accepted, call, first_annotation, first_name

if TYPE_CHECKING:
    from djl_python import Input, Output

COMPAT = Path(__file__).parent / "compat"  # holds only djl_python
UNUSED_MARKS = dict.fromkeys(("is_init_handler", "is_prediction_handler"), "it is for scikit-learn and XGBoost")

log = logging.getLogger(__name__)


class UserCode:
    """The functions of one file. Raises the file's exceptions, and LookupError for a function that is missing.

    `folder` has the model's tokenizer. `name` is the model's name for clients.
    """

    def __init__(self, config: UserCodeConfig, *, folder: str = ".", name: str = "model") -> None:
        module = _import(Path(config.path))
        self._handle = _named(module, config.handler) if config.handler else None
        self._handler_name = config.handler or ""
        self._output_formatter = _find(module, config.output_formatter, "is_output_formatter")
        self._input_formatter = _find(module, config.input_formatter, "is_input_formatter")
        for mark, reason in UNUSED_MARKS.items():
            if (unused := _find(module, None, mark)) is not None:
                log.warning("%s: %s is never called here, %s", config.path, unused.__name__, reason)
        self._properties = dict(config.properties)
        self._tokenizer = LazyTokenizer(folder)
        self._name = name

    def begin(self) -> None:
        """Call the handler without content and with the options, so that it loads what it needs.

        If `entryPoint` names a service of the reference (`djl_python....`), its exceptions are only logged, because the
        reference hides them too.
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
            log.error("the first call of %s, without content, failed", self._handler_name, exc_info=error)

    @contextmanager
    def handle(
        self, properties: Mapping[str, str], query: Mapping[str, str], body: bytes
    ) -> Iterator[tuple[ResponseHead, Iterator[bytes]]]:
        """Yield the response's head, and its pieces as they are made. Leaving the block closes the generators."""
        assert self._handle is not None
        result = call(self._handle, _input(properties, body, query))
        with closing(read_results(result)) as results:
            outputs = (check_output(each, self._handler_name) for each in results)
            first = next(outputs, None)
            if first is None:
                yield ResponseHead(204, "", {}), iter(())
                return
            head = read_head(first, is_streaming=hasattr(result, "__aiter__") or isinstance(result, Generator))
            with closing(_all_pieces(first, outputs)) as pieces:
                yield head, pieces

    def read_input(self, properties: Mapping[str, str], body: bytes) -> tuple[Any, bytes]:
        """Return the object that the input formatter returned for a body, and the JSON of the request.

        The object is None if the formatter returned a dict, which is then the request.
        """
        assert self._input_formatter is not None
        argument = self._formatter_argument(_input(properties, body))
        options = {
            "tokenizer": self._tokenizer,
            "properties": dict(self._properties),
            "configs": Attributes(self._properties),
            "output_formatter": None,
        }
        request = call(self._input_formatter, argument, **accepted(self._input_formatter, options))
        if isinstance(request, dict):
            return None, json.dumps(request).encode()
        return request, json.dumps(_request_fields(request)).encode()

    def _formatter_argument(self, given: Input) -> Any:
        """Return the Input, or the decoded body for an input formatter that asks for it."""
        from djl_python.encode_decode import decode

        formatter = self._input_formatter
        assert formatter is not None
        wants_dict = first_annotation(formatter).lower() == "dict" or first_name(formatter) == "decoded_payload"
        return decode(given, given.get_property("content-type")) if wants_dict else given

    def answers(self, opened: Open, request: Any) -> UserAnswers:
        """Return the answers to one body. `request` is the object that `read_input` returned."""
        assert self._output_formatter is not None
        return UserAnswers(self._output_formatter, opened, request, self._name, self._tokenizer)

    def respond(self, body: bytes, request: Any) -> bytes:
        """Rewrite a response of another API. It stays as it is if the output formatter reads tokens."""
        assert self._output_formatter is not None
        if not takes_responses(self._output_formatter):
            return body
        return format_response(self._output_formatter, json.loads(body), request, self._tokenizer)


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
    """Return the function of that name. Without a name it is the one that a decorator of djl_python marked, if any."""
    if name is not None:
        return _named(module, name)
    return next((value for value in vars(module).values() if callable(value) and hasattr(value, mark)), None)


def _input(properties: Mapping[str, str], body: bytes, query: Mapping[str, str] | None = None) -> Input:
    """Make an Input: the body under `data`, or each part of a multipart body under its name, and the query's names."""
    from djl_python import Input
    from djl_python.pair_list import PairList

    content_type = next((value for name, value in properties.items() if name.lower() == "content-type"), "")
    parts = read_parts(body, content_type) if is_multipart(content_type) else [("data", body)]
    return Input(properties, PairList([*parts, *((name, value.encode()) for name, value in (query or {}).items())]))


def _all_pieces(first: Output, others: Iterator[Output]) -> Generator[bytes]:
    yield from read_pieces(first)
    for output in others:
        yield from read_pieces(output)


def _request_fields(request: Any) -> dict[str, Any]:
    """Return a RequestInput as a body of the LMI schema."""
    parameters = dict(request.parameters if request.server_parameters is None else request.server_parameters)
    fields = {"inputs": getattr(request, "input_text", None), "stream": parameters.pop("stream", None)}
    if callable(parameters.get("output_formatter")):
        del parameters["output_formatter"]
    adapters = {"adapters": request.adapters} if getattr(request, "adapters", None) else {}
    return fields | {"parameters": parameters} | adapters


class LazyTokenizer:
    """Replaces transformers' tokenizer of a model folder. The first use raises the exceptions of loading it."""

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


def is_multipart(content_type: str | None) -> bool:
    return content_type is not None and content_type.strip().lower().startswith("multipart/form-data")


def read_parts(body: bytes, content_type: str) -> list[tuple[str, bytes]]:
    """Return the name and bytes of each part, including files, in order. Raises ValueError for a malformed body."""
    boundary = _message("content-type: " + content_type).get_boundary()
    if not boundary:
        raise ValueError("the content type of a multipart body must name its boundary")
    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"))
    if len(pieces) == 1:
        raise ValueError(f"the multipart body has no line with its boundary, {boundary!r}")
    if not pieces[-1].startswith(b"--"):
        raise ValueError("the multipart body ends before its last boundary")
    return list(map(_part, _without_padding(pieces[1:-1])))


def _without_padding(pieces: list[bytes]) -> Iterator[bytes]:
    """Yield the pieces without the rest of the boundary's line, which may hold only blanks."""
    for piece in pieces:
        padding, line_end, part = piece.partition(b"\r\n")
        if not line_end or padding.strip(b" \t"):
            raise ValueError("a boundary of the multipart body does not end its line")
        yield b"\r\n" + part


def _part(part: bytes) -> tuple[str, bytes]:
    head, head_end, content = part.partition(b"\r\n\r\n")
    name = _message(head.decode(errors="replace").lstrip()).get_param("name", header="content-disposition")
    if not head_end or not isinstance(name, str):
        raise ValueError("a part of the multipart body has no name")
    return name, content


def _message(head: str) -> Message:
    return HeaderParser().parsestr(head)
