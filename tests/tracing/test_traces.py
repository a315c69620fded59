"""Traces of requests, as a small collector on loopback takes them over OTLP."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lmi.errors import BadConfiguration
from lmi.runtime import ServerRuntime
from lmi.server.app import exporter_of
from lmi.server.front_end import FrontEnd
from lmi.settings.config import ServerConfig
from lmi.tracing import Exporter
from tests.scripted import Host, host, wait_until

trace_service_pb2 = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{CALLER}-01", "x-request-id": "request-1"}
PHASES = ["queue", "prefill", "decode"]


@dataclass
class Collector:
    """A collector that answers with `status`, while `is_open` is set."""

    status: int = 200
    is_open: threading.Event = field(default_factory=threading.Event)
    num_asked: int = 0
    spans: list[Any] = field(default_factory=list)
    resources: list[Any] = field(default_factory=list)
    url: str = ""

    def take(self, body: bytes) -> int:
        self.num_asked += 1
        self.is_open.wait()
        if self.status == 200:
            for batch in trace_service_pb2.ExportTraceServiceRequest.FromString(
                body
            ).resource_spans:
                self.resources.append(values(batch.resource))
                self.spans += [span for scope in batch.scope_spans for span in scope.spans]

        return self.status

    def span(self, name: str) -> Any:
        """Return the only span of a name, once it is there."""
        wait_until(lambda: any(span.name == name for span in self.spans))
        [span_found] = [span for span in self.spans if span.name == name]
        return span_found

    def below(self, parent: Any) -> list[Any]:
        """Return the spans below one in the order of their begin."""
        children = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return sorted(
            children, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano)
        )


def values(holder: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    attributes = {attribute.key: attribute.value for attribute in holder.attributes}
    return {key: value_of(value) for key, value in attributes.items()}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return (
        [value_of(element) for element in value.array_value.values]
        if kind == "array_value"
        else getattr(value, kind)
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    collector.is_open.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            status = collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    try:
        yield collector
    finally:
        collector.is_open.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def lmi(collector: Collector, tmp_path: Path) -> Iterator[Host]:
    with traced(collector, tmp_path, 0.01) as running:
        yield running


def traced(collector: Collector, folder: Path, send_every_s: float, max_waiting: int = 100) -> Any:
    return host(
        folder,
        traces=lambda front: Exporter(collector.url, front.record, send_every_s, max_waiting),
    )


def complete(lmi: Host, prompt: str, headers: dict[str, str] | None = None, **more: object) -> int:
    response, _ = lmi.post(
        {"prompt": prompt, "max_tokens": 8, **more}, "/v1/completions", headers or PARENT
    )
    return response.status


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_of_its_callers_trace_with_queue_prefill_and_decode(
    stream: bool, collector: Collector, lmi: Host
) -> None:
    assert complete(lmi, "say hello", stream=stream, temperature=0.5, n=1) == 200

    root = collector.span("POST /v1/completions")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, CALLER)
    assert values(root) == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.response.header.x-request-id": ["request-1"],
        "url.path": "/v1/completions",
        "http.route": "/v1/completions",
    }

    [answer] = collector.below(root)
    answer_values = values(answer)
    latencies = {
        name: answer_values.pop(name)
        for name in list(answer_values)
        if name.startswith("gen_ai.latency.")
    }

    assert answer.name == "text_completion scripted"
    assert answer_values == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "lmi",
        "gen_ai.request.id": "request-1",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.model": "scripted",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.request.stream": stream,
        "gen_ai.request.n": 1,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.prompt_tokens": 9,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.completion_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }

    phases = collector.below(answer)
    assert [phase.name for phase in phases] == PHASES

    moments = [
        moment for span in phases for moment in (span.start_time_unix_nano, span.end_time_unix_nano)
    ]

    assert moments == sorted(moments) and moments[1:5:2] == moments[2:5:2]
    assert root.start_time_unix_nano <= moments[0] and moments[-1] <= root.end_time_unix_nano
    assert all(seconds >= 0 for seconds in latencies.values())
    assert {name.removeprefix("gen_ai.latency.") for name in latencies} == {
        *("e2e", "time_to_first_token"),
        *("time_in_queue", "time_in_model_prefill", "time_in_model_decode"),
    }
    assert collector.resources[0]["service.name"] == "lmi"


def test_each_line_of_a_body_is_an_answer_of_its_own(collector: Collector, lmi: Host) -> None:
    lines = b'{"inputs": "say a"}\n{"inputs": "say b"}\n{"inputs": 5}\n'
    lmi.post(lines, headers={"content-type": "application/jsonlines"})
    answers = collector.below(collector.span("POST /invocations"))
    assert [answer.name for answer in answers] == ["text_completion scripted"] * 2
    assert all([phase.name for phase in collector.below(answer)] == PHASES for answer in answers)


def test_of_an_answer_that_a_stop_string_ends_only_the_decoding_is_known(
    collector: Collector, lmi: Host
) -> None:
    assert complete(lmi, "run hello", stop=["ll"]) == 200

    [answer] = collector.below(collector.span("POST /v1/completions"))
    assert values(answer)["gen_ai.response.finish_reasons"] == ["stop"]
    assert [phase.name for phase in collector.below(answer)] == ["decode"]


def test_a_failure_shows_its_label_and_only_one_of_the_server_is_an_error(
    collector: Collector, lmi: Host
) -> None:
    assert complete(lmi, "fail ab") == 500

    failed = collector.span("POST /v1/completions")
    assert (values(failed)["error.type"], failed.status.code) == (
        "generation_failed",
        failed.status.STATUS_CODE_ERROR,
    )

    [answer] = collector.below(failed)
    assert (values(answer)["gen_ai.response.finish_reasons"], answer.status.code) == (
        ["error"],
        failed.status.code,
    )
    assert lmi.post({"inputs": 5})[0].status == 424

    refused = collector.span("POST /invocations")
    assert (values(refused)["error.type"], refused.status.code) == ("malformed_request", 0)
    assert collector.below(refused) == []


def test_paths_of_one_route_have_one_name_and_probes_no_trace(
    collector: Collector, lmi: Host
) -> None:
    for path in ("/ping", "/metrics", "/nowhere/1"):
        lmi.send("GET", path)

    lmi.post({"inputs": "say a"}, "/predictions/scripted")
    assert collector.span("POST /predictions/{model}")
    assert [span.name for span in collector.spans if span.kind == span.SPAN_KIND_SERVER] == [
        *("GET", "POST /predictions/{model}"),
    ]


def test_a_caller_that_does_not_sample_its_trace_leaves_none(
    collector: Collector, lmi: Host
) -> None:
    complete(lmi, "say a", {"traceparent": f"00-{TRACE}-{CALLER}-00"})
    complete(lmi, "say a", {"traceparent": f"00-{TRACE}-{CALLER}-01"})
    assert collector.span("POST /v1/completions")


def test_while_the_collector_is_away_traces_are_lost_counted_and_told_once(
    collector: Collector, lmi: Host, caplog: pytest.LogCaptureFixture
) -> None:
    record = lmi.server_block.frontends[0]
    collector.status = 400
    with caplog.at_level(logging.INFO, "lmi.tracing"):
        for number in (1, 2):
            assert complete(lmi, "say a") == 200
            wait_until(lambda number=number: record.num_lost_traces == number)

        collector.status = 200
        assert complete(lmi, "say a") == 200
        assert collector.span("POST /v1/completions")

        wait_until(lambda: len(caplog.messages) >= 2)

    assert caplog.messages == [
        f"{collector.url} takes no traces: they are lost, and counted, until it does",
        f"{collector.url} takes traces again",
    ]
    assert b"lmi_traces_lost_total 2.0" in lmi.send("GET", "/metrics")[1]


def test_a_collector_that_hangs_holds_up_neither_requests_nor_the_end(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than this test may take
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "400")
    collector.is_open.clear()
    with traced(collector, tmp_path, 0.01, max_waiting=2) as lmi:
        assert complete(lmi, "say a") == 200

        wait_until(lambda: collector.num_asked)
        for _ in range(5):
            assert complete(lmi, "say a") == 200

        # A trace is added behind its answer
        wait_until(lambda: lmi.server_block.frontends[0].num_lost_traces == 3)

    assert not collector.is_open.is_set()


def test_the_option_names_the_collector(collector: Collector, tmp_path: Path) -> None:
    with host(tmp_path, server={"otlp_traces_endpoint": collector.url}, traces=exporter_of) as lmi:
        assert complete(lmi, "say a") == 200
        assert collector.span("POST /v1/completions")


def test_without_the_library_the_option_is_refused_with_the_extra_that_has_it(
    lmi: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "lmi.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    server = ServerConfig(otlp_traces_endpoint="http://127.0.0.1/v1/traces")
    front_end = FrontEnd(
        ServerRuntime(Path("/r"), server), lmi.server_block, lmi.server_block.frontends[0]
    )
    with pytest.raises(
        BadConfiguration, match=r"^option\.otlp_traces_endpoint needs the extra otel: "
    ):
        exporter_of(front_end)


def test_the_last_traces_are_sent_when_the_server_ends(
    collector: Collector, tmp_path: Path
) -> None:
    with traced(collector, tmp_path, 400) as lmi:
        assert complete(lmi, "say a") == 200

    assert collector.span("POST /v1/completions")
