"""A model.py for AWS's model-hosting-container-standards, as a platform runs it: `lmi serve` on a
folder with one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.client import IncompleteRead
from pathlib import Path

import pytest
from websockets.sync.client import connect

from tests.served import Server, launch
from tests.system.container import ROOT, wait_until, write_model

pytest.importorskip("model_hosting_container_standards", reason="scripts/install hooks")

# As AWS's page "Customize Handlers" and its examples call the engine.
HANDLERS = """
import asyncio
import json
import uuid

import model_hosting_container_standards.sagemaker as sagemaker_standards
from fastapi import HTTPException, Request, Response
from fastapi.responses import StreamingResponse


class SamplingParams:
    def __init__(self, **fields):
        self.__dict__.update(fields)


@sagemaker_standards.custom_ping_handler
async def health(request: Request) -> Response:
    await request.app.state.engine_client.check_health()
    return Response(json.dumps({"checked": True}), media_type="application/json")


@sagemaker_standards.custom_invocation_handler
@sagemaker_standards.stateful_session_manager("session")
@sagemaker_standards.inject_adapter_id("adapter")
async def infer(request: Request):
    body = await request.json()
    act = body.get("act", "generate")
    if act == "body":
        return body
    if act == "fail":
        raise ValueError("no such luck")
    if act == "refuse":
        raise HTTPException(418, "a teapot")
    if act == "block":
        import time
        time.sleep(1000)
    if act == "sleep":
        print("asleep", flush=True)
        try:
            await asyncio.sleep(1000)
        finally:
            print("awake", flush=True)
    if act == "nothing":
        return Response(b"a body", 204)
    if act == "split":
        return Response(headers={"x-a": "a\\r\\nSet-Cookie: b"})
    if act == "state":
        getattr(request.app.state, body["name"]).create_completion
    if act == "client":
        async with request.app.state.client.stream(
            body.get("method", "POST"), body["path"], json=body.get("json")
        ) as answer:
            chunks = [chunk async for chunk in answer.aiter_lines() if chunk]
        return Response(
            "\\n".join(chunks), answer.status_code, media_type=answer.headers["content-type"]
        )
    if act == "stream":
        async def lines():
            yield "one\\n"
            await asyncio.sleep(0)
            if body.get("breaks"):
                raise ValueError("the lines broke")
            yield "two\\n"
        return StreamingResponse(lines(), media_type="text/plain")

    request_id = str(uuid.uuid4())
    engine = request.app.state.engine_client
    params = SamplingParams(temperature=0.0, max_tokens=body.get("max_tokens", 4))
    final_output = None
    num_outputs = 0
    async for output in engine.generate(body["prompt"], params, request_id):
        final_output = output
        num_outputs += 1

    answer = {
        "predictions": [final_output.outputs[0].text],
        "finish_reason": final_output.outputs[0].finish_reason,
        "prompt_tokens": len(final_output.prompt_token_ids),
        "completion_tokens": len(final_output.outputs[0].token_ids),
        "num_outputs": num_outputs,
        "finished": final_output.finished,
    }
    return Response(
        json.dumps(answer), media_type="application/json", headers={"X-Request-Id": request_id}
    )
