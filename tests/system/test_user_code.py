"""User code as a platform runs it: `lmi serve` on a folder with a model.py written for
djl-serving.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.machine import measurements
from tests.served import Server, launch
from tests.system.container import ROOT, wait_until, write_model

FILES = Path(__file__).parents[1] / "user_code" / "files"


def write_handler(folder: Path, *settings: str, source: str | None = None) -> Path:
    folder.mkdir()
    if source is None:
        shutil.copy(FILES / "handler" / "model.py", folder)
    else:
        (folder / "model.py").write_text(source)

    (folder / "serving.properties").write_text("\n".join(["log_format=json", *settings]) + "\n")
    return folder


@contextmanager
def running(folder: Path, environ: dict[str, str] | None = None) -> Iterator[Server]:
    with launch(folder, environ) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def handler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_handler(tmp_path_factory.mktemp("custom") / "model", "option.greeting=bonjour")
    with running(folder, {"HF_TOKEN": "hf_secret", "HARMLESS": "1"}) as server:
        yield server


def test_a_handler_is_loaded_with_its_options_and_answers_with_its_output(handler: Server) -> None:
    answer = handler.post({"name": "Ada"})
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert json.loads(answer.body)["answer"] == "bonjour Ada"


def test_every_inference_route_reaches_the_handler_and_the_others_are_gone(handler: Server) -> None:
    for path in (
        "/invocations",
        "/predictions/model",
        "/predictions/model/1",
        "/models/model/invoke",
    ):
        assert handler.post({"name": "Ada"}, path).status == 200, path

    assert handler.post({"name": "Ada"}, "/predictions/other").status == 404
    assert handler.request("GET", "/invocations").status == 405


def test_what_the_handler_prints_becomes_a_line_of_the_log(handler: Server) -> None:
    handler.post({"name": "Grace"})
    wait_until(
        lambda: any(line.get("message") == "greeting Grace" for line in handler.log_lines()),
        "it is logged",
    )


def test_the_body_and_the_headers_arrive_as_they_were_sent(handler: Server) -> None:
    assert (
        handler.post("Größe".encode(), headers={"content-type": "text/plain"}).body
        == "GRÖSSE".encode()
    )

    attributes = {"X-Amzn-SageMaker-Custom-Attributes": "tenant=blue; x", "Accept": "a/b"}
    properties = json.loads(handler.post({"act": "properties"}, headers=attributes).body)

    assert properties == {
        "X-Amzn-SageMaker-Custom-Attributes": "tenant=blue; x",
        "tenant": "blue",
        "accept": "a/b",
    }


def test_no_request_chooses_another_function_or_file(handler: Server) -> None:
    parameters = {
        "handler": "initialize",
        "entryPoint": "other.py",
        "option.entryPoint": "other.py",
    }
    query = "&".join(f"{name}={value}" for name, value in parameters.items())
    answer = handler.post({"name": "Ada", **parameters}, f"/invocations?{query}", parameters)
    assert json.loads(answer.body)["answer"] == "bonjour Ada"


def test_status_type_and_properties_of_the_output_are_those_of_the_answer(handler: Server) -> None:
    answer = handler.post({"act": "teapot"})
    assert (answer.status, answer.body) == (418, b"\x00\x01tea")
    assert (answer.headers["content-type"], answer.headers["x-pot"]) == (
        "application/x-tea",
        "blue",
    )


def test_no_output_is_an_answer_without_content(handler: Server) -> None:
    answer = handler.post({"act": "nothing"})
    assert (answer.status, answer.body) == (204, b"")


def test_a_stream_arrives_while_it_is_made(handler: Server, tmp_path: Path) -> None:
    with handler.open(
        {"act": "stream", "num_words": 3, "go_on": str(tmp_path / "go on")}
    ) as response:
        assert response.read1() == b"word0 "
        (tmp_path / "go on").touch()
        assert response.read() == b"word1 word2 \n", "a stream of text ends with a newline"


def test_a_long_stream_is_whole(handler: Server) -> None:
    answer = handler.post({"act": "stream", "num_words": 5000})
    assert answer.body == "".join(f"word{number} " for number in range(5000)).encode() + b"\n"


def test_a_stream_without_a_formatter_is_jsonlines(handler: Server) -> None:
    answer = handler.post({"act": "lines"})
    assert answer.headers["content-type"] == "application/jsonlines"
    assert answer.lines == [{"outputs": ["a"]}, {"outputs": ["b"]}]


def test_an_asynchronous_generator_of_outputs_arrives_while_it_is_made(
    handler: Server, tmp_path: Path
) -> None:
    with handler.open(
        {"act": "chunks", "num": 9, "go_on": str(tmp_path / "go on"), "last": 1}
    ) as response:
        assert response.getheader("content-type") == "application/jsonlines"
        assert response.read1() == b'{"number": 0}\n'
        (tmp_path / "go on").touch()
        assert response.read() == b'{"number": 1}\n'


def test_a_plain_generator_of_outputs_streams_fails_and_ends_with_its_client(
    tmp_path: Path,
) -> None:
    source = """
