"""The spans of one HTTP request: the request, each of its answers, and of each answer queue, prefill and decode.

Names of attributes are those of OpenTelemetry's conventions for HTTP and for generative AI (1.37 and newer), and those
that vLLM's `llm_request` has beside them. Nothing here knows OpenTelemetry's library.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lmi.executor import RequestPerfMetrics
from lmi.http.exchange import Exchange
from lmi.server.metric_twins import REASONS
from lmi.server.respond import Meter

Attributes = dict[str, str | int | float | Sequence[str]]
PHASES = ("queue", "prefill", "decode")


@dataclass(slots=True)
class TraceSpan:
    """What happened from one moment to another, in seconds of `time.monotonic()`. `error` is the label of one."""

    name: str
    start_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    children: list[TraceSpan] = field(default_factory=list)
    error: str = ""


def of_request(exchange: Exchange, meters: Sequence[Meter]) -> TraceSpan:
    """Return the span of a request that has ended, with a span for each of its answers."""
    route = _route(exchange)
    attributes: Attributes = {
        "http.request.method": exchange.method,
        "http.response.status_code": exchange.status,
        "http.response.header.x-request-id": [exchange.request_id],
        "url.path": exchange.path,
        **({"http.route": route} if route else {}),
        **({"error.type": exchange.error_label} if exchange.error_label else {}),
    }
    children = [_of_answer(meter, exchange.request_id) for meter in meters]
    error = (exchange.error_label or "internal") if exchange.status >= 500 else ""
    name = f"{exchange.method} {route}".strip()
    return TraceSpan(name, exchange.started_s, time.monotonic(), attributes, children, error)


def _route(exchange: Exchange) -> str:
    """Return the path with names for its parameters, so that spans have few names, or "" if it is no route."""
    if "endpoint" not in exchange.scope:
        return ""
    path = exchange.path
    for name, value in exchange.scope["path_params"].items():
        path = path.replace(f"/{value}", f"/{{{name}}}", 1)
    return path


def _of_answer(meter: Meter, request_id: str) -> TraceSpan:
    request, sampling, end_s = meter.requests[0], meter.requests[0].sampling, meter.ended_s
    model = request.adapter or meter.model
    operation = "text_completion" if request.chat is None else "chat"
    num_generated = sum(meter.lengths.values())
    given = {
        "max_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
    }
    phases = list(_phases(meter))
    took_s = {phase.name: phase.end_s - phase.start_s for phase in phases}
    first_token_s = {"time_to_first_token": meter.first_token_s - meter.started_s} if num_generated else {}
    latencies = {
        "e2e": end_s - meter.started_s,
        **first_token_s,
        **{f"time_in_{'queue' if name == 'queue' else f'model_{name}'}": seconds for name, seconds in took_s.items()},
    }
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
        **{f"gen_ai.request.{name}": value for name, value in given.items() if value is not None},
        **{f"gen_ai.usage.{name}_tokens": meter.num_prompt_tokens for name in ("input", "prompt")},
        **{f"gen_ai.usage.{name}_tokens": num_generated for name in ("output", "completion")},
        "gen_ai.usage.cache_read.input_tokens": meter.num_cached_tokens,
        **{f"gen_ai.latency.{name}": seconds for name, seconds in latencies.items()},
    }
    error = "error" if meter.outcome == "error" else ""
    return TraceSpan(f"{operation} {model}", meter.started_s, end_s, attributes, phases, error)


def _phases(meter: Meter) -> Iterator[TraceSpan]:
    """Yield the phases as the engine saw them: of several sequences from the first one's begin to the last one's end.

    An engine tells its times at the end of a sequence. Where the client or a stop string ended it, only the decoding is
    known, from what arrived here.
    """
    moments = [
        _first(meter.times, "arrival_time"),
        _first(meter.times, "first_scheduled_time"),
        _first(meter.times, "first_token_time") or (meter.first_token_s if meter.lengths else None),
        max((times.last_token_time for times in meter.times if times.last_token_time), default=meter.ended_s),
    ]
    for name, start_s, end_s in zip(PHASES, moments, moments[1:], strict=False):
        if start_s is not None and end_s is not None:
            yield TraceSpan(name, start_s, max(start_s, end_s))


def _first(times: Sequence[RequestPerfMetrics], name: str) -> float | None:
    return min((moment for each in times if (moment := getattr(each, name)) is not None), default=None)
