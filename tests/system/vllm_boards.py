"""The queries of vLLM's dashboards of 2026, by panel, as their generator writes them.

Source: examples/observability/dashboards/grafana of vLLM: vllm_overview, vllm_instances,
vllm_kv_cache, vllm_service_status and vllm_speculative_decoding. Panels that ask the same stand
here once.
"""

from __future__ import annotations

WINDOW = "$__rate_interval"
ON_TARGET = 'job=~"$job", instance=~"$instance"'
ON_FLEET = 'job=~"$job", model_name=~"$model_name", instance=~"$instance"'
ON_ENGINE = f'{ON_FLEET}, engine=~"$engine"'
TTFT = "vllm:time_to_first_token_seconds"
ITL = "vllm:inter_token_latency_seconds"
TPOT = "vllm:request_time_per_output_token_seconds"
E2E = "vllm:e2e_request_latency_seconds"
QUEUE = "vllm:request_queue_time_seconds"
ENDED = "vllm:request_success_total"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
BY_REASON = "vllm:num_requests_waiting_by_reason"
USAGE = "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
HITS = "vllm:prefix_cache_hits_total"
LOOKED_UP = "vllm:prefix_cache_queries_total"
PROMPT, CACHED, GENERATED = (
    *("vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total"),
    "vllm:generation_tokens_total",
)
SOURCES = "vllm:prompt_tokens_by_source_total"
STEPS = "vllm:iteration_tokens_total"
SLEEP = "vllm:engine_sleep_state"
STARTED = "process_start_time_seconds"
LENGTHS = {
    "Prompt length": "vllm:request_prompt_tokens",
    "Output length": "vllm:request_generation_tokens",
}
LATENCIES = {
    "Time to first token (TTFT)": TTFT,
    "Inter-token latency (ITL)": ITL,
    "Time per output token (TPOT)": TPOT,
    "End-to-end latency": E2E,
    "Queue time": QUEUE,
    **LENGTHS,
}
IS_5XX = 'status="5xx"'
IS_ERROR = 'finished_reason="error"'
IS_CAPACITY = 'reason="capacity"'
IS_AWAKE = 'sleep_state="awake"'
IS_DISCARDED = 'sleep_state="discard_all"'
OF_INSTANCE = "model_name, instance"
OF_ENGINE = "instance, engine"


class Board:
    """Writes queries about the series that a dashboard selects."""

    def __init__(self, selector: str, window: str = WINDOW) -> None:
        self.selector = selector
        self.window = window

    def of(self, name: str, *more: str) -> str:
        return f"{name}{{{', '.join((self.selector, *more))}}}"

    def of_all(self, how: str, name: str, *more: str, by: str = "") -> str:
        return f"{how}{_by(by)}({self.of(name, *more)})"

    def rate(self, name: str, *more: str, by: str = "") -> str:
        return f"sum{_by(by)}(rate({self.of(name, *more)}[{self.window}]))"

    def ratio(self, above: str, below: str, by: str = "") -> str:
        return divided(self.rate(above, by=by), self.rate(below, by=by))

    def mean(self, name: str, by: str = "") -> str:
        return self.ratio(f"{name}_sum", f"{name}_count", by)

    def quantile(self, share: float, name: str, by: str = "") -> str:
        labels = f"le, {by}" if by else "le"
        return (
            f"histogram_quantile({share}, sum by ({labels}) "
            f"(rate({self.of(f'{name}_bucket')}[{self.window}])))"
        )

    def shares(self, name: str) -> list[str]:
        return [*(self.quantile(share, name) for share in (0.5, 0.95, 0.99)), self.mean(name)]


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""


def divided(above: str, below: str, matching: str = "") -> str:
    return f"{above} / {matching} ({below} > 0)"


FLEET = Board(ON_FLEET)
RANGE = Board(ON_FLEET, "$__range")
ENGINE = Board(ON_ENGINE)
TARGET = Board(ON_TARGET)
LAST_5M = Board(ON_ENGINE, "5m")
HTTP = "http_requests_total"
UPTIME = "* on (job, instance) group_left (model_name) group by (job, instance, model_name)"


def within(name: str, bound: str) -> str:
    return divided(FLEET.rate(f"{name}_bucket", f'le="{bound}"'), FLEET.rate(f"{name}_count"))


def distribution(name: str) -> str:
    buckets = FLEET.of(f"{name}_bucket")
    count = FLEET.of(f"{name}_count")
    whole = f"sum(increase({count}[$__range]))"
    return divided(f"sum by (le) (increase({buckets}[$__range]))", whole, "on () group_left ()")


