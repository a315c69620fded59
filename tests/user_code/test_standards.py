"""Code for AWS's model-hosting-container-standards in this process: the real package, and a server
behind it that answers what a test says.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

standards = pytest.importorskip("model_hosting_container_standards", reason="scripts/install hooks")

from lmi.user_code.calls import WINDOW, Drop, End, Taken  # noqa: E402
from lmi.user_code.standards import calls  # noqa: E402
from lmi.user_code.standards.app import build, kept_logging  # noqa: E402
from lmi.user_code.standards.calls import (  # noqa: E402
    AppStart,
    AskServer,
    Part,
    Serve,
    ServerReply,
    StopAsking,
)
from lmi.user_code.standards.conversation import RunningRequest  # noqa: E402
from lmi.user_code.standards.engine_client import completion  # noqa: E402
from lmi.user_code.standards.worker import COMPAT, import_early  # noqa: E402

JSON = (b"content-type", b"application/json")


@dataclass
class Reply:
    """What came back to the client, and what the app asked the server for it."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    asked: list[AskServer] = field(default_factory=list)
    num_stopped: int = 0
    error: str = ""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Code:
    """A folder with code, and the app that the package makes of it."""

    folder: Path
    # By path: what the server answers, as chunks.
    answers: dict[str, list[bytes]] = field(default_factory=dict)
    status_of_server: int = 200
    # Where the server does not answer.
    silent_paths: set[str] = field(default_factory=set)
    # Whether the server's answers go on after their last chunk.
    is_answer_endless: bool = False

    def load(self, script: str = "model.py") -> calls.Doors:
        self.app, self.doors = build(
            str(self.folder / script),
            str(self.folder),
            model_folder=str(self.folder),
            name="model",
        )
        return self.doors

    def write(self, source: str, name: str = "model.py") -> None:
        (self.folder / name).write_text(source)

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        query: bytes = b"",
    ) -> Reply:
        """Send a request through the app. Bytes go as they are, anything else as JSON."""
        data = b""
        if isinstance(body, bytes):
            data = body
        elif body is not None:
            data = json.dumps(body).encode()

        fields = [(name.lower().encode(), text.encode()) for name, text in (headers or {}).items()]
        request = Serve(method, path, query, fields, data, ("127.0.0.1", 1))
        return asyncio.run(self._answered(request))

    async def _answered(self, request: Serve) -> Reply:
        reply = Reply()

        def take(message: calls.ToFrontEnd) -> None:
            match message:
                case AppStart():
                    reply.status = message.status
                    reply.headers = {
                        name.decode(): value.decode() for name, value in message.headers
                    }
                case bytes():
                    reply.body += message
                    call.take(Taken())
                case End():
                    reply.error = "" if message.error is None else message.error.message
                case AskServer():
                    reply.asked.append(message)
                    self._answer(message, call)
                case StopAsking():
                    reply.num_stopped += 1

        call = RunningRequest(request, take, lambda: None)
        await call.run(self.app)
        return reply

    def _answer(self, ask: AskServer, call: RunningRequest) -> None:
        if ask.path in self.silent_paths:
            return

        chunks = self.answers.get(ask.path, [b'{"source": "server"}'])
        call.take(ServerReply(ask.number, self.status_of_server, [JSON]))
        for number, chunk in enumerate(chunks, 1):
            is_last = number == len(chunks) and not self.is_answer_endless
            call.take(Part(ask.number, chunk, is_last))


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Code]:
    """The package keeps all that code registers in the process: none of it is left over."""
    # Its import sets the level of the whole process's log.
    with kept_logging():
        from model_hosting_container_standards.common.fastapi.middleware import middleware_registry
        from model_hosting_container_standards.common.fastapi.middleware.source import (
            decorator_loader,
        )
        from model_hosting_container_standards.common.handler import handler_registry
        from model_hosting_container_standards.sagemaker.sagemaker_loader import (
            SageMakerFunctionLoader,
        )

    monkeypatch.setenv("SAGEMAKER_MODEL_PATH", "")
    monkeypatch.setenv("CUSTOM_SCRIPT_FILENAME", "")

    def clear() -> None:
        handler_registry.clear()
        decorator_loader.clear()
        middleware_registry.clear_middlewares()
        SageMakerFunctionLoader._default_function_loader = None

    clear()
    yield Code(tmp_path)
    clear()


