"""Batch transforms and asynchronous endpoints against a whole server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.served import Server, launch
from tests.system.container import wait_until, write_model

LINES = {"content-type": "application/jsonlines"}


@contextmanager
def running(
    folder: Path, max_num_sequences: int, environ: dict[str, str], **options: object
) -> Iterator[Server]:
    defaults = {
        "option.max_rolling_batch_size": max_num_sequences,
        "option.echo_step_ms": 2,
        "frontend_workers": 1,
    }
    with launch(write_model(folder, **defaults, **options), environ) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A container of a batch transform, with room for 200 sequences."""
    environ = {"SAGEMAKER_BATCH": "True", "SAGEMAKER_MAX_PAYLOAD_IN_MB": "1"}
    with running(tmp_path_factory.mktemp("job") / "model", 200, environ) as server:
        yield server


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A container of an asynchronous endpoint, with room for one sequence."""
    with running(
        tmp_path_factory.mktemp("async") / "model", 1, {"SERVING_BUFFER_STREAMS": "true"}
    ) as server:
        yield server


def parameters(server: Server) -> tuple[int, str, int]:
    fields = json.loads(server.request("GET", "/execution-parameters").body)
    assert list(fields) == ["MaxConcurrentTransforms", "BatchStrategy", "MaxPayloadInMB"]
    concurrent, strategy, payload = fields.values()
    return concurrent, strategy, payload


def test_execution_parameters_fit_the_engine_and_the_limit_of_a_job(
    job: Server, endpoint: Server, tmp_path: Path
) -> None:
    assert parameters(endpoint) == (1, "SINGLE_RECORD", 6)
    assert parameters(job) == (100, "SINGLE_RECORD", 1)
    variables = {
        "SAGEMAKER_BATCH_STRATEGY": "MULTI_RECORD",
        "SAGEMAKER_MAX_CONCURRENT_TRANSFORMS": "30",
    }
    with running(tmp_path / "model", 64, {}) as server:
        assert parameters(server) == (16, "SINGLE_RECORD", 6)

    with running(
        tmp_path / "other", 64, variables | {"SAGEMAKER_MAX_PAYLOAD_IN_MB": "0"}
    ) as server:
        assert parameters(server) == (30, "MULTI_RECORD", 0)


def test_a_thousand_records_come_back_in_order_each_on_its_line(job: Server) -> None:
    bad = {
        0: b"{",
        17: b"null",
        500: b'{"inputs": 5}',
        999: b'{"inputs": "x", "parameters": {"top_p": 7, "do_sample": true}}',
    }
    lines = [
        bad.get(
            n,
            json.dumps({"inputs": f"{n} ", "parameters": {"max_new_tokens": len(f"{n}")}}).encode(),
        )
        for n in range(1000)
    ]
    answer = job.post(b"\n".join(lines) + b"\n", headers=LINES)

    assert (answer.status, answer.headers["content-type"]) == (200, "application/jsonlines")
    assert (
        answer.headers["content-length"] == str(len(answer.body))
        and "transfer-encoding" not in answer.headers
    )
    assert answer.body.count(b"\n") == 1000

    for n, record in enumerate(answer.lines):
        if n in bad:
            assert record["code"] == 424 and record["error"], (n, record)
        else:
            assert record == {"generated_text": str(n)}

    assert job.is_idle()


def test_a_job_that_leaves_frees_every_sequence(job: Server) -> None:
    line = json.dumps({"inputs": "abc", "parameters": {"max_new_tokens": 100_000 - 10}}).encode()
    connection = job.connect_raw()
    body = b"\n".join([line] * 300)
    head = (
        b"POST /invocations HTTP/1.1\r\nHost: a\r\nContent-Type: "
        b"application/x-ndjson\r\nContent-Length: %d\r\n\r\n"
    )
    connection.sendall(head % len(body) + body)
    wait_until(lambda: job.metrics()["lmi_requests_running"] == 200, "as many run as can")
    assert job.metrics()["lmi_sequences_in_flight"] == 1

    connection.close()
    wait_until(job.is_idle, "nothing is left of the job")


def test_a_body_of_lines_may_come_in_chunks(job: Server) -> None:
    line = b'{"inputs": "a", "parameters": {"max_new_tokens": 1}}\n'
    with job.connect_raw() as connection:
        connection.sendall(
            b"POST /invocations HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: "
            b"application/jsonlines\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for at in range(0, len(line) * 50, 11):
            piece = (line * 50)[at : at + 11]
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))

        connection.sendall(b"0\r\n\r\n")
        heard = b"".join(iter(lambda: connection.recv(65536), b""))

    assert heard.startswith(b"HTTP/1.1 200 ") and heard.count(b'{"generated_text": "a"}\n') == 50


STREAMED = [
    (
        "/invocations",
        {"inputs": "abc", "parameters": {"max_new_tokens": 3}},
        "application/jsonlines",
    ),
    ("/invocations", {"prompt": "abc", "max_tokens": 3}, "application/jsonlines"),
    ("/v1/completions", {"prompt": "abc", "max_tokens": 3}, "text/event-stream"),
    (
        "/generate_stream",
        {"inputs": "abc", "parameters": {"max_new_tokens": 3}},
        "text/event-stream",
    ),
]


@pytest.mark.parametrize(("path", "body", "media_type"), STREAMED)
def test_an_asynchronous_endpoint_gets_a_stream_whole(
    job: Server, endpoint: Server, path: str, body: dict[str, object], media_type: str
) -> None:
    streamed, whole = (server.post(body | {"stream": True}, path) for server in (job, endpoint))
    assert (
        whole.headers["content-length"] == str(len(whole.body))
        and "transfer-encoding" not in whole.headers
    )
    assert whole.headers["content-type"] == streamed.headers["content-type"] == media_type
    assert "content-length" not in streamed.headers
    assert whole.body.count(b"\n") == streamed.body.count(b"\n") and len(whole.body) == len(
        streamed.body
    )