OVERVIEW = {
    "Requests / s": [FLEET.rate(ENDED)],
    "Input tok/s": [FLEET.rate(PROMPT)],
    "Output tok/s": [FLEET.rate(GENERATED)],
    "5xx ratio": [divided(f"({TARGET.rate(HTTP, IS_5XX)} or vector(0))", TARGET.rate(HTTP))],
    "TTFT p95, ITL p95, E2E p95": [FLEET.quantile(0.95, name) for name in (TTFT, ITL, E2E)],
    "Unreachable": ['count(up{job=~"$job"} == 0) or vector(0)'],
    "Engines": [FLEET.of_all("count", RUNNING)],
    "Running": [FLEET.of_all("sum", RUNNING)],
    "Waiting": [FLEET.of_all("sum", WAITING)],
    "KV cache": [FLEET.of_all(how, USAGE) for how in ("max", "avg", "min")],
    "Preemptions": [FLEET.rate(PREEMPTIONS)],
    "Prefix hits": [FLEET.ratio(HITS, LOOKED_UP)],
    "TTFT SLO": [within(TTFT, "1.0")],
    "TPOT SLO": [within(TPOT, "0.1")],
    "Per-model summary": [
        (
            f"count by (model_name) (group by (model_name, instance) "
            f"(last_over_time({FLEET.of(RUNNING)}[$__range])))"
        ),
        *(RANGE.rate(name, by="model_name") for name in (ENDED, GENERATED)),
        *(RANGE.quantile(0.95, name, "model_name") for name in (TTFT, ITL, E2E)),
        divided(RANGE.rate(ENDED, IS_ERROR, by="model_name"), RANGE.rate(ENDED, by="model_name")),
        f"max by (model_name) (max_over_time({FLEET.of(USAGE)}[$__range]))",
        f"round(sum by (model_name) (increase({FLEET.of(PREEMPTIONS)}[$__range])))",
    ],
    **{panel: FLEET.shares(name) for panel, name in LATENCIES.items()},
    "Mean time per request phase": [
        *(
            FLEET.mean(f"vllm:request_{phase}_time_seconds")
            for phase in ("queue", "prefill", "decode")
        ),
    ],
    "Latency distributions": [
        f"sum by (le) (rate({FLEET.of(f'{name}_bucket')}[{WINDOW}]))" for name in (TTFT, ITL, E2E)
    ],
    "Token throughput": [FLEET.rate(name, by="model_name") for name in (PROMPT, GENERATED)],
    "Finished requests by reason": [FLEET.rate(ENDED, by="finished_reason")],
    "Scheduler queue": [FLEET.of_all("sum", RUNNING), FLEET.of_all("sum", BY_REASON, IS_CAPACITY)],
    "Tokens per engine step": [
        *(FLEET.quantile(share, STEPS) for share in (0.5, 0.99)),
        FLEET.mean(STEPS),
    ],
    "Cache hit rates": [FLEET.ratio(HITS, LOOKED_UP)],
    "Prompt tokens by source": [
        FLEET.rate(SOURCES, f'source="{source}"') for source in ("local_compute", "local_cache_hit")
    ],
    "Finish reason share": [
        divided(
            FLEET.rate(ENDED, by="finished_reason"),
            FLEET.rate(ENDED),
            "ignoring (finished_reason) group_left ()",
        )
    ],
    "Length distributions": [distribution(name) for name in LENGTHS.values()],
    "HTTP requests by status, by endpoint": [
        TARGET.rate(HTTP, by=label) for label in ("status", "handler")
    ],
    "HTTP mean duration by endpoint": [TARGET.mean("http_request_duration_seconds", "handler")],
}
INSTANCES = {
    "Instances": [
        *(ENGINE.of_all(how, RUNNING, by=OF_INSTANCE) for how in ("count", "sum")),
        ENGINE.of_all("sum", WAITING, by=OF_INSTANCE),
        ENGINE.of_all("max", USAGE, by=OF_INSTANCE),
        *(LAST_5M.rate(name, by=OF_INSTANCE) for name in (ENDED, GENERATED, PREEMPTIONS)),
        *(LAST_5M.quantile(0.95, name, OF_INSTANCE) for name in (TTFT, ITL)),
        f"max by ({OF_INSTANCE}) ((time() - {TARGET.of(STARTED)}) {UPTIME} ({ENGINE.of(RUNNING)}))",
    ],
    "Load balance": [
        *(ENGINE.of_all("sum", name, by=OF_ENGINE) for name in (RUNNING, WAITING)),
        ENGINE.of_all("max", USAGE, by=OF_ENGINE),
        ENGINE.rate(ENDED, by="instance"),
        *(ENGINE.rate(name, by=OF_ENGINE) for name in (PROMPT, GENERATED)),
    ],
    "Latency by instance": [
        *(ENGINE.quantile(0.95, name, "instance") for name in (TTFT, ITL, E2E)),
        ENGINE.mean(QUEUE, "instance"),
    ],
    "Engine scheduler": [
        ENGINE.rate(f"{STEPS}_count", by=OF_ENGINE),
        ENGINE.mean(STEPS, OF_ENGINE),
        ENGINE.rate(PREEMPTIONS, by=OF_ENGINE),
        ENGINE.of_all("sum", BY_REASON, by="instance, engine, reason"),
        ENGINE.ratio(HITS, LOOKED_UP, OF_ENGINE),
    ],
    "API server process": [
        TARGET.rate("process_cpu_seconds_total", by="instance"),
        TARGET.of_all("sum", "process_resident_memory_bytes", by="instance"),
        " / ".join(
            TARGET.of_all("sum", f"process_{which}_fds", by="instance") for which in ("open", "max")
        ),
    ],
    "Cache configuration": [f'vllm:cache_config_info{{{ON_TARGET}, engine=~"$engine"}}'],
    "Engine sleep state": [
        f"(1 - {ENGINE.of_all('max', SLEEP, IS_AWAKE, by=OF_ENGINE)})"
        f" * (1 + {ENGINE.of_all('max', SLEEP, IS_DISCARDED, by=OF_ENGINE)})"
    ],
}
KV_CACHE = {
    "KV cache usage": [ENGINE.of_all(how, USAGE) for how in ("max", "avg")],
    "Cached prompt tokens": [ENGINE.ratio(CACHED, PROMPT)],
    "Waiting for capacity": [ENGINE.of_all("sum", BY_REASON, IS_CAPACITY)],
    "Cached prompt tokens by tier": [
        ENGINE.rate("vllm:prompt_tokens_cached_by_source_total", by="source")
    ],
    "Prompt and computed tokens per request": [
        ENGINE.mean(f"vllm:request_{tokens}_tokens") for tokens in ("prompt", "prefill_kv_computed")
    ],
}
DRAFTS, DRAFTED, RIGHT = (
    f"vllm:spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens")
)
SPECULATIVE = {
    "Draft acceptance rate": [ENGINE.ratio(RIGHT, DRAFTED, by) for by in ("", "model_name")],
    "Acceptance length": [f"1 + {ENGINE.ratio(RIGHT, DRAFTS, by)}" for by in ("", "model_name")],
    "Tokens and drafts / s": [ENGINE.rate(name) for name in (RIGHT, DRAFTED, DRAFTS)],
    "Output from drafts": [ENGINE.ratio(RIGHT, GENERATED)],
}
SERVES = f"and on () count({FLEET.of(RUNNING)})"
NOW = Board(ON_FLEET, "5m")
AWAKE = FLEET.of_all("max", SLEEP, IS_AWAKE)
FAILED = divided(NOW.rate(ENDED, IS_ERROR), NOW.rate(ENDED))
SERVICE_STATUS = {
    "Status": [f"(2 - ({AWAKE} == bool 0)) > 1"],
    "Response time": [f"({NOW.quantile(0.5, TTFT)}) {SERVES}"],
    "Output speed": [
        f"({divided(NOW.rate(GENERATED), f'sum(avg_over_time({FLEET.of(RUNNING)}[5m]))')}) {SERVES}",  # noqa: E501
    ],
    "Success rate": [f"(1 - ({FAILED})) {SERVES}"],
    "Requests / min": [f"(60 * {NOW.rate(ENDED)}) {SERVES}"],
}
BOARDS = {
    **{f"overview: {panel}": queries for panel, queries in OVERVIEW.items()},
    **{f"instances: {panel}": queries for panel, queries in INSTANCES.items()},
    **{f"kv cache: {panel}": queries for panel, queries in KV_CACHE.items()},
    **{f"speculative decoding: {panel}": queries for panel, queries in SPECULATIVE.items()},
    **{f"service status: {panel}": queries for panel, queries in SERVICE_STATUS.items()},
}
# The series of the other panels, and why lmi has none.
WITHOUT_MEANING = {
    "vllm:external_prefix_cache_queries_total": "there is no cache outside of the engine",
    "vllm:mm_cache_queries_total": "there are no images whose encodings could be kept",
    'vllm:num_requests_waiting_by_reason{reason="deferred"}': "what waits, waits for a place",
    'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}': (
        "no keys and values come from elsewhere"
    ),
    "vllm:lora_requests_info": "no engine has adapters here",
    "vllm:sleep_mode_operation_duration_seconds_count": "no engine sleeps",
    "vllm:rl_weight_update_operation_duration_seconds_count": (
        "weights do not change while a model runs"
    ),
    "vllm:estimated_flops_per_gpu_total": "operations are not counted",
    "vllm:estimated_read_bytes_per_gpu_total": "bytes of memory are not counted",
    "vllm:kv_block_lifetime_seconds_count": "the life of a block is not measured",
    "vllm:num_requests_kv_fetch_by_stage": "no keys and values come from elsewhere",
    "vllm:nixl_xfer_time_seconds_count": "there is no NIXL",
    "vllm:kv_offload_load_bytes_total": "blocks are not offloaded",
    "vllm:simple_kv_offload_load_blocks_total": "blocks are not offloaded",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": (
        "right tokens are not counted by their place in a draft"
    ),
}