BOTH = """
import model_hosting_container_standards.sagemaker as sagemaker_standards


@sagemaker_standards.custom_ping_handler
async def decorated_ping():
    return {"source": "decorator"}


async def custom_sagemaker_ping_handler():
    return {"source": "function"}


async def custom_sagemaker_invocation_handler():
    return {"source": "function"}


async def named():
    return {"source": "variable"}


class Handlers:
    @staticmethod
    async def method():
        return {"source": "method"}
"""


def test_a_decorator_counts_before_a_function_of_the_fixed_name(code: Code) -> None:
    code.write(BOTH)
    doors = code.load()

    assert code.ask("GET", "/ping").json == {"source": "decorator"}
    assert code.ask("POST", "/invocations", {}).json == {"source": "function"}
    assert sorted(doors.routes) == [("GET", "/ping"), ("POST", "/invocations")]
    assert not doors.takes_all


@pytest.mark.parametrize(
    ("spec", "source"),
    [
        ("model:named", "variable"),
        ("model.py:named", "variable"),
        ("{folder}/model.py:named", "variable"),
        ("model.py:Handlers.method", "method"),
        ("other.py:elsewhere", "other file"),
        ("/v1/models", "server"),
    ],
)
def test_a_variable_counts_before_both_in_each_of_its_forms(
    code: Code, monkeypatch: pytest.MonkeyPatch, spec: str, source: str
) -> None:
    code.write(BOTH)
    code.write("async def elsewhere():\n    return {'source': 'other file'}\n", "other.py")
    spec = spec.format(folder=code.folder)
    monkeypatch.setenv("CUSTOM_FASTAPI_PING_HANDLER", spec)
    monkeypatch.setenv("CUSTOM_FASTAPI_INVOCATION_HANDLER", spec)
    doors = code.load()

    for method, path in (("GET", "/ping"), ("POST", "/invocations")):
        assert (method, path) in doors.routes
        reply = code.ask(method, path, {"a": 1} if method == "POST" else None)
        assert reply.json == {"source": source}
        assert [ask.path for ask in reply.asked] == (["/v1/models"] if source == "server" else [])


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("CUSTOM_FASTAPI_PING_HANDLER", "model:absent"),
        ("CUSTOM_FASTAPI_PING_HANDLER", "absent.py:f"),
        ("CUSTOM_FASTAPI_INVOCATION_HANDLER", "no_such_module:f"),
        ("CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE", "model:absent"),
        ("CUSTOM_FASTAPI_MIDDLEWARE_PRE_POST_PROCESS", "/a/path"),
        ("CUSTOM_PRE_PROCESS", "model:text"),
        ("CUSTOM_POST_PROCESS", "neither"),
    ],
)
def test_a_variable_that_names_nothing_keeps_the_app_from_loading(
    code: Code, monkeypatch: pytest.MonkeyPatch, name: str, spec: str
) -> None:
    code.write("text = 'no function'\n")
    monkeypatch.setenv(name, spec)
    with pytest.raises(Exception, match=r"not found|Failed to import|not callable|must be|pattern"):
        code.load()


@pytest.mark.parametrize("source", ["def f(:\n", "import nowhere\n", "raise ValueError('no')\n"])
def test_a_script_that_cannot_be_imported_keeps_the_app_from_loading(
    code: Code, source: str
) -> None:
    code.write(source)
    with pytest.raises((SyntaxError, ImportError, ValueError)):
        code.load()


def test_without_a_script_all_is_the_server_s(code: Code) -> None:
    doors = code.load()
    assert (doors.routes, doors.takes_all) == ([], False)

    for method, path in (("GET", "/ping"), ("POST", "/invocations"), ("DELETE", "/adapters/a")):
        reply = code.ask(method, path, {"a": 1} if method == "POST" else None)
        assert reply.json == {"source": "server"}
        assert (reply.asked[0].method, reply.asked[0].path) == (method, path)


