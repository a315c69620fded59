"""The dynamic-batch schema over real sockets: lists, lines, and the end of an answer to several
requests.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import pytest

from tests.scripted import Host, host, wait_until

FAILURE = "invoke handler failure"


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("batch"), model={"dynamic_batch": True}) as served:
        yield served


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    model: dict[str, object] = {"dynamic_batch": True, "enable_streaming": True}
    with host(tmp_path_factory.mktemp("lines"), model=model) as served:
        yield served


def test_each_input_has_its_answer_in_order_and_one_alone_a_list_too(batch: Host) -> None:
    response, body = batch.post({"inputs": ["say hello", "say a", "say hello"]})
    assert (response.status, response.headers["content-type"]) == (200, "application/json")
    assert json.loads(body) == [{"generated_text": text} for text in ("hello", "a", "hello")]
    assert json.loads(batch.post({"inputs": "say a"})[1]) == [{"generated_text": "a"}]
    assert json.loads(batch.post(b"say a", headers={"content-type": "text/plain"})[1]) == [
        {"generated_text": "a"}
    ]


def test_more_inputs_than_run_at_once_are_all_answered(batch: Host) -> None:
    texts = [f"{n}" for n in range(200)]
    _, body = batch.post(
        {"inputs": [f"say {text}" for text in texts], "parameters": {"return_full_text": True}}
    )
    assert [answer["generated_text"] for answer in json.loads(body)] == [
        f"say {text}{text}" for text in texts
    ]


@pytest.mark.parametrize(
    "body", [b"[1]", b'{"inputs": [5]}', b'{"inputs": "say a", "parameters": {"top_p": 2}}']
)
def test_what_a_client_gets_wrong_is_424_with_three_keys(batch: Host, body: bytes) -> None:
    response, answer = batch.post(body)
    fields = json.loads(answer)
    assert (response.status, list(fields)) == (424, ["code", "message", "error"])
    assert (fields["code"], fields["message"]) == (424, FAILURE)


def test_one_input_that_fails_fails_them_all_and_the_others_stop(batch: Host) -> None:
    response, body = batch.post({"inputs": ["hang", "fail", "hang"]})
    assert (response.status, json.loads(body)["error"]) == (424, "the script says so")
    wait_until(lambda: batch.executor.num_active == 0)


def test_a_client_that_leaves_ends_all_of_its_requests(batch: Host) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", batch.port, timeout=60)
    connection.request("POST", "/invocations", json.dumps({"inputs": ["hang", "hang", "hang"]}))
    wait_until(lambda: batch.executor.num_active == 3)
    connection.close()
    wait_until(lambda: batch.executor.num_active == 0)


def stream_of(lines: Host, inputs: object, **parameters: object) -> list[list[str]]:
    response, body = lines.post({"inputs": inputs, "parameters": parameters})
    assert (response.status, response.headers["content-type"]) == (200, "application/jsonlines")
    assert body.endswith(b"\n") and body.isascii()

    return [json.loads(line)["outputs"] for line in body.splitlines()]


def test_the_lines_of_a_stream_are_together_the_whole_text(lines: Host) -> None:
    outputs = stream_of(lines, ["say hello", "say é"])
    assert all(len(texts) == 2 for texts in outputs)
    assert ["".join(texts) for texts in zip(*outputs, strict=True)] == ["hello", "é"]


def test_a_stream_has_one_line_for_a_step_of_all_its_inputs(lines: Host) -> None:
    outputs = stream_of(lines, ["run abc", "run b", "run c", "run dd"], max_new_tokens=25)
    # Where each begins a step later
    assert len(outputs) <= 25 + 3
    assert ["".join(texts) for texts in zip(*outputs, strict=True)] == [
        ("abc" * 9)[:25],
        "b" * 25,
        "c" * 25,
        "d" * 25,
    ]


def test_inputs_that_end_early_leave_the_lines_to_the_others(lines: Host) -> None:
    outputs = stream_of(lines, ["run a", "say b", "say cc"], max_new_tokens=20)
    assert len(outputs) <= 20 + 2
    assert ["".join(texts) for texts in zip(*outputs, strict=True)] == ["a" * 20, "b", "cc"]


def test_a_failure_in_a_stream_is_its_last_line_and_before_it_a_status(lines: Host) -> None:
    response, body = lines.post({"inputs": ["fail ab", "hang"]})
    *before, last = [json.loads(line) for line in body.splitlines()]

    assert response.status == 200 and "".join(line["outputs"][0] for line in before) == "ab"
    assert last == {"code": 424, "message": FAILURE, "error": "the script says so"}

    response, body = lines.post({"inputs": "fail"})
    assert (response.status, json.loads(body)["code"]) == (424, 424)
