"""Our series under vLLM's names, so that what reads vLLM's `/metrics` reads ours: dashboards, gateways, autoscalers.

All engines of a model are its engine "0", because a gateway that reads one series of a server must see the load of all.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

PREFIX = "vllm:"
Labels = tuple[tuple[str, str], ...]


class Twin(NamedTuple):
    """A family of ours that counts in one of vLLM's, where its samples have `labels` too. `sign` is 1 or -1."""

    ours: str
    name: str
    labels: Labels = ()
    sign: int = 1


TWINS = (
    Twin("lmi_requests_running", "num_requests_running"),
    Twin("lmi_requests_waiting", "num_requests_waiting"),
    Twin("lmi_requests_waiting", "num_requests_waiting_by_reason", (("reason", "capacity"),)),
    Twin("lmi_kv_cache_usage_ratio", "kv_cache_usage_perc"),
    Twin("lmi_kv_cache_usage_ratio", "gpu_cache_usage_perc"),  # its former name, which gateways and autoscalers read
    Twin("lmi_kv_cache", "cache_config"),
    Twin("lmi_preemptions", "num_preemptions"),
    Twin("lmi_prompt_tokens", "prompt_tokens"),
    Twin("lmi_prompt_tokens", "prefix_cache_queries"),
    Twin("lmi_prompt_tokens_cached", "prompt_tokens_cached"),
    Twin("lmi_prompt_tokens_cached", "prompt_tokens_cached_by_source", (("source", "device"),)),
    Twin("lmi_prompt_tokens_cached", "prefix_cache_hits"),
    Twin("lmi_prompt_tokens_cached", "prompt_tokens_by_source", (("source", "local_cache_hit"),)),
    Twin("lmi_prompt_tokens", "prompt_tokens_by_source", (("source", "local_compute"),)),
    Twin("lmi_prompt_tokens_cached", "prompt_tokens_by_source", (("source", "local_compute"),), -1),
    Twin("lmi_generated_tokens", "generation_tokens"),
    Twin("lmi_finished", "request_success"),
    Twin("lmi_time_to_first_token_seconds", "time_to_first_token_seconds"),
    Twin("lmi_inter_token_latency_seconds", "inter_token_latency_seconds"),
    Twin("lmi_time_per_output_token_seconds", "request_time_per_output_token_seconds"),
    Twin("lmi_answer_time_seconds", "e2e_request_latency_seconds"),
    Twin("lmi_queue_time_seconds", "request_queue_time_seconds"),
    Twin("lmi_prefill_time_seconds", "request_prefill_time_seconds"),
    Twin("lmi_decode_time_seconds", "request_decode_time_seconds"),
    Twin("lmi_step_length_tokens", "iteration_tokens_total"),
    Twin("lmi_drafts", "spec_decode_num_drafts"),
    Twin("lmi_draft_tokens", "spec_decode_num_draft_tokens"),
    Twin("lmi_draft_tokens_accepted", "spec_decode_num_accepted_tokens"),
    Twin("lmi_prompt_length_tokens", "request_prompt_tokens"),
    Twin("lmi_prefill_length_tokens", "request_prefill_kv_computed_tokens"),
    Twin("lmi_sequence_length_tokens", "request_generation_tokens"),
    Twin("lmi_longest_sequence_tokens", "request_max_num_generation_tokens"),
    # What its HTTP server counts, without a prefix and of no model.
    Twin("lmi_requests", "http_requests"),
    Twin("lmi_request_duration_seconds", "http_request_duration_seconds"),
)
LEAST_BOUNDS = {  # vLLM's, where ours are finer below
    "lmi_inter_token_latency_seconds": 0.01,
    "lmi_time_per_output_token_seconds": 0.01,
    **dict.fromkeys(("lmi_answer_time_seconds", "lmi_queue_time_seconds"), 0.3),
    **dict.fromkeys(("lmi_prefill_time_seconds", "lmi_decode_time_seconds"), 0.3),
}
REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop", "cancelled": "abort", "error": "error"}


def twins(families: Iterable[Metric]) -> Iterator[Metric]:
    """Yield what vLLM would call families of ours. One has most under one name, some under several or none."""
    ours = {family.name: family for family in families}
    found: dict[str, Metric] = {}
    values: defaultdict[str, defaultdict[tuple[str, Labels], float]] = defaultdict(lambda: defaultdict(float))
    for twin in TWINS:
        family = ours[twin.ours]
        name = twin.name if twin.name.startswith("http_") else PREFIX + twin.name
        found.setdefault(name, Metric(name, family.documentation, family.type))
        for sample in family.samples:
            if (labels := _labels(family.name, sample.labels)) is not None:
                series = name + sample.name.removeprefix(family.name)
                values[name][series, (*labels.items(), *twin.labels)] += twin.sign * sample.value
    for name, metric in found.items():
        metric.samples = [Sample(series, dict(labels), value) for (series, labels), value in values[name].items()]
        yield metric
    yield _awake(ours["lmi_engines_ready"])


def _awake(ready: Metric) -> Metric:
    """Return which models have an engine. None ever sleeps, but a dashboard takes one without this series as down."""
    metric = Metric(PREFIX + "engine_sleep_state", "Engines that are awake, as all are", "gauge")
    for model in (sample.labels["model"] for sample in ready.samples if sample.value):
        for state in ("awake", "weights_offloaded", "discard_all"):
            labels = {"model_name": model, "engine": "0", "sleep_state": state}
            metric.add_sample(metric.name, labels, state == "awake")
    return metric


def _labels(name: str, labels: Mapping[str, str]) -> dict[str, str] | None:
    """Return vLLM's labels for those of a sample of ours, None for a sample that vLLM does not have."""
    theirs = {"model_name": labels["model"], "engine": "0"} if "model" in labels else {}
    if "code" in labels:
        code = labels["code"]
        return {"status": f"{code[0]}xx" if code.isdecimal() else code}
    if "block_size" in labels:
        return {**theirs, "block_size": labels["block_size"], "num_gpu_blocks": labels["num_blocks"]}
    if "finish_reason" in labels:
        reason = REASONS.get(labels["finish_reason"])
        return None if reason is None else {**theirs, "finished_reason": reason}
    if "le" in labels:
        return None if float(labels["le"]) < LEAST_BOUNDS.get(name, 0) else {**theirs, "le": labels["le"]}
    return theirs