def test_a_request_that_no_handler_takes_reaches_the_server_as_it_came(code: Code) -> None:
    code.load()
    reply = code.ask("POST", "/v1/x%20y", b"\x00\xff", {"X-A": "b", "x-a": "c"}, b"q=1&q=2")
    (asked,) = reply.asked
    assert (asked.method, asked.path, asked.query) == ("POST", "/v1/x%20y", b"q=1&q=2")
    assert asked.body == b"\x00\xff"
    assert asked.headers[-1] == (b"x-a", b"c")


def test_a_long_answer_comes_whole_though_each_side_sends_a_window(code: Code) -> None:
    code.load()
    chunks = [b"%d," % number for number in range(3 * WINDOW)]
    code.answers["/long"] = chunks
    assert code.ask("GET", "/long").body == b"".join(chunks)


# Middlewares.

ORDERED = """
import json

from fastapi import Request
from fastapi.responses import JSONResponse
from model_hosting_container_standards.common.fastapi.middleware import (
    custom_middleware,
    input_formatter,
    output_formatter,
)
import model_hosting_container_standards.sagemaker as sagemaker_standards

order = []


@custom_middleware("throttle")
class Throttle:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        order.append("throttle")
        await self.app(scope, receive, send)


@input_formatter
async def pre(request: Request):
    order.append("pre")
    if request.url.path == "/invocations":
        body = await request.json()
        request._body = json.dumps(body | {"seen": True}).encode()

    return request


@output_formatter
async def post(response):
    order.append("post")
    response.headers["x-post"] = "decorator"
    return response


async def other_post(response):
    response.headers["x-post"] = "variable"


@sagemaker_standards.custom_invocation_handler
async def invoke(request: Request):
    order.append("handler")
    return {"body": await request.json(), "order": order}
"""


def test_a_throttle_comes_first_then_the_halves_around_the_handler(code: Code) -> None:
    code.write(ORDERED)
    doors = code.load()
    reply = code.ask("POST", "/invocations", {"a": 1})

    assert doors.takes_all
    assert reply.json == {"body": {"a": 1, "seen": True}, "order": ["throttle", "pre", "handler"]}
    assert reply.headers["x-post"] == "decorator"
    assert code.ask("GET", "/anything").headers["x-post"] == "decorator"


def test_halves_that_variables_name_replace_the_decorated_ones(
    code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    code.write(ORDERED)
    monkeypatch.setenv("CUSTOM_POST_PROCESS", "model:other_post")
    code.load()
    reply = code.ask("POST", "/invocations", {"a": 1})
    assert reply.headers["x-post"] == "variable"
    assert reply.json["body"] == {"a": 1}, "nor does the decorated half before it run"


def test_a_route_in_custom_attributes_passes_the_throttle_and_not_the_handler(code: Code) -> None:
    code.write(ORDERED)
    code.load()
    headers = {"X-Amzn-SageMaker-Custom-Attributes": "a=b; route=/v1/completions"}
    reply = code.ask("POST", "/invocations", {"a": 1}, headers)
    assert reply.asked[0].path == "/v1/completions"
    assert reply.headers["x-post"] == "decorator"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('@custom_middleware("other")\nasync def f(request, call_next): ...', "not allowed"),
        (
            '@custom_middleware("throttle")\nasync def f(request, call_next): ...\n'
            '@custom_middleware("throttle")\nasync def g(request, call_next): ...',
            "already registered",
        ),
        (
            "@input_formatter\nasync def f(request): ...\n"
            "@input_formatter\nasync def g(request): ...",
            "already registered",
        ),
    ],
)
def test_a_middleware_that_the_package_refuses_keeps_the_app_from_loading(
    code: Code, source: str, said: str
) -> None:
    names = "custom_middleware, input_formatter"
    package = "model_hosting_container_standards.common.fastapi.middleware"
    code.write(f"from {package} import {names}\n{source}\n")
    with pytest.raises(Exception, match=said):
        code.load()