"""


def write(folder: Path, source: str, place: str = "model.py", **options: object) -> Path:
    folder.mkdir(exist_ok=True)
    write_model(folder, **options)
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).write_text(source)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write(tmp_path_factory.mktemp("standards") / "model", HANDLERS, step_timeout=4)
    environ = {"SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "true", "HF_TOKEN": "hf_secret"}
    environ["SAGEMAKER_SESSIONS_PATH"] = str(folder.parent / "sessions")
    with launch(folder, environ) as running:
        running.wait_ready()
        yield running


def test_a_decorated_handler_answers_with_the_engine_behind_it(server: Server) -> None:
    answer = server.post({"prompt": "ab"})

    assert answer.status == 200, answer.body
    body = json.loads(answer.body)
    assert body.pop("num_outputs") >= 2, "it grows"
    assert body == {
        "predictions": ["abab"],
        "finish_reason": "length",
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "finished": True,
    }
    assert len(answer.headers["x-request-id"]) == 36, "the code's own id is the only one"


def test_a_request_that_asks_the_engine_counts_once(server: Server) -> None:
    def lines_of(request_id: str) -> int:
        is_access = '"logger":"lmi.access"'
        lines = server.log.read_text().splitlines()
        return sum(is_access in line and f'"{request_id}"' in line for line in lines)

    tokens = "lmi_generated_tokens_total"
    wait_until(server.is_idle, "no other request runs")
    num_tokens = server.metrics()[tokens]
    for request_id in ("first", "second"):
        headers = {"x-request-id": request_id}
        assert server.post({"prompt": "ab", "max_tokens": 5}, headers=headers).status == 200

    wait_until(lambda: server.metrics()[tokens] == num_tokens + 10, "the tokens are counted")
    wait_until(lambda: lines_of("second") == 1, "it has its line")
    assert lines_of("first") == 1


def test_a_decorated_ping_answers_while_the_server_is_healthy(server: Server) -> None:
    ping = server.request("GET", "/ping")
    assert (ping.status, json.loads(ping.body)) == (200, {"checked": True})
    assert json.loads(server.request("GET", "/healthz").body) == {"status": "Healthy"}


@pytest.mark.parametrize("path", ["/predictions/model", "/models/model/invoke"])
def test_the_other_names_of_invocations_reach_the_handler_too(server: Server, path: str) -> None:
    assert json.loads(server.post({"prompt": "ab"}, path).body)["predictions"] == ["abab"]
    assert server.post({"prompt": "ab"}, path.replace("/model", "/other", 1)).status == 404


def test_the_routes_without_a_handler_are_the_engine_s(server: Server) -> None:
    answer = server.post({"prompt": "ab", "max_tokens": 3}, "/v1/completions")
    assert json.loads(answer.body)["choices"][0]["text"] == "aba"


def test_a_route_in_custom_attributes_goes_past_the_handler_as_in_aws_s_image(
    server: Server,
) -> None:
    headers = {"X-Amzn-SageMaker-Custom-Attributes": "route=/v1/completions"}
    answer = server.post({"prompt": "ab", "max_tokens": 3}, headers=headers)
    assert json.loads(answer.body)["choices"][0]["text"] == "aba"


def test_a_message_of_a_websocket_reaches_the_handler_as_a_request_does(server: Server) -> None:
    asks = ({"act": "body"}, {"act": "stream"}, {"act": "refuse"}, {"act": "stream", "breaks": 1})
    ends = []
    with connect(f"ws://127.0.0.1:{server.port}/invocations-bidirectional-stream") as websocket:
        for number, body in enumerate(asks):
            websocket.send(json.dumps({"id": f"{number}", "body": body}))
            messages = []
            while not messages or "end" not in messages[-1]:
                messages.append(json.loads(websocket.recv(timeout=60)))

            records = [message["data"] for message in messages if "data" in message]
            ends.append((messages[0]["status"], records, messages[-1]["end"]))

    assert ends == [
        (200, [{"act": "body", "adapter": None}], "complete"),
        (200, ["one\n", "two\n"], "complete"),
        (418, [{"detail": "a teapot"}], "complete"),
        (200, ["one\n"], "cut"),
    ]


def test_the_state_s_client_asks_any_route_of_the_server(server: Server) -> None:
    asked = {"prompt": "ab", "max_tokens": 2, "stream": True}
    answer = server.post({"act": "client", "path": "/v1/completions", "json": asked})

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.body.count(b"data: {") >= 2 and answer.body.endswith(b"data: [DONE]")

    refused = server.post({"act": "client", "path": "/v1/completions", "json": {"prompt": 1}})
    assert refused.status == 400 and "prompt must be" in refused.body.decode()

    nowhere = server.post({"act": "client", "method": "GET", "path": "/nowhere"})
    assert nowhere.status == 404


def test_what_of_vllm_s_app_is_not_here_says_what_to_call_instead(server: Server) -> None:
    answer = server.post({"act": "state", "name": "openai_serving_completion"})
    assert (answer.status, answer.body) == (500, b"Internal Server Error")

    said = "app.state.openai_serving_completion.create_completion is not here: request.app.state"
    wait_until(lambda: said in server.log.read_text(), "the log says it")


def test_the_adapter_of_the_header_stands_in_the_body(server: Server) -> None:
    headers = {"X-Amzn-SageMaker-Adapter-Identifier": "legal"}
    answer = server.post({"act": "body"}, headers=headers)
    assert json.loads(answer.body) == {"act": "body", "adapter": "legal"}


def test_a_session_is_opened_used_and_closed_by_the_package(server: Server) -> None:
    opened = server.post({"requestType": "NEW_SESSION"})
    # What lmi removes as leftovers of its own is not among these.
    assert not list((server.folder.parent / "sessions").glob("????????-*"))
    session, _, expires = opened.headers["x-amzn-sagemaker-new-session-id"].partition("; Expires=")
    assert opened.status == 200 and len(session) == 36 and expires.endswith("Z")

    headers = {"X-Amzn-SageMaker-Session-Id": session}
    used = server.post({"act": "body"}, headers=headers)
    assert json.loads(used.body)["session"] == session

    closed = server.post({"requestType": "CLOSE"}, headers=headers)
    assert closed.headers["x-amzn-sagemaker-closed-session-id"] == session

    unknown = server.post({"act": "body"}, headers=headers)
    assert unknown.status == 400 and b"session not found" in unknown.body
    assert server.post({"requestType": "CLOSE"}).status == 424
    assert server.post({"requestType": "NEW_SESSION", "more": 1}).status == 400


def test_what_a_handler_raises_is_an_answer_and_hurts_nobody_else(server: Server) -> None:
    failed = server.post({"act": "fail"})
    refused = server.post({"act": "refuse"})
    malformed = server.post(b"{")

    assert (failed.status, failed.body) == (500, b"Internal Server Error")
    assert (refused.status, json.loads(refused.body)) == (418, {"detail": "a teapot"})
    assert malformed.status == 400
    wait_until(lambda: "ValueError: no such luck" in server.log.read_text(), "its traceback")
    assert server.post({"prompt": "ab"}).status == 200


def test_an_answer_without_a_body_and_one_that_http_cannot_carry(server: Server) -> None:
    nothing = server.post({"act": "nothing"})
    assert (nothing.status, nothing.body) == (204, b"")

    split = server.post({"act": "split"})
    assert split.status == 424 and "x-a must be one line" in split.body.decode()
    assert "set-cookie" not in split.headers


def test_a_refusal_of_the_engine_is_that_of_the_handler(server: Server) -> None:
    answer = server.post({"prompt": ""})
    assert answer.status == 400 and "prompt must be" in json.loads(answer.body)["detail"]


def test_a_stream_of_a_handler_arrives_and_a_broken_one_is_cut(server: Server) -> None:
    assert server.post({"act": "stream"}).body == b"one\ntwo\n"

    with (
        server.open({"act": "stream", "breaks": True}) as response,
        pytest.raises(IncompleteRead),
    ):
        response.read()

    assert server.post({"prompt": "ab"}).status == 200


def test_requests_run_side_by_side_and_a_client_that_leaves_ends_its_own(server: Server) -> None:
    leaving = server.connect({"act": "sleep"})
    wait_until(lambda: '"message":"asleep"' in server.log.read_text(), "it sleeps")
    assert server.post({"prompt": "ab"}).status == 200, "beside it"

    leaving.close()
    wait_until(lambda: '"message":"awake"' in server.log.read_text(), "it was woken")
    wait_until(server.is_idle, "nothing is left of it")


def test_code_that_dies_is_told_by_ping_and_starts_again(server: Server) -> None:
    os.kill(server.pid("lmi-code"), signal.SIGKILL)
    wait_until(lambda: server.ping() == 503, "ping tells it")

    assert server.post({"prompt": "ab"}).status == 503

    wait_until(lambda: server.ping() == 200, "it is back")
    wait_until(lambda: server.post({"prompt": "ab"}).status == 200, "it answers")


def test_code_that_blocks_its_loop_is_ended_by_step_timeout(server: Server) -> None:
    first_pid = server.pid("lmi-code")
    blocked = server.post({"act": "block"})
    assert blocked.status == 503 and "lost" in blocked.body.decode()
    wait_until(
        lambda: server.pids("lmi-code") not in ([], [first_pid]) and server.ping() == 200,
        "a new one starts",
    )


# Middlewares and functions of the fixed names, of which variables name some.
MIDDLEWARES = """
import json

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from model_hosting_container_standards.common.fastapi.middleware import (
    custom_middleware,
    input_formatter,
    output_formatter,
)