import pathlib, time
from djl_python import Output
def handle(inputs):
    if inputs.is_empty():
        return
    act = inputs.get_as_json()
    try:
        for number in range(act["num"]):
            yield Output().add_as_json({"number": number})
            while not pathlib.Path(act["go_on"]).exists():
                time.sleep(0.01)
        raise RuntimeError("the numbers ran out")
    finally:
        print("closed after", number, flush=True)
"""
    go_on = tmp_path / "go on"
    with running(write_handler(tmp_path / "model", source=source)) as server:
        with server.open({"num": 2, "go_on": str(go_on)}) as response:
            assert (response.status, response.read1()) == (200, b'{"number": 0}')
            go_on.touch()
            answer_text = response.read().decode()

        assert answer_text.startswith('{"number": 1}') and "the numbers ran out" in answer_text

        go_on.unlink()
        with server.open({"num": 1000, "go_on": str(go_on)}) as response:
            response.read1()

        go_on.touch()
        closing_lines = [f"closed after {number}" for number in range(999)]
        wait_until(
            lambda: sum(line.get("message") in closing_lines for line in server.log_lines()) == 2,
            "it was closed early",
        )

        assert server.post({"num": 1, "go_on": str(go_on)}).status == 200, "and others are answered"


def test_a_multipart_body_arrives_in_its_parts(handler: Server) -> None:
    head = b'--cut\r\ncontent-disposition: form-data; name="'
    body = (
        head + b'data"\r\n\r\n{}\r\n' + head + b'image"; filename="a.png"\r\n\r\n\x00\r\n\xff\r\n'
    )
    form = {"content-type": "multipart/form-data; boundary=cut"}
    whole = handler.post(body + b"--cut--\r\n", headers=form)
    cut = handler.post(body, headers=form)

    assert json.loads(whole.body) == {"keys": ["data", "image"], "image": 4}
    assert (
        cut.status == 424
        and "the multipart body ends before its last boundary" in json.loads(cut.body)["error"]
    )


def test_memory_that_ran_out_is_507(handler: Server) -> None:
    answer = handler.post({"act": "give_up", "by": "memory"})
    assert (answer.status, json.loads(answer.body)["code"]) == (507, 507)
    assert json.loads(answer.body)["error"] == "MemoryError: no room for 8 GB"
    assert handler.post({"name": "Ada"}).status == 200


def test_an_exception_is_answered_424_with_its_message_and_hurts_nobody_else(
    handler: Server,
) -> None:
    num_before = json.loads(handler.post({"name": "Ada"}).body)["calls"]
    answer = handler.post({"act": "fail"})

    assert answer.status == 424
    assert json.loads(answer.body) == {
        "code": 424,
        "message": "invoke handler failure",
        "error": "ValueError: no such\nluck",
    }
    assert any("in fail" in line.get("error", "") for line in handler.log_lines()), (
        "the traceback is in the log"
    )
    assert json.loads(handler.post({"name": "Ada"}).body)["calls"] == num_before + 2, (
        "the same process still serves"
    )


@pytest.mark.parametrize(
    ("by", "said"),
    [("cancel", "CancelledError"), ("key", "KeyboardInterrupt"), ("bytes", "ValueError: ? bad")],
)
def test_whatever_the_code_raises_is_answered_and_the_next_request_too(
    handler: Server, by: str, said: str
) -> None:
    answer = handler.post({"act": "give_up", "by": by})
    assert answer.status == 424 and json.loads(answer.body)["error"].endswith(said)
    assert handler.post({"name": "Ada"}).status == 200


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ({"code": 99}, "code must be an HTTP status from 200 to 599, given 99"),
        ({"code": 100}, "given 100"),
        ({"code": 600}, "given 600"),
        ({"code": "teapot"}, "given 'teapot'"),
        (
            {"properties": {"x-a": "日本"}},
            "property x-a must be one line of Latin-1 characters, given '日本'",
        ),
        ({"properties": {"Content-Type": "日本"}}, "property content-type must be"),
        ({"properties": {"x-a": "a\r\nSet-Cookie: b"}}, "property x-a must be one line"),
        ({"properties": {"bad name": "a"}}, "must have a header's name, given 'bad name'"),
    ],
)
def test_an_output_that_http_cannot_carry_is_the_codes_fault(
    handler: Server, output: object, said: str
) -> None:
    answer = handler.post({"act": "odd", **output})
    assert answer.status == 424 and said in json.loads(answer.body)["error"]


def test_a_status_without_a_body_has_none(handler: Server) -> None:
    answer = handler.post({"act": "odd", "code": 204})
    assert (answer.status, answer.body) == (204, b"")
    assert handler.post({"name": "Ada"}).status == 200


def test_what_is_no_output_is_an_error_and_an_error_output_is_as_the_handler_says(
    handler: Server,
) -> None:
    wrong = handler.post({"act": "wrong"})
    refused = handler.post({"act": "refuse"})
    assert (wrong.status, refused.status) == (424, 424)
    assert (
        json.loads(wrong.body)["error"]
        == "TypeError: handle must return an Output or None, not dict"
    )
    assert json.loads(refused.body)["error"] == "the handler refused"


def test_an_exception_inside_a_stream_ends_it_with_its_message(handler: Server) -> None:
    answer = handler.post({"act": "stream", "num_words": 9, "fail_at": 1})
    assert answer.status == 200
    text, _, error = answer.body.partition(b"{")
    assert text == b"word0 word1 \n"
    assert json.loads(b"{" + error)["error"] == "RuntimeError: the words ran out"


def test_the_code_runs_apart_in_the_models_folder_and_without_our_secrets(handler: Server) -> None:
    caller = json.loads(handler.post({"act": "whoami"}).body)
    assert caller["pid"] == handler.pid("lmi-code")
    assert caller["dir"] == caller["cwd"] == str(handler.folder)
    assert "HF_TOKEN" not in caller["env"] and caller["env"]["HARMLESS"] == "1"
    assert handler.pids("lmi-engine") == []


def test_a_client_that_leaves_frees_the_handler_for_the_next(handler: Server) -> None:
    for measurement in measurements():
        with handler.open({"act": "stream", "num_words": 100_000, "pause_s": 0.05}) as response:
            response.read1()

        with measurement.within(10):
            assert handler.post({"name": "Ada"}).status == 200

    wait_until(handler.is_idle, "nothing is left of the stream")


def test_a_worker_that_dies_loses_its_requests_alone_and_starts_again(handler: Server) -> None:
    first_pid = handler.pid("lmi-code")
    answer = handler.post({"act": "die"})
    assert answer.status == 503 and "lost" in json.loads(answer.body)["error"]
    assert json.loads(answer.body).keys() == {"code", "message", "error"}
    wait_until(
        lambda: handler.pid("lmi-code") != first_pid and handler.ping() == 200, "it starts again"
    )
    assert json.loads(handler.post({"name": "Ada"}).body)["calls"] == 1


def test_at_the_end_of_a_drain_a_handler_s_requests_get_their_errors(tmp_path: Path) -> None:
    folder = write_handler(tmp_path / "model", "drain_timeout=2", "minWorkers=2")
    with running(folder) as server, ThreadPoolExecutor(1) as pool:
        wait_until(lambda: server.metrics()["lmi_engines_ready"] == 2, "both are ready")
        whole = pool.submit(server.post, {"act": "sleep", "s": 0, "go_on": str(tmp_path / "never")})
        with server.open(
            {"act": "stream", "num_words": 2, "go_on": str(tmp_path / "never")}
        ) as response:
            assert response.read1() == b"word0 "

            wait_until(lambda: server.metrics()["lmi_requests_in_flight"] == 2, "both run")
            server.signal(signal.SIGTERM)
            *_, last = response.read().splitlines()

        assert "longer than drain_timeout (2 s)" in json.loads(last)["error"]

        answer = whole.result()
        assert (answer.status, answer.headers["retry-after"], json.loads(answer.body)["code"]) == (
            503,
            "1",
            503,
        )
        assert server.wait() == 0
        assert "Traceback" not in server.log.read_text()


def test_a_handler_that_never_returns_is_ended_by_predict_timeout(tmp_path: Path) -> None:
    with running(write_handler(tmp_path / "model", "predict_timeout=1.5")) as server:
        first_pid = server.pid("lmi-code")
        statuses: list[int] = []

        def ask() -> None:
            statuses.append(server.post({"act": "sleep", "s": 1000}).status)

        waiting = [threading.Thread(target=ask) for _ in range(2)]
        for thread in waiting:
            thread.start()

        for thread in waiting:
            thread.join()

        assert statuses == [504, 504], "the second one waited behind the first"

        wait_until(
            lambda: server.pids("lmi-code") not in ([], [first_pid]) and server.ping() == 200,
            "a new one starts",
        )
        assert server.post({"name": "Ada"}).status == 200

        log = server.log.read_text()
        assert "worked on one request" in log and "in sleep" in log, "why, and where the code was"


def test_several_workers_work_side_by_side_and_drain_when_told_to_stop(tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    asleep = {"act": "sleep", "s": 0, "go_on": str(go_on)}
    with running(write_handler(tmp_path / "model", "minWorkers=2", "drain_timeout=10")) as server:
        with ThreadPoolExecutor(8) as clients:
            answers = [clients.submit(server.post, asleep)]

            def both_work() -> bool:
                """Send another when all have come: a front end may not have known the second worker
                when it chose.
                """
                metrics = server.metrics()
                num_working = metrics["lmi_requests_running"]
                if num_working < 2 and metrics["lmi_requests_in_flight"] == len(answers):
                    answers.append(clients.submit(server.post, asleep))

                return num_working == 2 and metrics["lmi_requests_in_flight"] == len(answers)

            wait_until(both_work, "both workers work")
            server.drain()
            go_on.touch()

            assert {answer.result().body for answer in answers} == {b"slept"}

        assert server.wait() == 0
        assert server.pids() == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def handle(inputs)\n    pass\n", "line 1: SyntaxError"),
        (
            "import nowhere\ndef handle(inputs): pass\n",
            "line 1: ModuleNotFoundError: No module named 'nowhere'",
        ),
        ("def handle(inputs):\n    raise OSError('no weights')\n", "line 2: OSError: no weights"),
    ],
    ids=["syntax", "import", "first call"],
)
def test_code_that_cannot_be_used_stops_the_start_with_its_message(
    tmp_path: Path, source: str, said: str
) -> None:
    folder = write_handler(tmp_path / "model", source=source)
    command = [sys.executable, "-P", "-m", "lmi", "serve", str(folder), "--port", "0"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)

    assert done.returncode == 4

    last = json.loads(done.stderr.splitlines()[-1])
    assert last["cause"] == "model_unusable"
    assert said in last["message"] and str(folder / "model.py") in last["message"]


def formatted(tmp_path: Path, name: str, **options: object) -> Path:
    folder = write_model(tmp_path / "model", **options)
    shutil.copy(FILES / name / "model.py", folder)
    return folder


@pytest.fixture(scope="module")
def formatter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(formatted(tmp_path_factory.mktemp("formatter"), "formatter")) as server:
        yield server


def test_formatters_read_the_request_and_write_each_token_of_the_answer(formatter: Server) -> None:
    answer = formatter.post({"question": "ab", "options": {"max_new_tokens": 3}, "stream": True})
    assert answer.status == 200
    assert "content-type" not in answer.headers
    assert answer.lines == [
        {"token_id": 97, "token_text": "a", "token_log_prob": -1.0},
        {"token_id": 98, "token_text": "b", "token_log_prob": -1.0},
        {"token_id": 97, "token_text": "a", "token_log_prob": -1.0, "finish_reason": "length"},
    ]


def test_an_answer_that_is_not_streamed_has_the_same_bytes_and_its_length(
    formatter: Server,
) -> None:
    body = {"question": "ab", "options": {"max_new_tokens": 3}}
    whole = formatter.post(body)
    stream = formatter.post({**body, "stream": True})
    assert whole.body == stream.body
    assert whole.headers["content-length"] == str(len(whole.body))


def test_a_request_that_names_a_form_gets_that(formatter: Server) -> None:
    answer = formatter.post(
        {"question": "ab", "options": {"max_new_tokens": 2, "output_formatter": "json"}}
    )
    assert json.loads(answer.body) == {"generated_text": "ab"}


def test_what_an_input_formatter_raises_is_a_request_that_cannot_be_read(formatter: Server) -> None:
    answer = formatter.post({"inputs": "ab"})
    assert answer.status == 424
    assert json.loads(answer.body) == {
        "error": "the input formatter failed: KeyError: 'question'",
        "code": 424,
    }


def test_what_an_output_formatter_raises_ends_its_own_answer_alone(formatter: Server) -> None:
    bad = {"question": "ab", "options": {"max_new_tokens": 3, "fail_at": "b"}, "stream": True}
    first = formatter.post({**bad, "options": {"max_new_tokens": 3, "fail_at": "a"}})
    assert first.status == 424 and "ValueError: cannot write a" in first.body.decode()
    later = formatter.post(bad)
    assert later.status == 200
    assert later.lines[0]["token_text"] == "a"
    assert later.lines[1]["error"] == "ValueError: cannot write b"
    assert formatter.post({"question": "ab"}).status == 200
    wait_until(formatter.is_idle, "the engine has nothing left of them")


def test_formatters_that_are_ready_before_the_engine_wait_for_it(tmp_path: Path) -> None:
    slow = {"option.rolling_batch": "slow", "option.load_s": 3}
    with running(
        formatted(tmp_path, "legacy", **slow, **{"option.output_formatter": "custom"})
    ) as server:
        assert server.generate(3, "ab").body == b"<aba>length aba\n"
        assert server.generate(3, "ab", stream=False).body == b"<aba>length aba"


def test_formatters_that_die_are_told_by_ping_and_start_again(formatter: Server) -> None:
    os.kill(formatter.pid("lmi-code"), signal.SIGKILL)
    wait_until(lambda: formatter.post({"question": "ab"}).status == 503, "their absence is told")
    wait_until(
        lambda: formatter.ping() == 200 and formatter.post({"question": "ab"}).status == 200,
        "they are back",
    )


def test_formatters_have_their_own_fields_the_options_and_a_tokenizer_that_is_read_when_it_is_used(
    tmp_path: Path,
) -> None:
    with running(formatted(tmp_path, "own_fields", **{"option.greeting": "hello"})) as server:
        parameters = {"max_new_tokens": 3, "stop_token_ids": [98]}
        answer_body = json.loads(
            server.post({"question": "ab", "trace": "t", "parameters": parameters}).body
        )

        assert (answer_body["trace"], answer_body["seen"], answer_body["stop_reason"]) == (
            "t",
            ["hello", "hello"],
            98,
        )
        assert answer_body["ids"] == [97, 98] and not answer_body["has_transformers"], (
            "nor torch, which it brings"
        )

        request_body = {
            "question": "ab",
            "count": True,
            "parameters": {"max_new_tokens": 3, "stop": ["zz"]},
        }
        answer_body = json.loads(server.post(request_body).body)

        assert (
            answer_body["seen"][-1] == 4
            and answer_body["decoded"] == "ab"
            and answer_body["has_transformers"]
        )