def test_what_a_formatter_raises_is_an_answer(code: Code) -> None:
    code.write(
        "from model_hosting_container_standards.common.fastapi.middleware import input_formatter\n"
        "@input_formatter\nasync def pre(request):\n    raise ValueError('no prompt')\n"
    )
    code.load()
    reply = code.ask("POST", "/invocations", {})
    assert reply.status == 500
    assert reply.json["message"] == "no prompt"


# Adapters.

ADAPTERS = """
from types import SimpleNamespace

from fastapi import Request, Response
import model_hosting_container_standards.sagemaker as sagemaker_standards


@sagemaker_standards.register_load_adapter_handler(
    request_shape={"lora_name": "body.name", "lora_path": "body.src"}, response_shape={}
)
async def load(data: SimpleNamespace, request: Request) -> Response:
    answer = await request.app.state.client.post(
        "/v1/load_lora_adapter", json={"lora_name": data.lora_name, "lora_path": data.lora_path}
    )
    return Response(answer.content, answer.status_code)


@sagemaker_standards.register_unload_adapter_handler(
    request_shape={"lora_name": "path_params.adapter_name"}, response_shape={}
)
async def unload(data: SimpleNamespace, request: Request) -> Response:
    answer = await request.app.state.client.post(
        "/v1/unload_lora_adapter", json={"lora_name": data.lora_name}
    )
    return Response(answer.content, answer.status_code)


@sagemaker_standards.custom_invocation_handler
@sagemaker_standards.inject_adapter_id("model", append=True, separator=":")
async def invoke(request: Request):
    return await request.json()
"""


def test_handlers_of_adapters_take_the_names_of_the_engine(code: Code) -> None:
    code.write(ADAPTERS)
    doors = code.load()
    assert ("POST", "/adapters") in doors.routes
    assert ("DELETE", "/adapters/[^/]+") in doors.routes

    loaded = code.ask("POST", "/adapters", {"name": "legal", "src": "/a"})
    assert (loaded.status, loaded.body) == (200, b"Adapter legal registered")
    (asked,) = loaded.asked
    assert asked.path == "/v1/load_lora_adapter"
    assert json.loads(asked.body) == {"lora_name": "legal", "lora_path": "/a"}

    by_query = code.ask("POST", "/adapters", query=b"name=legal&src=/b")
    assert json.loads(by_query.asked[0].body) == {"lora_name": "legal", "lora_path": "/b"}

    alias = {"X-Amzn-SageMaker-Adapter-Alias": "ours"}
    unloaded = code.ask("DELETE", "/adapters/legal", headers=alias)
    assert (unloaded.status, unloaded.body) == (200, b"Adapter ours unregistered")


def test_what_the_server_refuses_of_an_adapter_is_the_answer(code: Code) -> None:
    code.write(ADAPTERS)
    code.load()
    code.status_of_server = 404
    assert code.ask("DELETE", "/adapters/other").status == 404
    assert code.ask("POST", "/adapters", {"name": "legal"}).status == 400, "src is missing"
    assert code.ask("POST", "/adapters", {"name": "", "src": "/a"}).status == 400


def test_the_adapter_of_the_header_is_appended_to_the_model(code: Code) -> None:
    code.write(ADAPTERS)
    code.load()
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "legal"}

    assert code.ask("POST", "/invocations", {"model": "m"}, header).json == {"model": "m:legal"}
    assert code.ask("POST", "/invocations", {}, header).json == {"model": "legal"}
    assert code.ask("POST", "/invocations", {"model": "m"}).json == {"model": "m"}
    assert code.ask("POST", "/invocations", b"{", header).status == 400


# Sessions that the code keeps itself.

