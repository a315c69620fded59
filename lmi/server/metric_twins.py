"""Our series under vLLM's names, so that what reads vLLM's `/metrics` reads ours: dashboards, gateways, autoscalers.

Nothing is measured for them: each is made from the family of ours beside it in the table. All engines of a model are
its engine "0", because a gateway that reads one series of a server must see the load of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

PREFIX = "vllm:"
TWINS = (
    ("lmi_requests_running", "num_requests_running"),
    ("lmi_requests_waiting", "num_requests_waiting"),
    ("lmi_kv_cache_usage_ratio", "kv_cache_usage_perc"),
    ("lmi_kv_cache_usage_ratio", "gpu_cache_usage_perc"),  # its former name, which gateways and autoscalers read
    ("lmi_preemptions", "num_preemptions"),
    ("lmi_prompt_tokens", "prompt_tokens"),
    ("lmi_prompt_tokens", "prefix_cache_queries"),
    ("lmi_prompt_tokens_cached", "prompt_tokens_cached"),
    ("lmi_prompt_tokens_cached", "prefix_cache_hits"),
    ("lmi_generated_tokens", "generation_tokens"),
    ("lmi_finished", "request_success"),
    ("lmi_time_to_first_token_seconds", "time_to_first_token_seconds"),
    ("lmi_inter_token_latency_seconds", "inter_token_latency_seconds"),
    ("lmi_answer_time_seconds", "e2e_request_latency_seconds"),
    ("lmi_queue_time_seconds", "request_queue_time_seconds"),
    ("lmi_prefill_time_seconds", "request_prefill_time_seconds"),
    ("lmi_decode_time_seconds", "request_decode_time_seconds"),
    ("lmi_prompt_length_tokens", "request_prompt_tokens"),
    ("lmi_sequence_length_tokens", "request_generation_tokens"),
    ("lmi_longest_sequence_tokens", "request_max_num_generation_tokens"),
)
LEAST_BOUNDS = {  # vLLM's, where ours are finer below
    "lmi_inter_token_latency_seconds": 0.01,
    **dict.fromkeys(("lmi_answer_time_seconds", "lmi_queue_time_seconds"), 0.3),
    **dict.fromkeys(("lmi_prefill_time_seconds", "lmi_decode_time_seconds"), 0.3),
}
REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop", "cancelled": "abort", "error": "error"}


def twins(family: Metric) -> Iterator[Metric]:
    """Yield what vLLM would call a family of ours. It has most under one name, some under two or none."""
    for name in (theirs for ours, theirs in TWINS if ours == family.name):
        twin = Metric(PREFIX + name, family.documentation, family.type)
        values: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        for sample in family.samples:
            if (labels := _labels(family.name, sample.labels)) is not None:
                values[twin.name + sample.name.removeprefix(family.name), tuple(labels.items())] += sample.value
        twin.samples = [Sample(series, dict(labels), value) for (series, labels), value in values.items()]
        yield twin


def _labels(name: str, labels: Mapping[str, str]) -> dict[str, str] | None:
    """Return vLLM's labels for those of a sample of ours, None for a sample that vLLM does not have."""
    theirs = {"model_name": labels["model"], "engine": "0"}
    if "finish_reason" in labels:
        reason = REASONS.get(labels["finish_reason"])
        return None if reason is None else {**theirs, "finished_reason": reason}
    if "le" in labels:
        return None if float(labels["le"]) < LEAST_BOUNDS.get(name, 0) else {**theirs, "le": labels["le"]}
    return theirs
