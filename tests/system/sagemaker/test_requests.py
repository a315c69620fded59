"""What SageMaker sends to /invocations and what it may see of an answer: types, headers, lengths
and streams.
"""

from __future__ import annotations

import http.client
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmi.settings.served_folder import demo_folder
from tests.served import Server, launch
from tests.system.container import wait_until, write_model

FILES = Path(__file__).parents[2] / "user_code" / "files"
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
INFERENCE_ID = "X-Amzn-SageMaker-Inference-Id"
FORMATTER = """
from djl_python.output_formatter import TextGenerationOutput, output_formatter
@output_formatter
def write(output: TextGenerationOutput):
    return output.sequences[0].get_next_token()[0].text.upper()
"""
ECHO: dict[str, Any] = {"inputs": "abc", "parameters": {"max_new_tokens": 3}}
BODY = json.dumps(ECHO).encode()
ANSWER = b'{"generated_text": "abc"}\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    options = {"max_request_size": "100k", "job_queue_size": 1, "option.max_rolling_batch_size": 4}
    folder = write_model(
        tmp_path_factory.mktemp("requests") / "model",
        **options,
        **{"option.chat_template": template},
    )
    with launch(folder) as started:
        started.wait_ready()
        yield started


@pytest.fixture(scope="module")
def formatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose streams are ASCII, with an output formatter that ends no line."""
    folder = write_model(
        tmp_path_factory.mktemp("formatting") / "model", ascii_streams="true", frontend_workers=1
    )
    (folder / "model.py").write_text(FORMATTER)
    with launch(folder) as started:
        started.wait_ready()
        yield started


@pytest.fixture(scope="module")
def handler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model is user code."""
    folder = tmp_path_factory.mktemp("handler") / "model"
    folder.mkdir()
    shutil.copy(FILES / "stateful" / "model.py", folder)
    (folder / "serving.properties").write_text("log_format=json\nfrontend_workers=1\n")
    with launch(folder) as started:
        started.wait_ready()
        yield started


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (None, BODY),
        ("application/json", BODY),
        ("application/json; charset=utf-8", BODY),
        ("application/x-www-form-urlencoded", BODY),
        ("application/octet-stream", BODY),
        ("application/jsonlines", BODY),
    ],
)
def test_every_content_type_that_clients_send_is_json(
    server: Server, content_type: str | None, body: bytes
) -> None:
    answer = server.post(body, headers={"Content-Type": content_type} if content_type else None)
    assert (answer.status, answer.body) == (200, ANSWER)


def test_plain_text_is_a_prompt_even_if_it_looks_like_json(server: Server) -> None:
    for text in ("abc", '{"prompt": "x"}', '{"messages": []}', '{"requestType": "CLOSE"}'):
        answer = server.post(text.encode(), headers={"Content-Type": "text/plain; charset=utf-8"})
        repeated = json.loads(answer.body)["generated_text"]

        assert answer.status == 200 and (text * 30).startswith(repeated)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"inputs": "a", }', b'"text"'])
def test_a_broken_body_is_424_in_json(server: Server, body: bytes) -> None:
    answer = server.post(body)
    assert (answer.status, answer.headers["content-type"]) == (424, "application/json")
    assert json.loads(answer.body)["code"] == 424


def test_null_means_left_out_and_an_unknown_name_is_a_line_in_the_log(server: Server) -> None:
    body = ECHO | {
        "parameters": {"max_new_tokens": 3, "top_k": None, "seed": None, "sagemaker_base_url": "x"}
    }
    assert server.post(body).body == ANSWER
    wait_until(lambda: "sagemaker_base_url" in server.log.read_text(), "the name is logged")


WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("/invocations", ECHO),
    ("/invocations", {"inputs": "abc", "parameters": {"max_new_tokens": 3, "details": True}}),
    ("/invocations", {"prompt": "abc", "max_tokens": 3}),
    ("/invocations", {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}),
    ("/invocations", {"inputs": 5}),
    (
        "/invocations",
        {"inputs": "abc", "parameters": {"max_new_tokens": 3, "output_formatter": "json"}},
    ),
    ("/predictions/model", ECHO),
    ("/models/model/invoke", ECHO),
    ("/v1/completions", {"model": "", "prompt": "abc", "max_tokens": 3}),
    (
        "/v1/chat/completions",
        {"model": "", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 3},
    ),
    ("/generate", ECHO),
    ("/", ECHO),
    ("/v2/models/model/generate", {"text_input": "abc", "max_tokens": 3}),
    ("/nowhere", {}),
]


