"""Sends spans to a collector over OTLP, from a thread of its own, with OpenTelemetry's library.

A request only leaves its spans in a queue of bounded length. While the collector is away they are lost, and counted.
The library reads OpenTelemetry's variables of the resource, the sampler and the exporter.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from lmi import __version__
from lmi.errors import BadConfiguration
from lmi.http.exchange import Exchange
from lmi.server.respond import Meter
from lmi.shared.state import FrontEndRecord
from lmi.tracing.spans import TraceSpan, of_request

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

MAX_SENT = 256  # requests in one message
CLOSE_S = 0.5  # for the last spans, when the process ends
CONTEXT = ("traceparent", "tracestate")  # headers

log = logging.getLogger(__name__)


class Exporter(SpanProcessor):
    """The spans of one front end on their way to the collector, which takes them every `send_every_s`.

    The spans of `max_waiting` requests wait for it. `record` counts the requests whose spans were lost.
    """

    def __init__(
        self, endpoint: str, record: FrontEndRecord, send_every_s: float = 1.0, max_waiting: int = 2048
    ) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # one line of ours says what happens
        resource = Resource.create({"service.version": __version__})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "lmi"}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self)
        self._tracer = provider.get_tracer("lmi", __version__)
        self._endpoint, self._client = endpoint, OTLPSpanExporter(endpoint)
        self._send_every_s, self._max_waiting = send_every_s, max_waiting
        self._record, self._count_lock = record, threading.Lock()
        self._waiting: deque[tuple[TraceSpan, dict[str, str]]] = deque()
        self._made: list[ReadableSpan] = []
        self._is_away = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def add(self, exchange: Exchange, meters: Sequence[Meter]) -> None:
        """Take a request that has ended. Its headers may name the trace that it belongs to."""
        if len(self._waiting) >= self._max_waiting:
            self._lose(1)
            return
        context = {name: exchange.headers[name] for name in CONTEXT if name in exchange.headers}
        self._waiting.append((of_request(exchange, meters), context))

    async def close(self) -> None:
        """Send what waits, if the collector takes it at once."""
        self._closing.set()
        deadline_s = time.monotonic() + CLOSE_S
        while self._thread.is_alive() and not self._is_away and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
        self._client.shutdown()  # type: ignore[no-untyped-call]

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span of the library that the sampler wants."""
        if span.context is not None and span.context.trace_flags.sampled:
            self._made.append(span)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(self._send_every_s)
            while num := min(len(self._waiting), MAX_SENT):
                self._send([self._waiting.popleft() for _ in range(num)])

    def _send(self, roots: list[tuple[TraceSpan, dict[str, str]]]) -> None:
        for root, context in roots:
            offset_ns = time.time_ns() - time.monotonic_ns()
            self._make(root, TraceContextTextMapPropagator().extract(context), SpanKind.SERVER, offset_ns)
            time.sleep(0)  # the event loop comes first
        made, self._made = self._made, []
        is_taken = not made or self._client.export(made) is SpanExportResult.SUCCESS
        if not is_taken:
            self._lose(len(roots))
        if not is_taken and not self._is_away:
            log.warning("%s takes no traces: they are lost, and counted, until it does", self._endpoint)
        elif self._is_away and is_taken:
            log.info("%s takes traces again", self._endpoint)
        self._is_away = not is_taken

    def _make(self, span: TraceSpan, parent: Context, kind: SpanKind, offset_ns: int) -> None:
        start_ns, end_ns = (offset_ns + round(moment_s * 1e9) for moment_s in (span.start_s, span.end_s))
        made = self._tracer.start_span(span.name, parent, kind, span.attributes, start_time=start_ns)
        if span.error:
            made.set_status(Status(StatusCode.ERROR, span.error))
        for child in span.children:
            self._make(child, set_span_in_context(made, parent), SpanKind.INTERNAL, offset_ns)
        made.end(end_ns)

    def _lose(self, num: int) -> None:
        with self._count_lock:
            self._record.num_lost_traces += num
