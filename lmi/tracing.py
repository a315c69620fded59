"""OpenTelemetry traces of requests, sent over OTLP from a thread, where
`option.otlp_traces_endpoint` says to whom.

Names of attributes are those of OpenTelemetry's conventions for HTTP and for generative AI (1.37
and newer), and those that vLLM's `llm_request` has beside them. The library reads its variables of
resource, sampler and exporter.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lmi import __version__
from lmi.errors import BadConfiguration
from lmi.executor import RequestPerfMetrics
from lmi.http.exchange import Exchange
from lmi.server.answer_stats import AnswerStats
from lmi.server.twins import REASONS
from lmi.shared.state import FrontEndRecord

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise BadConfiguration(f"option.otlp_traces_endpoint needs the extra otel: {error}") from None

# The most requests in one message.
MAX_SENT = 256
# The time for the last spans, when the process ends.
CLOSE_S = 0.5
# The headers that name the trace of a request.
CONTEXT = ("traceparent", "tracestate")
# An attribute that is None is left out.
Attributes = dict[str, str | int | float | Sequence[str] | None]
PHASES = ("queue", "prefill", "decode")

log = logging.getLogger(__name__)


class Exporter(SpanProcessor):
    """The spans of one front end on their way to the collector, which takes them every
    `send_every_s`.

    The spans of `max_waiting` requests wait for it. `record` counts the requests whose spans were
    lost.
    """

    def __init__(
        self,
        endpoint: str,
        record: FrontEndRecord,
        send_every_s: float = 1.0,
        max_waiting: int = 2048,
    ) -> None:
        # One line of ours says what happens.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        resource = Resource.create({"service.version": __version__})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "lmi"}))

        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self)
        self._tracer = provider.get_tracer("lmi", __version__)
        self._endpoint = endpoint
        self._client = OTLPSpanExporter(endpoint)
        self._send_every_s = send_every_s
        self._max_waiting = max_waiting
        self._record = record
        self._count_lock = threading.Lock()
        self._waiting: deque[EndedRequest] = deque()
        self._ended_spans: list[ReadableSpan] = []
        self._is_away = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def add(self, exchange: Exchange, answers: Sequence[AnswerStats]) -> None:
        """Take a request that has ended. Its headers may name the trace that it belongs to."""
        if len(self._waiting) >= self._max_waiting:
            self._lose(1)
            return

        context = {name: exchange.headers[name] for name in CONTEXT if name in exchange.headers}
        self._waiting.append(EndedRequest(of_request(exchange, answers), context))

    async def close(self) -> None:
        """Send what waits, if the collector takes it at once."""
        self._closing.set()
        if not self._is_away:
            await asyncio.to_thread(self._thread.join, CLOSE_S)

        self._client.shutdown()  # type: ignore[no-untyped-call]

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span of the library that the sampler wants."""
        if span.context is not None and span.context.trace_flags.sampled:
            self._ended_spans.append(span)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(self._send_every_s)
            while self._waiting:
                num_requests = min(len(self._waiting), MAX_SENT)
                self._send([self._waiting.popleft() for _ in range(num_requests)])

    def _send(self, requests: list[EndedRequest]) -> None:
        for request in requests:
            offset_ns = time.time_ns() - time.monotonic_ns()
            parent = TraceContextTextMapPropagator().extract(request.context)
            self._make(request.span, parent, SpanKind.SERVER, offset_ns)
            # The event loop comes first.
            time.sleep(0)

        spans = self._ended_spans
        self._ended_spans = []
        is_taken = not spans or self._client.export(spans) is SpanExportResult.SUCCESS
        if not is_taken:
            self._lose(len(requests))

        if not is_taken and not self._is_away:
            log.warning(
                "%s takes no traces: they are lost, and counted, until it does", self._endpoint
            )
        elif self._is_away and is_taken:
            log.info("%s takes traces again", self._endpoint)

        self._is_away = not is_taken

    def _make(self, span: TraceSpan, parent: Context, kind: SpanKind, offset_ns: int) -> None:
        start_ns = offset_ns + round(span.start_s * 1e9)
        end_ns = offset_ns + round(span.end_s * 1e9)
        attributes = {name: value for name, value in span.attributes.items() if value is not None}
        library_span = self._tracer.start_span(
            span.name, parent, kind, attributes, start_time=start_ns
        )
        if span.error:
            library_span.set_status(Status(StatusCode.ERROR, span.error))

        context = set_span_in_context(library_span, parent)
        for child in span.children:
            self._make(child, context, SpanKind.INTERNAL, offset_ns)

        library_span.end(end_ns)

    def _lose(self, num: int) -> None:
        with self._count_lock:
            self._record.num_lost_traces += num