SESSIONS = """
from fastapi import Request
import model_hosting_container_standards.sagemaker as sagemaker_standards
from pydantic import BaseModel


class Opening(BaseModel):
    capacity: int = 1


@sagemaker_standards.register_create_session_handler(
    engine_response_session_id_path="body.id", engine_request_model_cls=Opening
)
async def open_session(opening: Opening, request: Request):
    return {"id": f"session-{opening.capacity}"}


@sagemaker_standards.register_close_session_handler(engine_request_session_id_path="id")
async def close_session(request: Request):
    return {"closed": True}


@sagemaker_standards.custom_invocation_handler
@sagemaker_standards.stateful_session_manager("session")
async def invoke(request: Request):
    return await request.json()
"""


def test_the_code_s_own_sessions_are_opened_and_closed_by_its_handlers(code: Code) -> None:
    code.write(SESSIONS)
    code.load()
    opened = code.ask("POST", "/invocations", {"requestType": "NEW_SESSION"})
    assert opened.status == 200
    assert opened.headers["x-amzn-sagemaker-new-session-id"].startswith("session-1")

    header = {"X-Amzn-SageMaker-Session-Id": "session-1"}
    assert code.ask("POST", "/invocations", {"a": 1}, header).json["session"] == "session-1"

    closed = code.ask("POST", "/invocations", {"requestType": "CLOSE"}, header)
    assert closed.headers["x-amzn-sagemaker-closed-session-id"] == "session-1"


def test_sessions_are_off_unless_a_variable_switches_them_on(code: Code) -> None:
    code.write(
        "import model_hosting_container_standards.sagemaker as standards\n"
        "@standards.custom_invocation_handler\n@standards.stateful_session_manager()\n"
        "async def invoke(request): ...\n"
    )
    code.load()
    refused = code.ask("POST", "/invocations", {"requestType": "NEW_SESSION"})
    assert refused.status == 400 and "stateful sessions not enabled" in refused.json["detail"]


# The engine client.

ENGINE = """
import json
import model_hosting_container_standards.sagemaker as sagemaker_standards
from fastapi import Request


@sagemaker_standards.custom_invocation_handler
async def invoke(request: Request):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind

    body = await request.json()
    engine = request.app.state.engine_client
    params = SamplingParams(
        max_tokens=8,
        temperature=0.5,
        n=body.get("n", 1),
        output_kind=RequestOutputKind[body.get("kind", "CUMULATIVE")],
    )
    texts = []
    async for output in engine.generate(
        body["prompt"], params, "id-1", lora_request=LoRARequest("legal", 1, "/a")
    ):
        texts.append([sequence.text for sequence in output.outputs])
        if len(texts) == body.get("abort_after"):
            await engine.abort("id-1")

    last = output.outputs[0]
    return {"texts": texts, "ids": list(last.token_ids), "prompt_ids": output.prompt_token_ids,
            "finish_reason": last.finish_reason, "finished": output.finished}
"""


def event(**choice: object) -> bytes:
    whole = {"index": 0, "text": "", "token_ids": [], "finish_reason": None, **choice}
    return b"data: " + json.dumps({"choices": [whole]}).encode() + b"\n\n"


EVENTS = [
    event(text="Pa", token_ids=[1], prompt_token_ids=[7, 8]),
    event(text="ris", token_ids=[2, 3]),
    event(finish_reason="stop"),
    b"data: [DONE]\n\n",
]


@pytest.fixture
def engine(code: Code, monkeypatch: pytest.MonkeyPatch) -> Code:
    """Code that imports vllm, which is not there."""
    monkeypatch.syspath_prepend(str(COMPAT))
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)

    code.write(ENGINE)
    code.load()
    code.answers["/v1/completions"] = EVENTS
    return code


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_generate_grows_as_the_events_come_however_they_are_cut(engine: Code, size: int) -> None:
    stream = b"".join(EVENTS)
    cuts = range(0, len(stream), size)
    engine.answers["/v1/completions"] = [stream[cut : cut + size] for cut in cuts]
    header = {"Authorization": "Bearer key", "X-Amzn-SageMaker-Session-Id": "s", "X-Other": "o"}
    reply = engine.ask("POST", "/invocations", {"prompt": "The capital"}, header)

    assert reply.json == {
        "texts": [["Pa"], ["Paris"], ["Paris"]],
        "ids": [1, 2, 3],
        "prompt_ids": [7, 8],
        "finish_reason": "stop",
        "finished": True,
    }
    (asked,) = reply.asked
    assert json.loads(asked.body) == {
        "prompt": "The capital",
        "n": 1,
        "stream": True,
        "return_token_ids": True,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": 8,
        "model": "legal",
    }
    assert (b"authorization", b"Bearer key") in asked.headers, "it is the client's request"
    assert len(asked.headers) == 2, "without its session and other headers"


