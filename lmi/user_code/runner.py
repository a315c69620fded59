"""The functions of user code, as djl-serving calls them, and what they return. It knows nothing of
sockets or HTTP.

Source: the reference's public documentation of handlers and formatters.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from lmi.user_code.answer import (
    Attributes,
    ResponseAnswer,
    TokenAnswer,
    format_response,
    request_input,
    takes_responses,
)
from lmi.user_code.calls import AdapterCode, Head, Open
from lmi.user_code.functions import accepted, call, first_parameter
from lmi.user_code.multipart import content_type_of, is_multipart, read_parts
from lmi.user_code.options import UserCodeConfig, is_built_in
from lmi.user_code.outputs import read_head, read_pieces, read_results

if TYPE_CHECKING:
    from djl_python import Input

# The folder that has only djl_python in it.
COMPAT = Path(__file__).parent / "compat"
UNUSED_MARKS = ("is_init_handler", "is_prediction_handler")

log = logging.getLogger(__name__)


class Formatters(NamedTuple):
    """The functions of one file that read the requests and write the answers."""

    read: Callable[..., Any] | None = None
    write: Callable[..., Any] | None = None

    @classmethod
    def of(
        cls, module: ModuleType, input_name: str | None = None, output_name: str | None = None
    ) -> Self:
        """Find them by name, or by the decorators of djl_python."""
        read = _find(module, input_name, "is_input_formatter")
        write = _find(module, output_name, "is_output_formatter")
        return cls(read, write)


class UserCode:
    """The functions of one file. Raises the file's exceptions, and LookupError for a function that
    is missing.

    `folder` has the model's tokenizer. `name` is the model's name for clients.
    """

    def __init__(self, config: UserCodeConfig, *, folder: str = ".", name: str = "model") -> None:
        self._handler_name = config.handler or ""
        self._handle: Callable[..., Any] | None = None
        self._formatters = Formatters()
        # Of each name the adapter whose code was imported last.
        self._of_adapters: dict[str, tuple[AdapterCode, Formatters]] = {}
        if config.path:
            self._load(config)

        self._properties = dict(config.properties)
        self._tokenizer = LazyTokenizer(folder)
        self._name = name

    def _load(self, config: UserCodeConfig) -> None:
        path = Path(config.path)
        module = _import(path, path.stem)
        if config.handler:
            self._handle = _named(module, config.handler)

        self._formatters = Formatters.of(module, config.input_formatter, config.output_formatter)
        for mark in UNUSED_MARKS:
            unused = _find(module, None, mark)
            if unused is not None:
                reason = "it is for scikit-learn and XGBoost"
                log.warning("%s: %s is never called here, %s", config.path, unused.__name__, reason)

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
        is_streaming = hasattr(result, "__aiter__") or isinstance(result, Generator)
        head = None
        with closing(read_results(result)) as results:
            for output in results:
                if not isinstance(output, Output):
                    fault = f"must return an Output or None, not {type(output).__name__}"
                    raise TypeError(f"{self._handler_name} {fault}")

                if head is None:
                    head = read_head(output, is_streaming=is_streaming)
                    yield head

                yield from read_pieces(output)

        if head is None:
            yield Head(204, "", {})

    def load_code(self, adapter: AdapterCode) -> list[str]:
        """Import the code of an adapter. Returns the kinds of its formatters."""
        formatters = self._code_of(adapter)
        kinds = {"input_formatter": formatters.read, "output_formatter": formatters.write}
        return [kind for kind, formatter in kinds.items() if formatter is not None]

    def _code_of(self, adapter: AdapterCode) -> Formatters:
        """Return the formatters in the code of an adapter, which is imported once."""
        code, formatters = self._of_adapters.get(adapter.name, (None, Formatters()))
        if code == adapter:
            return formatters

        module = _import(Path(adapter.path), f"adapter_{adapter.name}_{adapter.written_ns}")
        formatters = Formatters.of(module)
        self._of_adapters[adapter.name] = (adapter, formatters)
        return formatters

    def _formatters_for(self, adapter: AdapterCode | None) -> Formatters:
        """Return the formatters of a request: the adapter's, and the model's where it has none."""
        if adapter is None:
            return self._formatters

        formatters = self._code_of(adapter)
        return Formatters(
            formatters.read or self._formatters.read,
            formatters.write or self._formatters.write,
        )

    def read_input(
        self, properties: Mapping[str, str], body: bytes, adapter: AdapterCode | None = None
    ) -> tuple[Any, bytes]:
        """Return the object that the input formatter made of a body, and the JSON of the request.

        The object is None if the formatter made a dict.
        """
        from djl_python.encode_decode import decode

        formatter = self._formatters_for(adapter).read
        argument = _input(properties, body)
        assert formatter is not None

        parameter = first_parameter(formatter)
        if parameter.annotation.lower() == "dict" or parameter.name == "decoded_payload":
            argument = decode(argument, argument.get_property("content-type"))

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

    def answers(self, opened: Open, request: Any, request_id: int) -> list[TokenAnswer]:
        """Return the answer to each prompt. `request` is the object that `read_input` returned,
        None without one.
        """
        formatter = self._formatters_for(opened.adapter).write
        assert formatter is not None
        kind = ResponseAnswer if takes_responses(formatter) else TokenAnswer

        answers: list[TokenAnswer] = []
        for prompt in opened.prompts:
            text_input = request_input(request, opened, request_id, prompt, self._tokenizer)
            answers.append(kind(formatter, opened, text_input, self._name))

        return answers

    def respond(self, body: bytes, request: Any, adapter: AdapterCode | None = None) -> bytes:
        """Rewrite a response of another API. It stays as it is if the output formatter reads
        tokens.
        """
        formatter = self._formatters_for(adapter).write
        assert formatter is not None
        if not takes_responses(formatter):
            return body

        return format_response(formatter, body, request, self._tokenizer)


def load(config: UserCodeConfig, *, folder: str, name: str) -> UserCode:
    """Import the file. It finds djl_python and the modules beside it, and runs in `folder`."""
    entries = [str(COMPAT), folder]
    if config.path:
        entries.append(str(Path(config.path).parent))

    for entry in entries:
        if entry not in sys.path:
            sys.path.insert(0, entry)

    os.chdir(folder)
    return UserCode(config, folder=folder, name=name)


def _import(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"{path} is not a Python file"

    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickle look the module up there.
    sys.modules[name] = module
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

    for value in vars(module).values():
        if callable(value) and hasattr(value, mark):
            function: Callable[..., Any] = value
            return function

    return None


def _input(
    properties: Mapping[str, str], body: bytes, query: Mapping[str, str] | None = None
) -> Input:
    """Make an Input of a request.

    Its content is the body under `data`, or each part of a multipart body under its name, and then
    each value of the query under its name.
    """
    from djl_python import Input
    from djl_python.pair_list import PairList

    content_type = content_type_of(properties) or ""
    pairs: list[tuple[str | None, Any]] = [("data", body)]
    if is_multipart(content_type):
        pairs = [*read_parts(body, content_type)]

    for name, value in (query or {}).items():
        pairs.append((name, value.encode()))

    return Input(properties, PairList(pairs))


def _request_fields(request: Any) -> dict[str, Any]:
    """Return a RequestInput as a body of the LMI schema."""
    parameters = request.server_parameters
    if parameters is None:
        parameters = request.parameters

    parameters = dict(parameters)
    fields = {
        "inputs": getattr(request, "input_text", None),
        "stream": parameters.pop("stream", None),
        "parameters": parameters,
    }
    if callable(parameters.get("output_formatter")):
        del parameters["output_formatter"]

    if getattr(request, "adapters", None):
        fields["adapters"] = request.adapters

    return fields


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
        # copy and pickle look for such names on this object.
        if name.startswith("__"):
            raise AttributeError(name)

        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._tokenizer(*args, **keywords)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __bool__(self) -> bool:
        return True