@pytest.mark.parametrize(("path", "body"), WHOLE)
def test_an_answer_that_is_not_streamed_has_its_length_and_its_attributes(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    answer = server.post(body, path, {ATTRIBUTES: "trace=7; who= me"})
    assert answer.headers["content-length"] == str(len(answer.body)) and len(answer.body) > 0
    assert "transfer-encoding" not in answer.headers
    assert answer.headers[ATTRIBUTES.lower()] == "trace=7; who= me"
    assert answer.status == (404 if path == "/nowhere" else 424 if body == {"inputs": 5} else 200)


def test_an_answer_that_user_code_forms_has_its_length_too(
    formatting: Server, handler: Server
) -> None:
    for answer in (formatting.post(ECHO), handler.post({"action": "header", "headers": {}})):
        assert answer.status == 200 and answer.headers["content-length"] == str(len(answer.body))
        assert "transfer-encoding" not in answer.headers


@pytest.mark.parametrize(
    "setting", [{"option.tgi_compat": "true"}, {"option.rolling_batch": "disable"}]
)
def test_an_answer_in_the_form_of_tgi_or_of_a_dynamic_batch_has_its_length_too(
    tmp_path: Path, setting: dict[str, str]
) -> None:
    shutil.copytree(demo_folder(), tmp_path / "model")
    lines = [
        f"{key}={value}"
        for key, value in {"log_format": "json", "frontend_workers": 1, **setting}.items()
    ]
    (tmp_path / "model" / "serving.properties").write_text("\n".join(lines))
    with launch(tmp_path / "model") as server:
        server.wait_ready()
        for inputs in ("abc", ["abc", "abc"]) if "option.rolling_batch" in setting else ("abc",):
            answer = server.post({"inputs": inputs, "parameters": {"max_new_tokens": 3}})
            assert answer.status == 200 and json.loads(answer.body)[0]["generated_text"], (
                answer.body
            )
            assert answer.headers["content-length"] == str(len(answer.body))
            assert "transfer-encoding" not in answer.headers


STREAMED = [
    (path, body | {"stream": True})
    for path, body in WHOLE
    if path in ("/invocations", "/v1/completions")
][:4]
STREAMED.append(("/generate_stream", ECHO))


@pytest.mark.parametrize(("path", "body"), STREAMED)
def test_each_record_is_one_chunk_and_the_last_byte_ends_a_line(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    data = json.dumps(body).encode()
    with server.connect_raw() as connection:
        head = b"POST %b HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % (path.encode(), len(data)) + data)
        heard = b"".join(iter(lambda: connection.recv(65536), b""))

    fields, _, body_heard = heard.partition(b"\r\n\r\n")
    assert len(fields) < 4096 and b"transfer-encoding: chunked" in fields.lower()

    chunks = [chunk for chunk in body_heard.split(b"\r\n")[1::2] if chunk]
    assert len(chunks) >= 3 and all(chunk.endswith(b"\n") for chunk in chunks)

    for chunk in chunks:
        [record] = chunk.strip().splitlines()
        assert record == b"data: [DONE]" or json.loads(record.removeprefix(b"data:"))


def test_a_stream_that_finds_no_room_has_a_real_status(server: Server) -> None:
    long = {"inputs": "abc", "parameters": {"max_new_tokens": 99_000}, "stream": True}
    open_streams = [server.connect(long) for _ in range(5)]
    wait_until(lambda: server.metrics()["lmi_sequences_in_flight"] == 5, "the queue is full")
    answer = server.post(ECHO | {"stream": True})
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    for stream in open_streams:
        stream.close()

    wait_until(server.is_idle, "every request is over")


def test_attributes_that_are_too_long_or_not_ascii_are_left_out_and_the_request_is_served(
    server: Server,
) -> None:
    for attributes in ("x" * 1025, "caf\xe9"):
        answer = server.post(ECHO, headers={ATTRIBUTES: attributes})
        assert (answer.status, answer.body) == (
            200,
            ANSWER,
        ) and ATTRIBUTES.lower() not in answer.headers

    assert (
        server.post(ECHO, headers={ATTRIBUTES: "x" * 1024}).headers[ATTRIBUTES.lower()]
        == "x" * 1024
    )


def test_an_inference_id_with_a_space_is_the_id_in_answer_and_log(server: Server) -> None:
    answer = server.post(ECHO, headers={INFERENCE_ID: "my request 7", "X-Request-Id": "other"})
    assert answer.headers["x-request-id"] == "my request 7"
    wait_until(
        lambda: any(line.get("request_id") == "my request 7" for line in server.log_lines()),
        "it is logged",
    )


def test_a_body_over_the_limit_is_413_that_names_it_also_in_chunks(server: Server) -> None:
    large = b'{"inputs": "%b"}' % (b"a" * 200_000)
    for body in (large, iter([large[:70_000], large[70_000:]])):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("POST", "/invocations", body)
        response = connection.getresponse()
        fields = json.loads(response.read())
        assert (response.status, fields["code"]) == (413, 413)
        assert "at most 102400 bytes (max_request_size)" in fields["error"]
        connection.close()


def test_a_body_in_chunks_is_read_as_any_other(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(
        "POST", "/invocations", iter([BODY[n : n + 3] for n in range(0, len(BODY), 3)])
    )
    assert connection.getresponse().read() == ANSWER
    connection.close()


def test_a_chat_streams_events_whatever_the_form_of_other_answers(server: Server) -> None:
    body = {
        "model": "",
        "messages": [{"role": "user", "content": "abc"}],
        "max_tokens": 3,
        "stream": True,
    }
    answer = server.post(body | {"output_formatter": "json"}, "/v1/chat/completions")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.body.endswith(b"data: [DONE]\n\n")


def test_a_formatter_of_user_code_ends_its_stream_with_a_newline(formatting: Server) -> None:
    assert formatting.post(ECHO).body == b"ABC"
    assert formatting.post(ECHO | {"stream": True}).body == b"ABC\n"


def test_a_stream_is_ascii_where_that_is_asked_for(formatting: Server) -> None:
    text = "é漢🎉"
    body = {"inputs": text, "parameters": {"max_new_tokens": len(text.encode())}, "stream": True}
    body["parameters"] |= {"output_formatter": "jsonlines"}  # type: ignore[operator]
    answer = formatting.post(body)

    assert answer.body.isascii() and answer.lines[-1]["generated_text"] == text
    assert not formatting.post(body | {"parameters": {"output_formatter": "json"}}).body.isascii()


def test_nothing_of_a_body_stands_in_a_header(server: Server) -> None:
    answers = [
        server.post({"inputs": "Sesame"}),
        server.post({"inputs": "a", "parameters": {"top_k": "Sesame"}}),
    ]
    answers.append(server.post({"prompt": "a", "model": "Sesame"}))
    assert [answer.status for answer in answers] == [200, 424, 404]
    assert not any("Sesame" in value for answer in answers for value in answer.headers.values())


def test_a_header_of_user_code_that_is_too_long_is_left_out_with_a_warning(handler: Server) -> None:
    headers = {"x-short": "kept", "x-long": "y" * 5000, "x-late": "z"}
    for stream in (False, True):
        answer = handler.post({"action": "header", "headers": headers, "stream": stream})
        assert answer.status == 200 and answer.headers["x-short"] == "kept"
        assert "x-long" not in answer.headers and "x-late" not in answer.headers
        assert sum(len(name) + len(value) + 4 for name, value in answer.headers.items()) < 4096

    assert answer.body == b"unfinished\n"

    warnings = [
        line for line in handler.log_lines() if "for: 'x-long', 'x-late'" in line.get("message", "")
    ]

    assert len(warnings) == 2 and warnings[0]["level"] == "WARNING"


def test_attributes_of_user_code_stand_in_place_of_the_client_s(handler: Server) -> None:
    name = "X-Amzn-SageMaker-Custom-Attributes"
    with handler.open(
        {"action": "header", "headers": {name: "mine"}}, headers={name: "yours"}
    ) as response:
        assert response.headers.get_all(name) == ["mine"]


def test_a_model_that_is_user_code_gets_a_body_of_lines_whole(handler: Server) -> None:
    body = b'{"action": "create"}\n{"action": "create"}\n'
    answer = handler.post(body, headers={"Content-Type": "application/jsonlines"})
    assert (
        answer.status == 424
        and "JSONDecodeError: Extra data: line 2" in json.loads(answer.body)["error"]
    )
