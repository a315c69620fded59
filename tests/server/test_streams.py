"""Headers and streams over real sockets: what is echoed, what is bounded, how a stream begins, goes
on and ends.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from lmi.http.exchange import CUSTOM_ATTRIBUTES, MAX_HEADER_BYTES
from lmi.server.answer_body import as_ascii
from tests.scripted import Host, host, wait_until

INFERENCE_ID = "X-Amzn-SageMaker-Inference-Id"


def served(
    tmp_path_factory: pytest.TempPathFactory, **server: object
) -> AbstractContextManager[Host]:
    template = "{{ messages[0].content }}"
    return host(
        tmp_path_factory.mktemp("streams"), server=server, model={"chat_template": template}
    )


@pytest.fixture(scope="module")
def lmi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with served(tmp_path_factory) as running:
        yield running


@pytest.fixture(scope="module")
def in_ascii(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with served(tmp_path_factory, ascii_streams=True) as running:
        yield running


@pytest.fixture(scope="module")
def buffering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with served(tmp_path_factory, buffer_streams=True) as running:
        yield running


@pytest.mark.parametrize("given", ["with space inside", "x" * 64, "!", 'a"b\\c'])
def test_an_inference_id_is_the_request_s_id(lmi: Host, given: str) -> None:
    response, _ = lmi.post(
        {"inputs": "say hi"}, headers={INFERENCE_ID: given, "X-Request-Id": "other"}
    )
    assert response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["x" * 65, "tab\tinside", "é", ""])
def test_an_inference_id_that_breaks_the_rule_gives_way_to_the_request_id(
    lmi: Host, given: str
) -> None:
    headers = {INFERENCE_ID: given.encode().decode("latin-1")}
    assert (
        lmi.post({"inputs": "say hi"}, headers=headers | {"X-Request-Id": "other"})[0].headers[
            "x-request-id"
        ]
        == "other"
    )
    assert len(lmi.post({"inputs": "say hi"}, headers=headers)[0].headers["x-request-id"]) == 32


ANSWERS = [
    ("/invocations", {"inputs": "say hi"}, 200),
    ("/invocations", {"inputs": "say hi", "stream": True}, 200),
    ("/invocations", {"inputs": "fail ab", "stream": True}, 200),
    ("/invocations", {"inputs": 5}, 424),
    ("/v1/completions", {"prompt": "say hi"}, 200),
    ("/nowhere", {}, 404),
]


@pytest.mark.parametrize(("path", "body", "status"), ANSWERS)
def test_attributes_come_back_unchanged_on_every_answer(
    lmi: Host, path: str, body: dict[str, object], status: int
) -> None:
    for attributes in ("trace=1; who=~ !", "x" * 1024):
        response, _ = lmi.post(body, path, {CUSTOM_ATTRIBUTES: attributes})
        assert (response.status, response.headers[CUSTOM_ATTRIBUTES]) == (status, attributes)


@pytest.mark.parametrize("given", ["x" * 1025, "café", "tab\tinside"])
def test_attributes_that_are_not_sent_back_are_one_warning_and_the_request_is_served(
    lmi: Host, given: str, caplog: pytest.LogCaptureFixture
) -> None:
    response, _ = lmi.post(
        {"inputs": "say hi"}, headers={CUSTOM_ATTRIBUTES: given.encode().decode("latin-1")}
    )
    assert response.status == 200 and CUSTOM_ATTRIBUTES not in response.headers
    [warning] = [record for record in caplog.records if CUSTOM_ATTRIBUTES in record.getMessage()]
    assert warning.levelno == logging.WARNING and given not in warning.getMessage()


def test_all_that_is_echoed_together_stays_below_the_limit(lmi: Host) -> None:
    sent = {CUSTOM_ATTRIBUTES: "x" * 1024, INFERENCE_ID: "y" * 64}
    for stream in (False, True):
        response, _ = lmi.post({"inputs": "say hi", "stream": stream}, headers=sent)
        assert (
            sum(len(name) + len(value) + 4 for name, value in response.getheaders())
            < MAX_HEADER_BYTES
        )


def test_nothing_of_a_body_is_in_a_header_or_in_the_reason(lmi: Host) -> None:
    mark = "Sesame"
    for body in (
        {"inputs": f"say {mark}"},
        {"inputs": "say a", "parameters": {"top_k": mark}},
        {"model": mark, "prompt": "x"},
    ):
        response, _ = lmi.post(body)
        assert mark not in str(response.getheaders()) and mark not in response.reason


STREAMS = [
    ("/invocations", {"inputs": "PROMPT"}),
    ("/invocations", {"inputs": "PROMPT", "parameters": {"output_formatter": "sse"}}),
    ("/invocations", {"prompt": "PROMPT"}),
    ("/v1/completions", {"prompt": "PROMPT"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "PROMPT"}], "model": ""}),
    ("/v1/responses", {"input": "PROMPT"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "PROMPT"}], "max_tokens": 50}),
    ("/generate_stream", {"inputs": "PROMPT"}),
    ("/v2/models/scripted/generate_stream", {"text_input": "PROMPT"}),
]


def asked(body: dict[str, object], prompt: str) -> dict[str, object]:
    streamed: dict[str, object] = json.loads(
        json.dumps(body | {"stream": True}).replace("PROMPT", prompt)
    )
    return streamed


@pytest.mark.parametrize(("path", "body"), STREAMS)
@pytest.mark.parametrize("prompt", ["say é漢🎉", "fail é漢🎉", "say "])
def test_every_stream_ends_with_a_newline(
    lmi: Host, path: str, body: dict[str, object], prompt: str
) -> None:
    response, answer = lmi.post(asked(body, prompt), path)
    assert response.status == 200 and answer.endswith(b"\n"), answer
    assert "content-length" not in response.headers


def texts(answer: bytes) -> list[object]:
    """Every string anywhere in the records of a stream, without ids."""

    def strings(value: object) -> Iterator[object]:
        if isinstance(value, dict | list):
            for part in (
                (value | {"request_id": None}).values() if isinstance(value, dict) else value
            ):
                yield from strings(part)
        elif isinstance(value, str) and not value.startswith(
            ("cmpl-", "chatcmpl-", "msg_", "resp_")
        ):
            yield value

    lines = [line.removeprefix(b"data:").strip() for line in answer.splitlines()]
    return [text for line in lines if line.startswith(b"{") for text in strings(json.loads(line))]


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_a_stream_can_be_all_ascii_and_say_the_same(
    lmi: Host, in_ascii: Host, path: str, body: dict[str, object]
) -> None:
    for prompt in ("say é漢🎉", "fail é漢🎉"):
        answer = in_ascii.post(asked(body, prompt), path)[1]
        plain_answer = lmi.post(asked(body, prompt), path)[1]
        assert answer.isascii() and not plain_answer.isascii()
        assert texts(answer) == texts(plain_answer)


def test_other_characters_are_escaped_as_json_does_and_bytes_that_are_no_text_stay() -> None:
    assert as_ascii("é漢🎉".encode()) == rb"\u00e9\u6f22\ud83c\udf89"
    assert as_ascii(b"plain") == b"plain" and as_ascii(b"\xff") == b"\xff"


@pytest.mark.parametrize(("path", "body"), STREAMS)
@pytest.mark.parametrize("prompt", ["say hi", "fail ab", "oom"])
def test_a_buffered_stream_has_the_same_bytes_its_length_and_its_real_status(
    lmi: Host, buffering: Host, path: str, body: dict[str, object], prompt: str
) -> None:
    counts = buffering.server_block.frontends[0].num_requests
    num_before = dict(counts.items())
    response, answer = buffering.post(asked(body, prompt), path)
    streamed, plain_answer = lmi.post(asked(body, prompt), path)

    assert response.headers["content-length"] == str(len(answer))
    assert "transfer-encoding" not in response.headers
    assert response.headers["content-type"] == streamed.headers["content-type"]
    assert len(answer) == len(plain_answer) and texts(answer) == texts(plain_answer)
    assert (response.status >= 400) == (b'"error"' in answer.replace(b'"error":null', b""))

    wait_until(
        lambda: dict(counts.items())[str(response.status)] == num_before[str(response.status)] + 1
    )


def test_an_openai_model_of_nothing_is_the_served_one(lmi: Host) -> None:
    for more in ({"model": ""}, {"model": None}, {}):
        response, answer = lmi.post({"prompt": "say hi", **more}, "/v1/completions")
        assert (response.status, json.loads(answer)["model"]) == (200, "scripted")


@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_limit_of_a_body_counts_for_one_in_chunks_too(tmp_path: Path, is_chunked: bool) -> None:
    with host(tmp_path, server={"max_request_size": 1000}) as lmi:
        body = json.dumps({"inputs": "say hi"}).encode()
        for data, status in ((body, 200), (body + b" " * 2000, 413)):
            pieces = [data[n : n + 7] for n in range(0, len(data), 7)]
            response, answer = lmi.send(
                "POST", "/invocations", iter(pieces) if is_chunked else data
            )
            assert response.status == status, answer

        assert "at most 1000 bytes (max_request_size)" in json.loads(answer)["error"]
