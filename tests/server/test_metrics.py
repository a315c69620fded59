"""A scrape shows the sum over every process that ever wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from lmi.description.document import document
from lmi.runtime import ServerRuntime
from lmi.server import metrics
from lmi.server.front_end import FrontEnd
from lmi.server.service import Models, Service
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.shared.state import STATUS_CODES, Block, Phase
from tests.scripted import host, wait_until

CONFIG = Config(
    server=ServerConfig(), model=ModelConfig(path="/m", name="demo"), engine=EngineConfig()
)


def scrape(server: Block, model: Block) -> dict[str, float]:
    """Every sample by its name and labels."""
    return samples_of(metrics.render(models_of(server, model)).decode())


def models_of(server: Block, model: Block) -> Models:
    models = Models(FrontEnd(ServerRuntime(Path("/r"), CONFIG.server), server, server.frontends[0]))
    models.add(Service(CONFIG, model, models.front_end))
    return models


def samples_of(text: str) -> dict[str, float]:
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    return {
        sample.name + "".join(f"{{{k}={v}}}" for k, v in sample.labels.items()): sample.value
        for sample in samples
    }


def test_workers_are_summed(tmp_path: Path) -> None:
    block = Block.create(tmp_path / "server", 0, num_frontends=2)
    model = Block.create(tmp_path / "model", 2, 2)
    for number, frontend in enumerate(block.frontends, start=1):
        frontend.num_requests.add("200", 10 * number)
        frontend.num_open_connections = number

    for number, of_model in enumerate(model.frontends, start=1):
        of_model.num_generated_tokens = 100 * number
        of_model.num_prompt_tokens = 50 * number
        of_model.num_cached_tokens = 40 * number
        of_model.time_to_first_token_s.observe(0.002)

    model.engines[0].num_running = 3
    model.engines[1].num_running = 4
    model.engines[0].num_used_blocks = 5
    model.engines[0].max_num_blocks = 10
    model.engines[1].max_num_blocks = 10
    model.engines[1].phase = Phase.READY
    model.engines[1].beat_s = time.monotonic()
    samples = scrape(block, model)

    assert samples["lmi_requests_total{code=200}"] == 30
    assert samples["lmi_generated_tokens_total{model=demo}"] == 300
    assert samples["lmi_prompt_tokens_total{model=demo}"] == 150
    assert samples["lmi_prompt_tokens_cached_total{model=demo}"] == 120
    assert samples["lmi_connections_open"] == 3
    assert samples["lmi_requests_running{model=demo}"] == 7
    assert samples["lmi_kv_cache_usage_ratio{model=demo}"] == 0.25
    assert samples["lmi_engines_ready{model=demo}"] == 1
    assert samples["lmi_time_to_first_token_seconds_count{model=demo}"] == 2
    assert samples["lmi_time_to_first_token_seconds_bucket{le=0.005}{model=demo}"] == 2
    assert samples["lmi_time_to_first_token_seconds_bucket{le=0.001}{model=demo}"] == 0


def test_the_queue_is_shown_by_the_three_classes_of_priority(tmp_path: Path) -> None:
    server = Block.create(tmp_path / "server", 0, 1)
    model = Block.create(tmp_path / "model", 2, 1)
    for engine in model.engines:
        engine.num_queued.set({"high": 2, "default": 3})
        engine.num_taken.set({"low": 1})
        engine.num_refused.add("low")

    model.engines[0].num_queued.set({"default": 1})
    samples = scrape(server, model)
    of_class = {
        name: [
            samples[f"lmi_{name}{{model=demo}}{{priority={label}}}"]
            for label in ("high", "low", "default")
        ]
        for name in ("queue_requests", "engine_requests", "queue_refusals_total")
    }

    assert of_class == {
        "queue_requests": [2, 0, 4],
        "engine_requests": [0, 2, 0],
        "queue_refusals_total": [0, 2, 0],
    }


def test_a_scrape_has_the_type_that_prometheus_reads(tmp_path: Path) -> None:
    with host(tmp_path) as running:
        response, body = running.send("GET", "/metrics")

    assert str(response.getheader("content-type")).startswith("text/plain; version=")
    assert response.getheader("content-length") == str(len(body))


def test_an_empty_block_scrapes(tmp_path: Path) -> None:
    samples = scrape(
        Block.create(tmp_path / "server", 0, 1), Block.create(tmp_path / "model", 1, 1)
    )
    assert samples["lmi_kv_cache_usage_ratio{model=demo}"] == 0
    assert samples["lmi_requests_total{code=503}"] == 0


def test_each_sequence_has_its_phases_and_its_length(tmp_path: Path) -> None:
    with host(tmp_path) as running:
        for body in (
            {"prompt": "say hi"},
            {"prompt": "say hi", "stream": True},
            {"prompt": ["say hi", "say hello"]},
        ):
            assert running.post(body, "/v1/completions")[0].status == 200

        samples = samples_of(running.send("GET", "/metrics")[1].decode())

    def observed(name: str) -> tuple[float, float]:
        return samples[f"lmi_{name}_count{{model=scripted}}"], samples[
            f"lmi_{name}_sum{{model=scripted}}"
        ]

    assert observed("prompt_length_tokens") == (4, 3 * len("say hi") + len("say hello"))
    # With the end token
    assert observed("sequence_length_tokens") == (
        4,
        3 * len("hi.") + len("hello."),
    )
    assert observed("longest_sequence_tokens") == (3, 2 * len("hi.") + len("hello."))

    phases = [observed(f"{phase}_time_seconds") for phase in ("queue", "prefill", "decode")]
    assert [num for num, _ in phases] == [4, 4, 4] and all(seconds > 0 for _, seconds in phases)
    assert observed("prefill_length_tokens") == (
        4,
        observed("prompt_length_tokens")[1] - 3 * len("say h"),
    )

    num_outputs, output_s = observed("time_per_output_token_seconds")
    assert num_outputs == 3 and 0 < output_s < observed("decode_time_seconds")[1]

    num_answers, answers_s = observed("answer_time_seconds")
    assert num_answers == 3 and answers_s > observed("time_to_first_token_seconds")[1]


def test_an_answer_that_its_client_leaves_has_phases_but_no_length(tmp_path: Path) -> None:
    with host(tmp_path) as running:
        engine = running.block.engines[0]
        front_end = running.block.frontends[0]
        with closing(HTTPConnection("127.0.0.1", running.port, timeout=60)) as client:
            client.request(
                "POST", "/invocations", json.dumps({"inputs": "hang hi", "stream": True})
            )
            with client.getresponse() as response:
                response.read(1)

        wait_until(lambda: sum(engine.decode_time_s.counts) == 1)
        wait_until(lambda: dict(front_end.num_finished.items())["cancelled"] == 1)

        assert sum(front_end.answer_time_s.counts) == sum(front_end.sequence_length.counts) == 0


def test_vllms_series_say_what_ours_say(tmp_path: Path) -> None:
    block = Block.create(tmp_path / "server", 0, 1)
    model = Block.create(tmp_path / "model", 1, 1)
    engine = model.engines[0]
    front_end = model.frontends[0]
    engine.num_waiting = 7
    engine.num_used_blocks = 5
    engine.max_num_blocks = 10
    engine.tokens_per_block = 16
    front_end.num_prompt_tokens = 50
    front_end.num_cached_tokens = 40
    for reason, num in (
        ("eos_token", 1),
        ("stop_sequence", 2),
        ("length", 4),
        ("cancelled", 8),
        ("error", 16),
    ):
        front_end.num_finished.add(reason, num)

    for seconds in (0.002, 0.4):
        engine.queue_time_s.observe(seconds)

    samples = {
        name: value for name, value in scrape(block, model).items() if name.startswith("vllm:")
    }
    labels = "{engine=0}{model_name=demo}"

    assert samples[f"vllm:num_requests_waiting{labels}"] == 7
    assert (
        samples[f"vllm:kv_cache_usage_perc{labels}"]
        == samples[f"vllm:gpu_cache_usage_perc{labels}"]
        == 0.5
    )
    assert (
        samples[f"vllm:prefix_cache_queries_total{labels}"]
        == samples[f"vllm:prompt_tokens_total{labels}"]
        == 50
    )
    assert (
        samples[f"vllm:prefix_cache_hits_total{labels}"]
        == samples[f"vllm:prompt_tokens_cached_total{labels}"]
        == 40
    )

    by_source = "vllm:prompt_tokens_by_source_total{engine=0}{model_name=demo}{source=%s}"
    assert [samples[by_source % source] for source in ("local_compute", "local_cache_hit")] == [
        10,
        40,
    ]
    assert samples[f"vllm:num_requests_waiting_by_reason{labels}{{reason=capacity}}"] == 7
    assert (
        samples[
            "vllm:cache_config_info{block_size=16}{engine=0}{model_name=demo}{num_gpu_blocks=10}"
        ]
        == 1
    )

    ended = "vllm:request_success_total{engine=0}{finished_reason=%s}{model_name=demo}"
    assert [samples[ended % reason] for reason in ("stop", "length", "abort", "error")] == [
        3,
        4,
        8,
        16,
    ]

    queued = "vllm:request_queue_time_seconds_bucket{engine=0}{le=%s}{model_name=demo}"
    assert [samples[queued % bound] for bound in ("0.3", "0.5", "+Inf")] == [
        1,
        2,
        2,
    ] and queued % "0.1" not in samples


def test_a_picker_finds_all_adapters_in_one_series_and_a_dashboard_those_of_each_model(
    tmp_path: Path,
) -> None:
    block = Block.create(tmp_path / "server", 0, 1)
    model = Block.create(tmp_path / "model", 2, 1)

    def shown(prefix: str) -> list[str]:
        return [
            name for name in scrape(block, model) if name.startswith(f"{prefix}lora_requests_info")
        ]

    assert shown("lmi_") == shown("vllm:") == []

    first, second = model.engines
    first.max_loras = second.max_loras = 4
    first.running_loras = "french,german"
    first.waiting_loras = "latin"
    second.running_loras = "french"
    labels = "{max_lora=8}%s{running_lora_adapters=french,german}{waiting_lora_adapters=latin}"

    assert shown("vllm:") == ["vllm:lora_requests_info" + labels % ""]
    assert shown("lmi_") == ["lmi_lora_requests_info" + labels % "{model=demo}"]


def test_vllms_series_show_each_replica_and_ours_all_together(tmp_path: Path) -> None:
    block = Block.create(tmp_path / "server", 0, 1)
    model = Block.create(tmp_path / "model", 2, 1)
    for slot, engine in enumerate(model.engines):
        engine.num_waiting = 3 + slot
        engine.num_preemptions = 5 + slot
        engine.num_used_blocks = 2 + 4 * slot
        engine.max_num_blocks = 8
        engine.tokens_per_block = 16
        engine.prefill_time_s.observe(1.0 + slot)

    model.frontends[0].num_prompt_tokens = 50
    samples = scrape(block, model)

    def by_engine(name: str, labels: str = "{engine=%d}{model_name=demo}") -> list[float]:
        return [samples[f"vllm:{name}{labels % slot}"] for slot in (0, 1)]

    assert by_engine("num_requests_waiting") == [3, 4]
    assert by_engine("num_preemptions_total") == [5, 6]
    assert by_engine("kv_cache_usage_perc") == [0.25, 0.75]
    assert by_engine("request_prefill_time_seconds_sum") == [1, 2]

    cache = "{block_size=16}{engine=%d}{model_name=demo}{num_gpu_blocks=8}"
    assert by_engine("cache_config_info", cache) == [1, 1]

    assert samples["lmi_requests_waiting{model=demo}"] == 7
    assert samples["lmi_preemptions_total{model=demo}"] == 11
    assert samples["lmi_kv_cache_usage_ratio{model=demo}"] == 0.5

    tokens = [name for name in samples if name.startswith("vllm:prompt_tokens_total")]
    assert tokens == ["vllm:prompt_tokens_total{engine=0}{model_name=demo}"]


def test_a_replica_that_was_lost_is_not_shown_as_one_without_load(tmp_path: Path) -> None:
    block = Block.create(tmp_path / "server", 0, 1)
    model = Block.create(tmp_path / "model", 2, 1)
    lost, serving = model.engines
    lost.phase = Phase.LOST
    lost.num_preemptions = 5
    serving.phase = Phase.READY
    serving.beat_s = time.monotonic()
    serving.num_running = 4
    samples = scrape(block, model)

    running = {
        name: value
        for name, value in samples.items()
        if name.startswith("vllm:num_requests_running")
    }

    assert running == {"vllm:num_requests_running{engine=1}{model_name=demo}": 4}
    assert samples["vllm:num_preemptions_total{engine=0}{model_name=demo}"] == 5


def test_statuses_are_counted_by_class_as_vllms_http_server_does(tmp_path: Path) -> None:
    block = Block.create(tmp_path / "server", 0, 2)
    model = Block.create(tmp_path / "model", 1, 1)
    for code in ("200", "200", "404", "429", "503", "other"):
        block.frontends[1].num_requests.add(code)

    samples = scrape(block, model)
    counts = {
        status: samples[f"http_requests_total{{status={status}}}"]
        for status in ("2xx", "4xx", "5xx", "other")
    }

    assert counts == {"2xx": 2, "4xx": 2, "5xx": 1, "other": 1}


def test_a_model_with_an_engine_is_awake_and_one_without_is_not_shown(tmp_path: Path) -> None:
    block = Block.create(tmp_path / "server", 0, 1)
    model = Block.create(tmp_path / "model", 2, 1)

    def states() -> dict[str, float]:
        scraped = scrape(block, model).items()
        return {
            name.rpartition("=")[2]: value
            for name, value in scraped
            if name.startswith("vllm:engine_sleep_state")
        }

    assert states() == {}

    for engine in model.engines:
        engine.phase = Phase.READY
        engine.beat_s = time.monotonic()

    assert states() == {"awake}": 1, "weights_offloaded}": 0, "discard_all}": 0}


def test_the_page_has_each_series_of_ours_beside_its_twins(tmp_path: Path) -> None:
    block = Block.create(tmp_path / "server", 0, 1)
    model = Block.create(tmp_path / "model", 1, 1)
    text = metrics.render(models_of(block, model)).decode()
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = [
        re.findall(r"`([\w:]+)`", row) for row in re.findall(r"^\| `lmi_.*$", page, re.MULTILINE)
    ]
    kinds_shown = {
        name: kind for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)
    }

    assert {
        name for row in rows for name in row if name.startswith(("lmi_", "vllm:", "http_"))
    } == kinds_shown.keys()
    assert all(
        kinds_shown[name] == kinds_shown[row[0]]
        for row in rows
        for name in row
        if name.startswith(("vllm:", "http_"))
    )


def test_each_process_has_its_memory_its_time_and_its_files(tmp_path: Path) -> None:
    block = Block.create(tmp_path / "server", 0, 2)
    model = Block.create(tmp_path / "model", 2, 1)
    block.frontends[1].pid = os.getpid()
    with subprocess.Popen(["sleep", "60"]) as process:
        model.engines[0].pid = process.pid
        # Beyond all that a kernel gives: a process that has ended
        model.engines[1].pid = 2**22 + 1

        # the kernel counts the pages of a new process late
        statm = Path(f"/proc/{process.pid}/statm")
        wait_until(lambda: int(statm.read_text().split()[1]) > 0)
        samples = scrape(block, model)
        process.kill()

    front_end_labels = "{process=front 1}"
    engine_labels = "{model=demo}{process=engine 0}"
    process_samples = {
        name: value for name, value in samples.items() if name.startswith("process_")
    }

    assert {name.partition("{")[2] for name in process_samples} == {
        front_end_labels[1:],
        engine_labels[1:],
    }
    assert (
        process_samples[f"process_resident_memory_bytes{front_end_labels}"]
        > process_samples[f"process_resident_memory_bytes{engine_labels}"]
        > 0
    )
    assert process_samples[f"process_cpu_seconds_total{front_end_labels}"] > 0
    assert (
        process_samples[f"process_start_time_seconds{front_end_labels}"]
        <= process_samples[f"process_start_time_seconds{engine_labels}"]
    )
    assert (
        process_samples[f"process_open_fds{front_end_labels}"]
        > process_samples[f"process_open_fds{engine_labels}"]
        > 0
    )


def test_dropped_lines_of_the_log_are_those_of_all_processes(tmp_path: Path) -> None:
    block = Block.create(tmp_path / "server", 0, 1)
    model = Block.create(tmp_path / "model", 1, 1, num_formatters=1)
    records = (block.supervisor, model.engines[0], block.frontends[0], model.formatters[0])
    for number, record in enumerate(records):
        record.num_log_lines_dropped = 10**number

    block.supervisor.num_log_lines_dropped_by_master = 10**4
    assert scrape(block, model)["lmi_log_lines_dropped_total"] == 11111


def test_each_status_that_a_route_has_is_counted_under_its_number() -> None:
    operations = [
        operation
        for methods in document(CONFIG)["paths"].values()
        for operation in methods.values()
    ]
    assert {status for operation in operations for status in operation["responses"]} <= set(
        STATUS_CODES
    )


def test_no_client_can_add_a_series(tmp_path: Path) -> None:
    with host(tmp_path) as running:

        def series() -> set[str]:
            lines = running.send("GET", "/metrics")[1].decode().splitlines()
            return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}

        before = series()
        for number in range(20):
            name = f"made-up-{number}"
            running.send("GET", f"/{name}")
            running.send("DELETE", f"/models/{name}/adapters/{name}")
            running.post(
                {"inputs": "say a", "adapters": name},
                headers={"x-amzn-sagemaker-target-model": name},
            )
            running.post({"prompt": "say a", "model": name}, "/v1/completions")
            running.post({"text_input": "say a"}, f"/v2/models/{name}/generate")

        assert series() == before
