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
from lmi.server.meter import Meter
from lmi.server.metrics import REASONS
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

MAX_SENT = 256  # requests in one message
CLOSE_S = 0.5  # for the last spans, when the process ends
CONTEXT = ("traceparent", "tracestate")  # headers
Attributes = dict[str, str | int | float | Sequence[str] | None]  # None: is left out
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
        logging.getLogger("opentelemetry").setLevel(
            logging.CRITICAL
        )  # one line of ours says what happens
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
        if not self._is_away:
            await asyncio.to_thread(self._thread.join, CLOSE_S)

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
            self._make(
                root, TraceContextTextMapPropagator().extract(context), SpanKind.SERVER, offset_ns
            )
            time.sleep(0)  # the event loop comes first

        made, self._made = self._made, []
        is_taken = not made or self._client.export(made) is SpanExportResult.SUCCESS
        if not is_taken:
            self._lose(len(roots))

        if not is_taken and not self._is_away:
            log.warning(
                "%s takes no traces: they are lost, and counted, until it does", self._endpoint
            )
        elif self._is_away and is_taken:
            log.info("%s takes traces again", self._endpoint)

        self._is_away = not is_taken

    def _make(self, span: TraceSpan, parent: Context, kind: SpanKind, offset_ns: int) -> None:
        start_ns, end_ns = (
            offset_ns + round(moment_s * 1e9) for moment_s in (span.start_s, span.end_s)
        )
        given = {name: value for name, value in span.attributes.items() if value is not None}
        made = self._tracer.start_span(span.name, parent, kind, given, start_time=start_ns)
        if span.error:
            made.set_status(Status(StatusCode.ERROR, span.error))

        for child in span.children:
            self._make(child, set_span_in_context(made, parent), SpanKind.INTERNAL, offset_ns)

        made.end(end_ns)

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


def of_request(exchange: Exchange, meters: Sequence[Meter]) -> TraceSpan:
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
    children = [_of_answer(meter, exchange.request_id) for meter in meters]
    error = (exchange.error_label or "internal") if exchange.status >= 500 else ""
    name = f"{exchange.method} {route}".strip()
    return TraceSpan(name, exchange.started_s, time.monotonic(), attributes, children, error)


def _of_answer(meter: Meter, request_id: str) -> TraceSpan:
    request = meter.requests[0]
    sampling = meter.requests[0].sampling
    end_s = meter.ended_s
    model = request.adapter or meter.model
    operation = "text_completion" if request.chat is None else "chat"
    num_generated = sum(meter.lengths.values())
    phases = list(_phases(meter))
    took_s = {phase.name: phase.end_s - phase.start_s for phase in phases}
    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "lmi",
        "gen_ai.request.id": request_id,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [REASONS.get(meter.outcome, meter.outcome)],
        "gen_ai.request.stream": request.is_streaming,
        "gen_ai.request.n": sum(each.num_sequences for each in meter.requests),
        "gen_ai.request.choice.count": request.num_sequences,
        "gen_ai.request.max_tokens": request.max_new_tokens,
        **{
            f"gen_ai.request.{name}": getattr(sampling, name)
            for name in ("temperature", "top_p", "top_k", "seed")
        },
        **{f"gen_ai.usage.{name}_tokens": meter.num_prompt_tokens for name in ("input", "prompt")},
        **{f"gen_ai.usage.{name}_tokens": num_generated for name in ("output", "completion")},
        "gen_ai.usage.cache_read.input_tokens": meter.num_cached_tokens,
        "gen_ai.latency.e2e": end_s - meter.started_s,
        "gen_ai.latency.time_to_first_token": meter.first_token_s - meter.started_s
        if num_generated
        else None,
        "gen_ai.latency.time_in_queue": took_s.get("queue"),
        "gen_ai.latency.time_in_model_prefill": took_s.get("prefill"),
        "gen_ai.latency.time_in_model_decode": took_s.get("decode"),
    }
    error = "error" if meter.outcome == "error" else ""
    return TraceSpan(f"{operation} {model}", meter.started_s, end_s, attributes, phases, error)


def _phases(meter: Meter) -> Iterator[TraceSpan]:
    """Yield the phases as the engine saw them: of several sequences from the first one's begin to
    the last one's end.

    An engine tells its times at the end of a sequence. Where the client or a stop string ended it,
    only the decoding is known, from what arrived here.
    """
    moments = [
        _first(meter.times, "arrival_time"),
        _first(meter.times, "first_scheduled_time"),
        _first(meter.times, "first_token_time") or (meter.first_token_s if meter.lengths else None),
        max(
            (times.last_token_time for times in meter.times if times.last_token_time),
            default=meter.ended_s,
        ),
    ]
    for name, start_s, end_s in zip(PHASES, moments, moments[1:], strict=False):
        if start_s is not None and end_s is not None:
            yield TraceSpan(name, start_s, max(start_s, end_s))


def _first(times: Sequence[RequestPerfMetrics], name: str) -> float | None:
    return min(
        (moment for each in times if (moment := getattr(each, name)) is not None), default=None
    )