def test_the_other_kinds_of_outputs_have_what_is_new_or_come_once(engine: Code) -> None:
    delta = engine.ask("POST", "/invocations", {"prompt": "a", "kind": "DELTA"})
    final = engine.ask("POST", "/invocations", {"prompt": "a", "kind": "FINAL_ONLY"})

    assert delta.json["texts"] == [["Pa"], ["ris"], [""]]
    assert final.json["texts"] == [["Paris"]]


def test_several_sequences_each_have_their_own_text(engine: Code) -> None:
    engine.answers["/v1/completions"] = [
        event(text="a", index=1),
        event(text="b", finish_reason="length"),
        event(index=1, finish_reason="length"),
    ]
    reply = engine.ask("POST", "/invocations", {"prompt": "x", "n": 2})
    assert reply.json["texts"] == [["", "a"], ["b", "a"], ["b", "a"]]


def test_an_abort_ends_a_generate_and_stops_the_engine(engine: Code) -> None:
    engine.is_answer_endless = True
    reply = engine.ask("POST", "/invocations", {"prompt": "a", "abort_after": 2})
    assert reply.json["texts"] == [["Pa"], ["Paris"]]
    assert reply.num_stopped == 1


def test_a_refusal_and_an_error_inside_a_stream_have_their_status_and_words(engine: Code) -> None:
    error = {"error": {"message": "the queue is full", "code": 503}}
    engine.answers["/v1/completions"] = [EVENTS[0], b"data: " + json.dumps(error).encode() + b"\n"]
    failed = engine.ask("POST", "/invocations", {"prompt": "a"})

    assert (failed.status, failed.json) == (503, {"detail": "the queue is full"})

    engine.status_of_server = 429
    engine.answers["/v1/completions"] = [json.dumps(error).encode()]
    refused = engine.ask("POST", "/invocations", {"prompt": "a"})

    assert (refused.status, refused.json) == (429, {"detail": "the queue is full"})


def test_what_stands_for_vllm_says_what_it_has(engine: Code) -> None:
    with pytest.raises(ImportError, match="vllm.AsyncLLMEngine is not here: vLLM is not installed"):
        from vllm import AsyncLLMEngine  # noqa: F401


@dataclass
class Params:
    stop: list[str] = field(default_factory=lambda: ["."])
    seed: int = 7
    max_tokens: int | None = None
    logprobs: int | None = None