@custom_middleware("throttle")
async def who_asks(request: Request, call_next):
    if request.headers.get("x-user") == "nobody":
        return JSONResponse({"error": "who are you?"}, 429)

    response = await call_next(request)
    response.headers["x-order"] = response.headers.get("x-order", "") + "throttle "
    return response


@input_formatter
async def with_length(request: Request) -> Request:
    if request.url.path in ("/invocations", "/v1/completions"):
        body = await request.json()
        body.setdefault("max_tokens", 3)
        body["prompt"] = body["prompt"].strip()
        request._body = json.dumps(body).encode()

    return request


@output_formatter
async def with_header(response: Response) -> Response:
    response.headers["x-order"] = "decorated "
    return response


async def named_header(response: Response) -> Response:
    response.headers["x-order"] = "named "
    return response


async def named_ping():
    return {"source": "variable"}


async def custom_sagemaker_ping_handler():
    return {"source": "function"}
"""


@pytest.fixture(scope="module")
def middlewares(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("standards") / "model"
    write(folder, MIDDLEWARES, "code/checks.py", frontend_workers=1)
    environ = {
        "CUSTOM_SCRIPT_FILENAME": "checks.py",
        "CUSTOM_FASTAPI_PING_HANDLER": "model:named_ping",
    }
    with launch(folder, environ) as running:
        running.wait_ready()
        yield running


def test_middlewares_stand_before_every_route_in_the_order_of_the_package(
    middlewares: Server,
) -> None:
    for path in ("/invocations", "/v1/completions"):
        answer = middlewares.post({"prompt": " ab "}, path)
        assert answer.status == 200, answer.body
        assert json.loads(answer.body)["choices"][0]["text"] == "aba", "both fields were changed"
        assert answer.headers["x-order"] == "decorated throttle "

        refused = middlewares.post({"prompt": "ab"}, path, {"x-user": "nobody"})
        assert (refused.status, refused.body) == (429, b'{"error":"who are you?"}')

    ping = middlewares.request("GET", "/ping")
    assert json.loads(ping.body) == {"source": "variable"}, "a variable counts before a function"
    assert middlewares.request("GET", "/v1/models").headers["x-order"] == "decorated throttle "
    assert "x-order" not in middlewares.request("GET", "/healthz").headers
    assert "x-order" not in middlewares.request("GET", "/metrics").headers


def test_a_stream_passes_middlewares_as_it_comes(middlewares: Server) -> None:
    asked = {"prompt": "ab", "max_tokens": 5, "stream": True}
    with middlewares.open(asked) as response:
        assert response.getheader("x-order") == "decorated throttle "
        body = response.read()

    assert body.count(b'"text"') >= 5 and body.endswith(b"\n")


def test_an_error_of_the_engine_passes_middlewares_in_its_own_form(middlewares: Server) -> None:
    answer = middlewares.post({"prompt": "ab", "temperature": -1}, "/v1/completions")
    assert answer.status == 400
    assert "temperature must be" in json.loads(answer.body)["error"]["message"]


def test_code_of_the_standards_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "x = 1\n")
    command = [sys.executable, "-P", "-m", "lmi", "serve", str(folder), "--port", "0"]
    variable = {"CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE": "model:absent"}
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **variable}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)

    assert done.returncode == 4, done.stderr
    last = json.loads(done.stderr.splitlines()[-1])
    assert last["cause"] == "model_unusable"
    said = "CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE=model:absent: Handler 'model:absent' not found"
    assert said in last["message"] and str(folder / "model.py") in last["message"]