@dataclass(slots=True)
class TraceSpan:
    """What happened from one moment to another, in seconds of `time.monotonic()`. `error` is the
    label of one.
    """

    name: str
    start_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    children: list[TraceSpan] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """The span of a request, and the headers that name the trace that it belongs to."""

    span: TraceSpan
    context: dict[str, str]


def of_request(exchange: Exchange, answers: Sequence[AnswerStats]) -> TraceSpan:
    """Return the span of a request that has ended, with a span for each of its answers."""
    # The path with names for its parameters, so that spans have few names.
    route = exchange.scope["route"].path_format if "route" in exchange.scope else ""

    attributes: Attributes = {
        "http.request.method": exchange.method,
        "http.response.status_code": exchange.status,
        "http.response.header.x-request-id": [exchange.request_id],
        "url.path": exchange.path,
        "http.route": route or None,
        "error.type": exchange.error_label or None,
    }
    children = [_of_answer(stats, exchange.request_id) for stats in answers]
    error = ""
    if exchange.status >= 500:
        error = exchange.error_label or "internal"

    name = f"{exchange.method} {route}".strip()
    return TraceSpan(name, exchange.started_s, time.monotonic(), attributes, children, error)


def _of_answer(stats: AnswerStats, request_id: str) -> TraceSpan:
    request = stats.requests[0]
    sampling = request.sampling
    model = request.adapter or stats.model
    operation = "text_completion" if request.chat is None else "chat"

    num_sequences = sum(request.num_sequences for request in stats.requests)
    num_generated = sum(stats.lengths.values())
    first_token_s = None
    if num_generated:
        first_token_s = stats.first_token_s - stats.started_s

    phases = list(_phases(stats))
    durations_s = {phase.name: phase.end_s - phase.start_s for phase in phases}

    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "lmi",
        "gen_ai.request.id": request_id,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [REASONS.get(stats.outcome, stats.outcome)],
        "gen_ai.request.stream": request.is_streaming,
        "gen_ai.request.n": num_sequences,
        "gen_ai.request.choice.count": request.num_sequences,
        "gen_ai.request.max_tokens": request.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.usage.input_tokens": stats.num_prompt_tokens,
        "gen_ai.usage.prompt_tokens": stats.num_prompt_tokens,
        "gen_ai.usage.output_tokens": num_generated,
        "gen_ai.usage.completion_tokens": num_generated,
        "gen_ai.usage.cache_read.input_tokens": stats.num_cached_tokens,
        "gen_ai.latency.e2e": stats.ended_s - stats.started_s,
        "gen_ai.latency.time_to_first_token": first_token_s,
        "gen_ai.latency.time_in_queue": durations_s.get("queue"),
        "gen_ai.latency.time_in_model_prefill": durations_s.get("prefill"),
        "gen_ai.latency.time_in_model_decode": durations_s.get("decode"),
    }
    error = "error" if stats.outcome == "error" else ""
    name = f"{operation} {model}"
    return TraceSpan(name, stats.started_s, stats.ended_s, attributes, phases, error)


def _phases(stats: AnswerStats) -> Iterator[TraceSpan]:
    """Yield the phases as the engine saw them: of several sequences from the first one's begin to
    the last one's end.

    An engine tells its times at the end of a sequence. Where the client or a stop string ended it,
    only the decoding is known, from what arrived here.
    """
    first_token_s = _first(stats.times, "first_token_time")
    if not first_token_s and stats.lengths:
        first_token_s = stats.first_token_s

    last_tokens_s = [times.last_token_time for times in stats.times if times.last_token_time]
    moments = [
        _first(stats.times, "arrival_time"),
        _first(stats.times, "first_scheduled_time"),
        first_token_s,
        max(last_tokens_s, default=stats.ended_s),
    ]
    for name, start_s, end_s in zip(PHASES, moments, moments[1:], strict=False):
        if start_s is not None and end_s is not None:
            yield TraceSpan(name, start_s, max(start_s, end_s))


def _first(times_of_sequences: Sequence[RequestPerfMetrics], name: str) -> float | None:
    moments = [getattr(times, name) for times in times_of_sequences]
    return min((moment for moment in moments if moment is not None), default=None)