def test_what_a_file_wants_of_vllm_is_imported_before_a_request_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(
        "wanted = []\ndef __getattr__(name):\n    wanted.append(name)\n"
    )
    file = tmp_path / "model.py"
    file.write_text(
        "def handler():\n    from vllm import SamplingParams\n    import json\n"
        "from vllm.absent import Missing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)

    import_early(file)
    assert "SamplingParams" in sys.modules["vllm"].wanted
    monkeypatch.delitem(sys.modules, "vllm")


def test_sampling_parameters_become_the_fields_of_a_completion() -> None:
    body = completion({"prompt_token_ids": [1, 2]}, Params(), None)
    assert body["prompt"] == [1, 2]
    assert (body["stop"], body["seed"]) == (["."], 7)
    assert body["max_tokens"] > 1 << 30, "as many as fit"


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ("a", Params(logprobs=1), "does not know logprobs here: request.app.state.client is"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, Params(), "takes no images here"),
        (7, Params(), "must be a str or a list of token ids"),
    ],
)
def test_what_a_generate_cannot_ask_for_says_what_to_call(
    prompt: object, params: Params, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        completion(prompt, params, None)


def test_outside_of_a_request_the_engine_client_says_so(code: Code) -> None:
    code.load()
    with pytest.raises(RuntimeError, match="the engines answer inside a request"):
        asyncio.run(code.app.state.engine_client.check_health())  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="engine_client.encode is not here: it has generate"):
        _ = code.app.state.engine_client.encode  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("Response(headers={'x-a': 'a\\r\\nSet-Cookie: b'})", "x-a must be one line"),
        ("Response(headers={'bad name': 'a'})", "must have a header's name, given 'bad name'"),
        ("Response(status_code=101)", "from 200 to 599, given 101"),
    ],
)
def test_an_answer_that_http_cannot_carry_is_the_code_s_fault(
    code: Code, answer: str, said: str
) -> None:
    code.write(
        "from fastapi import Response\n"
        f"async def custom_sagemaker_invocation_handler():\n    return {answer}\n"
    )
    code.load()
    reply = code.ask("POST", "/invocations", {})
    assert reply.status == 0 and said in reply.error


def test_a_client_that_leaves_cancels_the_handler(code: Code) -> None:
    code.write(
        "import asyncio\nawake = asyncio.Event()\n"
        "async def custom_sagemaker_invocation_handler():\n"
        "    try:\n        await asyncio.sleep(1000)\n"
        "    finally:\n        awake.set()\n"
    )
    code.load()

    async def leave() -> list[object]:
        sent: list[object] = []
        request = Serve("POST", "/invocations", b"", [], b"{}", None)
        call = RunningRequest(request, sent.append, lambda: None)
        call.task = asyncio.create_task(call.run(code.app))
        await asyncio.sleep(0.05)
        call.take(Drop())
        await call.task
        return sent

    assert asyncio.run(leave()) == [End()]


HANDLER = "async def custom_sagemaker_invocation_handler():\n"


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("raise asyncio.CancelledError", "the model's code was cancelled"),
        ("return", "returned before its answer was whole"),
    ],
)
def test_an_answer_that_stops_in_the_middle_does_not_look_whole(
    code: Code, end: str, said: str
) -> None:
    code.write(
        "import asyncio\nfrom starlette.responses import Response\n"
        "class Half(Response):\n"
        "    async def __call__(self, scope, receive, send):\n"
        "        await send({'type': 'http.response.start', 'status': 200, 'headers': []})\n"
        "        await send({'type': 'http.response.body', 'body': b'half', 'more_body': True})\n"
        f"        {end}\n{HANDLER}    return Half()\n"
    )
    code.load()
    reply = code.ask("POST", "/invocations", {})
    assert (reply.status, reply.body) == (200, b"half") and said in reply.error


def test_code_that_waits_for_the_client_to_leave_ends_with_its_answer(code: Code) -> None:
    code.write(
        "from starlette.responses import Response\n"
        "class Waiting(Response):\n"
        "    async def __call__(self, scope, receive, send):\n"
        "        await super().__call__(scope, receive, send)\n"
        "        while (await receive())['type'] != 'http.disconnect':\n"
        "            pass\n"
        f"{HANDLER}    return Waiting(b'whole')\n"
    )
    code.load()
    reply = code.ask("POST", "/invocations", {})
    assert (reply.body, reply.error) == (b"whole", "")


def test_a_question_that_nobody_waits_for_any_more_stops_the_engine(code: Code) -> None:
    code.write(
        "import asyncio\nfrom fastapi import Request\n"
        "async def custom_sagemaker_invocation_handler(request: Request):\n"
        "    try:\n"
        "        question = request.app.state.client.get('/silent')\n"
        "        await asyncio.wait_for(question, 0.01)\n"
        "    except TimeoutError:\n"
        "        return 'too late'\n"
    )
    code.load()
    code.silent_paths.add("/silent")
    reply = code.ask("POST", "/invocations", {})
    assert (reply.json, reply.num_stopped) == ("too late", 1)
