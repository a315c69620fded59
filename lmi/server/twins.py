"""Our series a second time, under the names that vLLM gives them.

What reads vLLM's `/metrics` reads ours too: dashboards, gateways and autoscalers.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import Metric

PREFIX = "vllm:"
# The label of a replica, which only vLLM's series have: who reads ours sees the load of all.
ENGINE = "engine"
Labels = tuple[tuple[str, str], ...]


class Twin(NamedTuple):
    """A family of ours whose samples are added to one of vLLM's, with `labels` beside their own.
    `sign` is 1, or -1 where they are subtracted.
    """

    family: str
    name: str
    labels: Labels = ()
    sign: int = 1


class Series(NamedTuple):
    """A series of vLLM's, of which samples are added up."""

    name: str
    labels: Labels


TWINS = (
    Twin("lmi_requests_running", "num_requests_running"),
    Twin("lmi_requests_waiting", "num_requests_waiting"),
    Twin("lmi_requests_waiting", "num_requests_waiting_by_reason", (("reason", "capacity"),)),
    Twin("lmi_kv_cache_usage_ratio", "kv_cache_usage_perc"),
    # Its former name, which gateways and autoscalers read.
    Twin("lmi_kv_cache_usage_ratio", "gpu_cache_usage_perc"),
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
# The least bounds of vLLM's histograms, where ours have finer ones below.
LEAST_BOUNDS = {
    "lmi_inter_token_latency_seconds": 0.01,
    "lmi_time_per_output_token_seconds": 0.01,
    "lmi_answer_time_seconds": 0.3,
    "lmi_queue_time_seconds": 0.3,
    "lmi_prefill_time_seconds": 0.3,
    "lmi_decode_time_seconds": 0.3,
}
# vLLM's word for each outcome of a sequence.
REASONS = {
    "length": "length",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "cancelled": "abort",
    "error": "error",
}


def twins(families: Iterable[Metric]) -> Iterator[Metric]:
    """Yield families of ours under vLLM's names. Most have one name there, some have several or
    none.

    Of two families with one name the last counts: it has a label for each replica.
    """
    families_by_name = {family.name: family for family in families}
    metrics: dict[str, Metric] = {}
    values: defaultdict[str, dict[Series, float]] = defaultdict(dict)
    for twin in TWINS:
        family = families_by_name[twin.family]
        name = twin.name if twin.name.startswith("http_") else PREFIX + twin.name
        metrics.setdefault(name, Metric(name, family.documentation, family.type))
        for sample in family.samples:
            labels = _twin_labels(family.name, sample.labels)
            if labels is None:
                continue

            suffix = sample.name.removeprefix(family.name)
            series = Series(name + suffix, (*labels.items(), *twin.labels))
            value = values[name].get(series, 0.0)
            values[name][series] = value + twin.sign * sample.value

    for name, metric in metrics.items():
        for series, value in values[name].items():
            metric.add_sample(series.name, dict(series.labels), value)

        yield metric

    yield _awake(families_by_name["lmi_engines_ready"])
    yield _loras_together(families_by_name["lmi_lora_requests_info"])


def _awake(ready: Metric) -> Metric:
    """Return which models have an engine. No model ever sleeps, but a dashboard shows one without
    this series as down.
    """
    metric = Metric(PREFIX + "engine_sleep_state", "Engines that are awake, as all are", "gauge")
    for sample in ready.samples:
        if not sample.value:
            continue

        for name in ("awake", "weights_offloaded", "discard_all"):
            labels = {**_engine_labels(sample.labels), "sleep_state": name}
            metric.add_sample(metric.name, labels, name == "awake")

    return metric


def _loras_together(loras: Metric) -> Metric:
    """Return which adapters run and wait, of all models together: who reads vLLM's series takes
    one, by which it chooses a server.
    """
    name = PREFIX + "lora_requests_info"
    metric = Metric(name, "Adapters that run and wait", "gauge")
    if not loras.samples:
        return metric

    labels_of_models = [sample.labels for sample in loras.samples]
    max_lora = sum(int(labels["max_lora"]) for labels in labels_of_models)
    labels = {"max_lora": str(max_lora)}
    for label in ("running_lora_adapters", "waiting_lora_adapters"):
        labels[label] = joined_names(of_model[label] for of_model in labels_of_models)

    metric.add_sample(name, labels, loras.samples[-1].value)
    return metric


def joined_names(lists: Iterable[str]) -> str:
    """Return the names that stand in these lists with commas between them, each once, as such a
    list.
    """
    names = set[str]()
    for text in lists:
        names.update(text.split(","))

    return ",".join(sorted(names - {""}))


def _engine_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return vLLM's labels for the model and the replica of a sample. What front ends count is
    shown as of engine 0.
    """
    return {"model_name": labels["model"], "engine": labels.get(ENGINE, "0")}


def _twin_labels(name: str, labels: Mapping[str, str]) -> dict[str, str] | None:
    """Return vLLM's labels for those of a sample of ours, None for a sample that vLLM does not
    have.
    """
    of_model = _engine_labels(labels) if "model" in labels else {}
    if "code" in labels:
        code = labels["code"]
        return {"status": f"{code[0]}xx" if code.isdecimal() else code}

    if "block_size" in labels:
        return {
            **of_model,
            "block_size": labels["block_size"],
            "num_gpu_blocks": labels["num_blocks"],
        }

    if "finish_reason" in labels:
        reason = REASONS.get(labels["finish_reason"])
        return None if reason is None else {**of_model, "finished_reason": reason}

    if "le" in labels:
        bound = labels["le"]
        is_finer = float(bound) < LEAST_BOUNDS.get(name, 0)
        return None if is_finer else {**of_model, "le": bound}

    return of_model
