"""Files, environment and flags become values: precedence, faults, defaults."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from handlers.lmi_dist.about import HANDLER as LMI_DIST
from lmi.errors import BadConfiguration
from lmi.settings.annexes import REASONING_FORMS, TOOL_CALL_FORMS
from lmi.settings.config import EngineConfig, ModelConfig, ServerConfig
from lmi.settings.resolve import resolve_folder
from lmi.settings.table import OPTIONS
from lmi.shared.machine import Machine, is_container
from lmi.supervisor.hints import hint
from tests.settings.settling import faults, settle, source_of


def test_nothing_given_means_the_documented_defaults(folder: Path) -> None:
    config = settle(folder).config
    assert config.server == ServerConfig(frontend_workers=2, download_dir="/tmp/.cache/lmi/models")
    assert config.model == ModelConfig(path=str(folder), name="tiny", sources=(str(folder),))
    assert config.engine == EngineConfig(
        handler="lmi-dist", max_num_sequences=64, max_prefill_tokens=1024
    )
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8080)
    assert (config.server.job_queue_size, config.server.max_request_size) == (
        1000,
        64 * 1024 * 1024,
    )
    assert (config.server.drain_timeout_s, config.server.predict_timeout_s) == (25, None)
    assert (config.engine.step_timeout_s, config.engine.first_step_timeout_s) == (60, 300)
    assert (config.engine.retry_threshold, config.engine.retry_window_s) == (3, 600)


@pytest.mark.parametrize(
    ("text", "is_default"),
    [
        ("", True),
        ("option.max_rolling_batch_size=64\n", False),
        ("option.max_num_seqs=64\n", False),
        ("batch_size=64\n", False),
    ],
)
def test_an_engine_knows_whether_anybody_said_how_many_run_at_once(
    folder: Path, text: str, is_default: bool
) -> None:
    assert settle(folder, text).config.engine.is_batch_default is is_default


def test_a_server_in_a_container_listens_on_every_address_and_another_on_this_machine(
    folder: Path,
) -> None:
    container = Machine(num_cores=4, is_container=True)
    resolved = settle(folder, machine=container)
    assert (
        resolved.config.server.host == "0.0.0.0"
        and source_of(resolved, "host") == "this is a container"
    )
    assert settle(folder, "host=127.0.0.1", machine=container).config.server.host == "127.0.0.1"


@pytest.mark.parametrize(
    "environ",
    [
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        {"SAGEMAKER_BIND_TO_PORT": "8080"},
        {"SM_MODEL_DIR": "/opt"},
    ],
)
def test_a_container_shows_by_its_variables_or_files(
    environ: dict[str, str], tmp_path: Path
) -> None:
    assert is_container(environ, ()) and not is_container({"HOME": "/"}, [tmp_path / "none"])
    assert is_container({}, [tmp_path])


@pytest.mark.parametrize(
    "text", ["https://a.example, http://b:81", '["https://a.example", "http://b:81"]']
)
def test_origins_are_written_with_commas_or_as_vllm_writes_them(folder: Path, text: str) -> None:
    server = settle(folder, f"cors_allowed_origins={text}").config.server
    assert server.cors_allowed_origins == ("https://a.example", "http://b:81")
    assert (
        "cors_allowed_origins='a.example'"
        in faults(folder, flags={"cors_allowed_origins": "a.example"})[0]
    )


def test_hosts_are_names_of_any_case_with_commas(folder: Path) -> None:
    assert settle(folder, "allowed_hosts=LLM.example, b").config.server.allowed_hosts == (
        "llm.example",
        "b",
    )
    assert "allowed_hosts='b:81'" in faults(folder, flags={"allowed_hosts": "b:81"})[0]


@pytest.mark.parametrize(
    ("more", "environ", "wait_s"),
    [
        ("", {}, 90.0),
        ("", {"SAGEMAKER_BIND_TO_PORT": "8080"}, 60.0),
        ("", {"SAGEMAKER_BATCH": "true"}, 90.0),
        ("buffer_streams=true", {"SAGEMAKER_BIND_TO_PORT": "8080"}, 90.0),
    ],
)
def test_no_wait_is_longer_than_the_platform_s(
    folder: Path, more: str, environ: dict[str, str], wait_s: float
) -> None:
    resolved = settle(folder, f"max_queue_wait=90\n{more}", environ)
    assert resolved.config.server.max_queue_wait_s == wait_s
    assert any("SageMaker waits 60 s" in warning for warning in resolved.warnings) == (
        wait_s == 60.0
    )


@pytest.mark.parametrize(
    ("lines", "environ", "is_warned"),
    [
        ("drain_delay=3", {}, False),
        ("drain_delay=3", {"SAGEMAKER_BIND_TO_PORT": "8080"}, True),
        ("drain_delay=3\ndrain_timeout=20", {"SAGEMAKER_BIND_TO_PORT": "8080"}, False),
        ("", {"SAGEMAKER_BIND_TO_PORT": "8080"}, False),
    ],
)
def test_a_drain_that_the_platform_cuts_is_warned_of(
    folder: Path, lines: str, environ: dict[str, str], is_warned: bool
) -> None:
    message = "SageMaker kills a container 30 s after SIGTERM"
    assert (
        any(message in warning for warning in settle(folder, lines, environ).warnings) == is_warned
    )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("port=0", "where port=0 takes a free one"),
        (
            "with_gateway=true",
            "with with_gateway; `lmi gateway` of its own goes on in front of both servers",
        ),
        ("multi_model=true", "with multi_model, since the new server would not have the models"),
    ],
)
def test_only_a_port_and_one_model_are_taken_over(folder: Path, line: str, why: str) -> None:
    [fault] = faults(folder, line, flags={"takeover": "true"})
    assert fault.endswith(f"allowed is false {why}")


@pytest.mark.parametrize(
    ("text", "environ", "keeps_short"),
    [
        ("", {}, True),
        ("job_queue_size=4000", {}, True),
        ("max_queue_wait=60", {}, False),
        ("max_queue_wait=10", {}, False),
        ("", {"SERVING_MAX_QUEUE_WAIT": "60"}, False),
        ("max_queue_wait=90", {"SAGEMAKER_BIND_TO_PORT": "8080"}, False),
        ("multi_model=true", {}, True),
        ("multi_model=true\nmax_queue_wait=60", {}, False),
    ],
)
def test_a_queue_is_kept_short_unless_it_was_said_how_long_all_may_wait(
    folder: Path, text: str, environ: dict[str, str], keeps_short: bool
) -> None:
    assert settle(folder, text, environ).config.server.keeps_queue_short == keeps_short


def test_one_body_of_the_allowed_size_always_has_room(folder: Path) -> None:
    assert settle(folder).config.server.max_body_memory == 256 << 20

    resolved = settle(folder, "max_request_size=1g")
    assert (resolved.config.server.max_body_memory, resolved.warnings) == (1 << 30, ())
    assert source_of(resolved, "max_body_memory") == "max_request_size"

    resolved = settle(folder, "max_body_memory=1m")
    assert resolved.config.server.max_body_memory == 64 << 20
    assert resolved.warnings == (
        (
            "max_body_memory=1m (serving.properties:1): less than max_request_size, so 67108864 bytes "  # noqa: E501
            "count"
        ),
    )


# Each rung beats those below it: command line, platform, file, OPTION_/SERVING_, other names.
LADDERS = {
    "predict_timeout": [
        ("flag", "predict_timeout", "1"),
        ("env", "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS", "2"),
        ("env", "SAGEMAKER_MODEL_SERVER_TIMEOUT", "3"),
        ("file", "option.predict_timeout", "4"),
        ("env", "SERVING_PREDICT_TIMEOUT", "5"),
    ],
    "port": [
        ("flag", "port", "1001"),
        ("env", "SAGEMAKER_BIND_TO_PORT", "1002"),
        ("file", "port", "1003"),
        ("file", "inference_address", "http://127.0.0.1:1004"),
        ("env", "SERVING_PORT", "1005"),
        ("env", "SERVING_INFERENCE_ADDRESS", "http://127.0.0.1:1006"),
    ],
    "option.max_rolling_batch_size": [
        ("flag", "option.max_rolling_batch_size", "1"),
        ("file", "option.max_num_seqs", "2"),
        ("env", "OPTION_MAX_ROLLING_BATCH_SIZE", "3"),
        ("env", "MAX_BATCH_SIZE", "4"),
    ],
    "max_request_size": [
        ("flag", "max_request_size", "1m"),
        ("env", "SAGEMAKER_MAX_REQUEST_SIZE", "2097152"),
        ("env", "SAGEMAKER_MAX_PAYLOAD_IN_MB", "3"),
        ("file", "max_request_size", "4m"),
        ("env", "SERVING_MAX_REQUEST_SIZE", "5m"),
    ],
    "job_queue_size": [
        ("flag", "job_queue_size", "1"),
        ("file", "job_queue_size", "2"),
        ("env", "SERVING_JOB_QUEUE_SIZE", "3"),
        ("env", "MAX_CONCURRENT_REQUESTS", "4"),
    ],
}


@pytest.mark.parametrize("option", LADDERS)
def test_each_source_beats_all_below_it_and_shadows_them(folder: Path, option: str) -> None:
    rungs = LADDERS[option]
    winners = []
    for start in range(len(rungs)):
        rungs_left = rungs[start:]
        resolved = settle(
            folder,
            "\n".join(f"{name}={value}" for kind, name, value in rungs_left if kind == "file"),
            {name: value for kind, name, value in rungs_left if kind == "env"},
            {name: value for kind, name, value in rungs_left if kind == "flag"},
        )
        setting = next(setting for setting in resolved.settings if setting.option == option)

        assert len(setting.shadowed) == len(rungs_left) - 1
        assert (
            len([note for note in resolved.notes if note.startswith(f"{option}: ")])
            == len(rungs_left) - 1
        )
        assert rungs[start][1] in setting.source or rungs[start][0] != "env"

        winners.append(setting.value)

    numbers = [float(winner) for winner in winners]
    assert numbers == sorted(numbers) and len(set(numbers)) == len(rungs)


def test_every_row_can_be_given_by_flag_file_and_environment(folder: Path) -> None:
    samples = {
        "host": "127.0.0.1",
        "inference_address": "http://127.0.0.1:1",
        "safe_port_range": "1-2",
        "model_store": "/models",
        "download_dir": "/cache",
        "secure_mode": "false",
        "log_level": "debug",
        "log_format": "json",
        # A value under max_request_size gives a warning
        "max_body_memory": "1g",
        "option.model_id": str(folder),
        "option.rolling_batch": "lmi-dist",
        "option.dtype": "bf16",
        "option.quantize": "int8",
        "option.device": "cpu",
        "option.output_formatter": "sse",
        "load_on_devices": "*",
        "adapter_roots": "/a;/b",
        "engine": "MPI",
        "option.entryPoint": "djl_python.huggingface",
        "option.handler": "other",
        "option.input_formatter": "read",
        "option.tool_call_parser": "hermes",
        "option.env": "A=1",
        "option.kv_events_config": '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}',
        "option.task": "text-generation",
        "option.reasoning_parser": "think",
        "option.generation_config": "lmi",
        "option.override_generation_config": '{"top_k": 5}',
        "batch_strategy": "SINGLE_RECORD",
        "option.sessions_path": "/mnt/sessions",
        "option.api_key_file": "/mnt/keys",
        "async_queue": "/var/lib/queue",
        "ssl_certfile": "/mnt/tls.crt",
        "ssl_keyfile": "/mnt/tls.key",
        "option.user": "1000:1000",
        "allow_model_options": "option.env;option.trust_remote_code",
        "cors_allowed_origins": "https://a.example",
        "option.otlp_traces_endpoint": "http://localhost:4318/v1/traces",
        "option.speculative": "ngram",
        "option.prefix_cache_scope": "request",
        "option.prefix_cache_dir": "/var/lib/prompts",
        "option.additional_outputs": "logits;hidden_states.3:context",
        "option.logits_post_processors": "processors.py",
    }
    (folder / "model.py").write_text(
        "@input_formatter\ndef read(inputs): ...\ndef other(inputs): ..."
    )
    for option in OPTIONS:
        text = samples.get(option.key, "1")
        prefix = "OPTION_" if option.key.startswith("option.") else "SERVING_"
        name = prefix + option.flag.removeprefix("--").replace("-", "_").upper()
        resolutions = [
            settle(folder, "", {}, {option.key: text}),
            settle(folder, f"{option.key}={text}"),
            settle(folder, "", {name: text}),
        ]
        assert resolutions[0].config == resolutions[1].config == resolutions[2].config, option.key

        is_told = bool(option.otherwise) and option.key not in LMI_DIST.uses
        assert {bool(resolved.warnings) for resolved in resolutions} == {is_told}, option.key
        assert source_of(resolutions[2], option.key).startswith(name), option.key

        if option.field and option.key not in ("option.model_id", "option.rolling_batch"):
            part, _, name = option.field.partition(".")
            assert getattr(getattr(resolutions[0].config, part), name) == option.kind.parse(text)


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("OPTION_DTYPE", "BFloat16", "engine.dtype", "bf16"),
        ("OPTION_MAX_NUM_SEQS", "7", "engine.max_num_sequences", 7),
        ("OPTION_max_model_len", "99", "engine.max_sequence_length", 99),
        ("OPTION_LOAD_IN_8BIT", "x", "engine.options", {"load_in_8bit": "x"}),
        ("OPTION_loadIn8Bit", "x", "engine.options", {"loadIn8Bit": "x"}),
        ("HF_MODEL_QUANTIZE", "int8", "engine.quantize", "int8"),
        ("HF_MODEL_TRUST_REMOTE_CODE", "true", "engine.trust_remote_code", True),
        ("MAX_BATCH_PREFILL_TOKENS", "128", "engine.max_prefill_tokens", 128),
        ("MAX_BATCH_SIZE", "4", "engine.max_num_sequences", 4),
        ("MAX_CONCURRENT_REQUESTS", "5", "server.job_queue_size", 5),
        ("ENABLE_CUDA_GRAPHS", "true", "engine.options", {"enforce_eager": "false"}),
        ("ENABLE_CUDA_GRAPHS", "false", "engine.options", {"enforce_eager": "true"}),
        ("CUDA_MEMORY_FRACTION", "0.5", "engine.options", {"gpu_memory_utilization": "0.5"}),
        ("HF_REVISION", "main", "engine.options", {"revision": "main"}),
        ("LWS_WORKER_INDEX", "1", "engine.options", {"node_rank": "1"}),
        ("TENSOR_PARALLEL_DEGREE", "max", "engine.tensor_parallel_degree", 1),
        ("SM_NUM_GPUS", "1", "engine.tensor_parallel_degree", 1),
        ("SAGEMAKER_STARTUP_TIMEOUT", "600", "engine.model_loading_timeout_s", 600.0),
        ("SAGEMAKER_NUM_MODEL_WORKERS", "2", "engine.num_engines", 2),
        ("SAGEMAKER_MAX_PAYLOAD_IN_MB", "6", "server.max_request_size", 6 << 20),
        ("SAGEMAKER_MAX_PAYLOAD_IN_MB", "0", "server.max_request_size", 1 << 30),
        ("SERVING_MIN_WORKERS", "3", "engine.num_engines", 3),
        ("PROCESS_MAX_START_RETRIES", "5", "engine.retry_threshold", 5),
        ("PREDICT_TIMEOUT", "240", "server.predict_timeout_s", 240.0),
        ("MODEL_LOADING_TIMEOUT", "1800", "engine.model_loading_timeout_s", 1800.0),
        ("MAX_TOTAL_TOKENS", "4096", "engine.max_sequence_length", 4096),
        ("TENSOR_PARALLEL_SIZE", "1", "engine.tensor_parallel_degree", 1),
        ("SERVING_RETRY_THRESHOLD", "0", "engine.retry_threshold", 0),
        ("SERVING_JOB_QUEUE_SIZE", "", "server.job_queue_size", 1000),
        ("SAGEMAKER_CONTAINER_LOG_LEVEL", "Debug", "server.log_level", "DEBUG"),
        ("SAGEMAKER_CONTAINER_LOG_LEVEL", "20", "server.log_level", "INFO"),
        ("SAGEMAKER_CONTAINER_LOG_LEVEL", "50", "server.log_level", "ERROR"),
        ("SAGEMAKER_MULTI_MODEL", "True", "server.multi_model", True),
        ("SAGEMAKER_MULTI_MODEL", "false", "server.multi_model", False),
        ("SAGEMAKER_BATCH", "True", "server.multi_model", False),
        ("SAGEMAKER_SAFE_PORT_RANGE", "9000-9002", "server.safe_port_range", (9000, 9002)),
        ("SAGEMAKER_SECURITY_CONTROLS", "A,B", "server.security_controls", ("A", "B")),
        ("SAGEMAKER_UNTRUSTED_CHANNELS", "/a, /b", "server.untrusted_channels", ("/a", "/b")),
        ("SERVING_DOWNLOAD_DIR", "/cache", "server.download_dir", "/cache"),
        ("XDG_CACHE_HOME", "/cache", "server.download_dir", "/cache/lmi/models"),
        ("HOME", "/home/me", "server.download_dir", "/home/me/.cache/lmi/models"),
        ("HF_REVISION", "v1", "model.revision", "v1"),
        ("SAGEMAKER_MAX_PAYLOAD_IN_MB", "20", "server.max_payload_mb", 20),
        ("SAGEMAKER_MAX_PAYLOAD_IN_MB", "0", "server.max_payload_mb", 0),
        ("SAGEMAKER_MAX_CONCURRENT_TRANSFORMS", "7", "server.max_concurrent_transforms", 7),
        ("SAGEMAKER_BATCH_STRATEGY", "MULTI_RECORD", "server.batch_strategy", "MULTI_RECORD"),
        ("SAGEMAKER_BATCH_STRATEGY", "SingleRecord", "server.batch_strategy", "SINGLE_RECORD"),
        ("SAGEMAKER_ENABLE_STATEFUL_SESSIONS", "False", "server.enable_sessions", False),
        ("SAGEMAKER_SESSIONS_EXPIRATION", "60", "server.sessions_expiration_s", 60.0),
        ("SAGEMAKER_SESSIONS_PATH", "/mnt/sessions", "server.sessions_path", "/mnt/sessions"),
        ("OPTION_SESSIONS_EXPIRATION", "3600", "server.sessions_expiration_s", 3600.0),
    ],
)
def test_environment_names_of_the_reference_are_translated(
    folder: Path, name: str, text: str, field: str, value: object
) -> None:
    config = settle(folder, "", {name: text}).config
    part, _, attribute = field.partition(".")
    assert getattr(getattr(config, part), attribute) == value


def test_the_lmi_name_beats_the_tgi_name_without_a_conflict(folder: Path) -> None:
    resolved = settle(folder, "", {"OPTION_QUANTIZE": "int8", "HF_MODEL_QUANTIZE": "awq"})
    assert resolved.config.engine.quantize == "int8"
    assert (
        "option.quantize: int8 (OPTION_QUANTIZE) counts, not awq (HF_MODEL_QUANTIZE)"
        in resolved.notes
    )


ONE_DEVICE = (
    "1 on lmi-dist, which runs on one device; more with option.rolling_batch=vllm, once installed"
)


ENGINE = "Python or MPI; what runs the model is option.rolling_batch (auto, vllm, trtllm, lmi-dist)"


LENGTH = "a whole number of at least 1, as in 4096, 32k (32000) or 32K (32768), or auto"


OUTPUTS = (
    "names with ; between, each once and perhaps with :context, as in logits;hidden_states:context"
)


BAD_LINES = {
    "port=http": "a whole number 0..65535",
    "port=65536": "a whole number 0..65535",
    "inference_address=127.0.0.1:80": "http://HOST:PORT",
    "inference_address=http://127.0.0.1:99999": "http://HOST:PORT",
    "job_queue_size=many": "a whole number of at least 1",
    "job_queue_size=0": "a whole number of at least 1",
    "job_queue_size=1e3": "a whole number of at least 1",
    "job_queue_size=٣": "a whole number of at least 1",
    "max_request_size=64x": "bytes, more than 0, as in 67108864, 64k, 64m or 1g",
    "max_request_size=0": "bytes, more than 0, as in 67108864, 64k, 64m or 1g",
    "predict_timeout=soon": "seconds, more than 0, or none",
    "drain_delay=-1": "seconds, 0 or more",
    "drain_delay=nan": "seconds, 0 or more",
    "drain_delay=1e9": "at most 10000000",
    "drain_timeout=-1": "seconds, more than 0",
    "drain_timeout=nan": "seconds, more than 0",
    "drain_timeout=inf": "seconds, more than 0",
    "log_level=loud": "DEBUG, INFO, WARNING, ERROR",
    "option.dtype=fp8": "auto, fp32, bf16, fp16",
    "option.tgi_compat=maybe": "true or false",
    "option.output_formatter=xml": "json, jsonlines, sse or a function of the model's own model.py",
    "option.output_formatter=a-b": "json, jsonlines, sse, or a function in the model's own model.py",  # noqa: E501
    "option.input_formatter=read": "a function of the model's own model.py",
    "option.tensor_parallel_degree=all": "a whole number 1..1024, or max",
    "option.max_kv_cache_tokens=100000000000": "a whole number 1..2147483647",
    "option.max_model_len=9999999k": "at most 2147483647 tokens, or auto",
    "drain_timeout=1e9": "at most 10000000",
    "max_request_size=9999999g": "less than 2**50 bytes",
    "option.tensor_parallel_degree=2": ONE_DEVICE,
    "option.pipeline_parallel_degree=2": ONE_DEVICE,
    "option.model_name=a/b": "1 to 128 letters, digits or ._:@-, a letter or digit first",
    "option.model_alias=a,b c": (
        "names with ; between, each 1 to 128 letters, digits or ._:@-, a letter or digit first"
    ),
    "option.enable_prefix_caching=maybe": "true or false",
    "option.prefix_cache_scope=user": "server, request",
    "option.max_step_ms=0": "milliseconds, more than 0",
    "option.max_step_ms=nan": "milliseconds, more than 0",
    "option.max_step_ms=fast": "milliseconds, more than 0",
    "option.speculative=medusa": "ngram",
    "option.quantize=awq": "int4 or int8 on lmi-dist, more with option.rolling_batch=vllm",
    "option.device=cuda": "auto or cpu, since no GPU is visible",
    "option.entryPoint=model.py": "a Python file in the model's folder, or djl_python.…",
    "option.entryPoint=my.module": "a Python file in the model's folder, or djl_python.…",
    "engine=PyTorch": ENGINE,
    "engine=DeepSpeed": ENGINE,
    "engine=FasterTransformer": ENGINE,
    "option.entryPoint=djl_python.stable-diffusion": (
        "an entry point that generates text, images are not made here"
    ),
    "option.max_model_len=0": LENGTH,
    "option.max_model_len=1.5K": LENGTH,
    "option.max_model_len=32g": LENGTH,
    "option.max_beam_width=0": "a whole number 1..256",
    "option.max_beam_width=65": "at most option.max_rolling_batch_size, 64",
    "option.additional_outputs=logits;logits:context": OUTPUTS,
    "option.additional_outputs=logits:all": OUTPUTS,
    "option.logits_post_processors=processors": "a Python file in the model's folder",
    "option.logits_post_processors=../processors.py": "a Python file in the model's folder",
    "option.request_stats_max_iterations=-1": "a whole number of at least 0",
    "load_on_devices=0": "*, since no GPU is used",
    "load_on_devices=a": "* or GPU numbers with ; between",
    "minWorkers=0": "a whole number 1..1024",
    "retry_threshold=-1": "a whole number 0..1000",
}


@pytest.mark.usefixtures("no_vllm")
@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_value_names_key_value_source_and_what_is_allowed(folder: Path, line: str) -> None:
    key, _, value = line.partition("=")
    (fault,) = faults(folder, f"# comment\n{line}\n")
    assert fault == f"{key}={value!a} (serving.properties:2): allowed is {BAD_LINES[line]}"


def test_all_faults_are_told_at_once_each_with_its_own_source(folder: Path) -> None:
    lines = faults(
        folder,
        "option.dtype=x\n\noption.rolling_batch=nope\n",
        environ={
            "SAGEMAKER_BIND_TO_PORT": "x",
            "OPTION_MAX_MODEL_LEN": "y",
            "SAGEMAKER_SAFE_PORT_RANGE": "9-1",
        },
        flags={"frontend_workers": "z"},
    )
    assert len(lines) == 6

    text = "\n".join(lines)
    for source in (
        "serving.properties:1",
        "serving.properties:3",
        "SAGEMAKER_BIND_TO_PORT",
        "OPTION_MAX_MODEL_LEN",
        "SAGEMAKER_SAFE_PORT_RANGE",
        "--frontend-workers",
    ):
        assert f"({source}): allowed is " in text


@pytest.mark.parametrize(
    "text",
    [
        "option.dtype=a\\n\\u001b[31m\\u2028" + "x" * 1000,
        "option.strict=true\noption.a\\nb\\u2028" + "x" * 1000 + "=1",
    ],
)
def test_a_hostile_key_or_value_stays_one_line_and_short(folder: Path, text: str) -> None:
    (fault,) = faults(folder, text)
    assert fault.isprintable() and len(fault) < 300


@pytest.mark.parametrize("range_", ["8081", "1-70000", "0-5", "a-b", "5-4", "1-2-3", "-1-5"])
def test_a_malformed_safe_port_range_is_refused(folder: Path, range_: str) -> None:
    (fault,) = faults(folder, environ={"SAGEMAKER_SAFE_PORT_RANGE": range_})
    assert fault.endswith("(SAGEMAKER_SAFE_PORT_RANGE): allowed is FIRST-LAST, two ports")


PLATFORM = [(name, option.key) for option in OPTIONS for name in option.platform]


@pytest.mark.parametrize(("name", "key"), PLATFORM)
def test_every_variable_of_sagemaker_beats_the_file_and_loses_to_the_command_line(
    folder: Path, name: str, key: str
) -> None:
    text = {"secure_mode": "false", "safe_port_range": "1-2", "batch_strategy": "MULTI_RECORD"}.get(
        key, "1"
    )
    text = {"log_level": "10", "option.sessions_path": "/1"}.get(key, text)
    by_variable = settle(folder, f"{key}={text}", {name: text})
    assert source_of(by_variable, key).startswith(name)
    assert source_of(settle(folder, f"{key}={text}", {name: text}, {key: text}), key).startswith(
        "--"
    )


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("SAGEMAKER_BIND_TO_PORT", "0", "a whole number 1..65535"),
        ("SAGEMAKER_BIND_TO_PORT", "65536", "a whole number 1..65535"),
        ("SAGEMAKER_MAX_PAYLOAD_IN_MB", "6k", "a whole number of megabytes; 0: 1 GiB"),
        (
            "SAGEMAKER_MAX_REQUEST_SIZE",
            "much",
            "bytes, more than 0, as in 67108864, 64k, 64m or 1g",
        ),
        ("SAGEMAKER_CONTAINER_LOG_LEVEL", "25", "DEBUG, INFO, WARNING, ERROR"),
        ("SAGEMAKER_MULTI_MODEL", "maybe", "true or false"),
        ("SAGEMAKER_BATCH", "2", "true or false"),
        ("SAGEMAKER_SECURE_MODE", "maybe", "true or false"),
        ("SAGEMAKER_STARTUP_TIMEOUT", "-1", "seconds, more than 0"),
        ("SAGEMAKER_NUM_MODEL_WORKERS", "no", "a whole number 1..1024"),
    ],
)
def test_a_bad_variable_of_sagemaker_is_named_with_its_value(
    folder: Path, name: str, text: str, allowed: str
) -> None:
    lines = faults(folder, environ={name: text})
    assert all(f"={text!a} ({name}): allowed is " in line for line in lines)
    assert any(line.endswith(f"allowed is {allowed}") for line in lines)


def test_a_port_that_is_bound_may_be_any_free_one_for_the_command_line_alone(folder: Path) -> None:
    resolved = settle(folder, environ={"SAGEMAKER_BIND_TO_PORT": "0"}, flags={"port": "0"})
    assert resolved.config.server.port == 0


def test_other_variables_of_sagemaker_are_one_line_for_a_log_at_debug(folder: Path) -> None:
    environ = {
        "SAGEMAKER_REGION": "eu-west-1",
        "SAGEMAKER_ACCOUNT": "1",
        "SAGEMAKER_BIND_TO_PORT": "8081",
    }
    resolved = settle(folder, environ=environ)
    assert resolved.details == ("SAGEMAKER_ACCOUNT, SAGEMAKER_REGION: set no option",)
    assert resolved.warnings == settle(folder).details == ()


def test_variables_of_other_images_are_one_warning_with_their_names_and_no_values(
    folder: Path,
) -> None:
    environ = {
        **dict.fromkeys(
            ("SUPERVISOR_CONFIG", "CUSTOM_FASTAPI_OTHER"),
            "hf_secret",
        ),
        **dict.fromkeys(
            ("STANDARD_PIP_ARGS", "SUPERVISOR_PROGRAM_STARTSECS"),
            "hf_secret",
        ),
        **{"PROCESS_MAX_START_RETRIES": "3", "SUPERVISOR_PROCESS_NAME": "lmi", "SM_NUM_GPUS": "1"},
    }
    resolved = settle(folder, environ=environ)

    assert [line for line in resolved.warnings if "images" in line] == [
        "3 variables of AWS's other images not read yet: CUSTOM_FASTAPI_OTHER, SUPERVISOR_CONFIG, "
        "SUPERVISOR_PROGRAM_STARTSECS"
    ]
    assert "hf_secret" not in str(resolved.warnings) and resolved.details == ()

    (warning,) = settle(folder, environ={"SUPERVISOR_CONFIG": "2"}).warnings
    assert warning == "1 variable of AWS's other images not read yet: SUPERVISOR_CONFIG"


@pytest.mark.parametrize(
    ("environ", "threshold"),
    [
        ({}, 3),
        ({"PROCESS_AUTO_RECOVERY": "true"}, 3),
        ({"PROCESS_AUTO_RECOVERY": "true", "PROCESS_MAX_START_RETRIES": "5"}, 5),
        ({"PROCESS_AUTO_RECOVERY": "false", "PROCESS_MAX_START_RETRIES": "5"}, 0),
        ({"PROCESS_AUTO_RECOVERY": "0"}, 0),
    ],
)
def test_without_auto_recovery_the_first_death_ends_the_server(
    folder: Path, environ: dict[str, str], threshold: int
) -> None:
    assert settle(folder, environ=environ).config.engine.retry_threshold == threshold


def test_a_checkpoint_with_code_says_that_its_code_is_not_run(folder: Path) -> None:
    (folder / "config.json").write_text('{"auto_map": {"AutoModel": "modeling.Model"}}')
    note = (
        f"{folder / 'config.json'}: auto_map names Python code of the checkpoint, which is not "
        f"run; "
    )
    assert [line for line in settle(folder).notes if line.startswith(note)]
    assert not any(
        "auto_map" in line for line in settle(folder, "option.trust_remote_code=true").notes
    )


@pytest.mark.parametrize(
    ("one", "other", "field"),
    [
        ("max_rolling_batch_size", "max_num_seqs", "max_num_sequences"),
        ("max_rolling_batch_prefill_tokens", "max_num_batched_tokens", "max_prefill_tokens"),
        ("tensor_parallel_degree", "tensor_parallel_size", "tensor_parallel_degree"),
        ("pipeline_parallel_degree", "pipeline_parallel_size", "pipeline_parallel_degree"),
    ],
)
def test_two_names_of_one_option_must_agree_in_one_source(
    folder: Path, one: str, other: str, field: str
) -> None:
    (fault,) = faults(folder, f"option.{other}=2\noption.{one}=1\n")
    assert (
        f"option.{other}=2 (serving.properties:1), option.{one}=1 (serving.properties:2)" in fault
    )
    (fault,) = faults(
        folder, environ={f"OPTION_{one.upper()}": "1", f"OPTION_{other.upper()}": "2"}
    )
    assert f"OPTION_{one.upper()}" in fault and f"OPTION_{other.upper()}" in fault
    agreeing = settle(folder, f"option.{other}=1\noption.{one}=1\n")
    assert getattr(agreeing.config.engine, field) == 1


def test_a_bad_value_that_is_shadowed_stops_nothing(folder: Path) -> None:
    assert (
        settle(folder, "option.dtype=fp32", {"OPTION_DTYPE": "wrong"}).config.engine.dtype == "fp32"
    )


@pytest.mark.parametrize(
    ("key", "name", "form"),
    [
        ("tool_call_parser", "hermes", "hermes"),
        ("tool_call_parser", "qwen", "hermes"),
        ("tool_call_parser", "qwen3_json", "hermes"),
        ("tool_call_parser", "llama3_json", "json"),
        ("tool_call_parser", "Llama4_JSON", "json"),
        ("tool_call_parser", "qwen3_coder", "qwen3_xml"),
        ("tool_call_parser", "llama4_pythonic", "pythonic"),
        ("tool_call_parser", "granite-20b-fc", "granite-20b-fc"),
        ("tool_call_parser", "text", "text"),
        ("reasoning_parser", "deepseek_r1", "think"),
        ("reasoning_parser", "qwen3", "think"),
        ("reasoning_parser", "openai_gptoss", "openai"),
    ],
)
@pytest.mark.parametrize("engine", ["lmi-dist", "vllm"])
@pytest.mark.usefixtures("vllm")
def test_vllms_names_of_a_form_that_we_read_mean_it(
    folder: Path, key: str, name: str, form: str, engine: str
) -> None:
    resolved = settle(
        folder, f"option.rolling_batch={engine}\noption.{key}={name}\noption.strict=true"
    )
    assert getattr(resolved.config.model, key) == form
    assert (resolved.warnings, resolved.config.engine.options) == ((), {})


@pytest.mark.parametrize(
    ("key", "name", "instead", "known"),
    [
        ("tool_call_parser", "step3p5", "text", ", ".join(TOOL_CALL_FORMS[:-2])),
        ("reasoning_parser", "granite", None, ", ".join(REASONING_FORMS[:-1])),
    ],
)
def test_a_form_that_we_do_not_read_stays_text_with_a_warning(
    folder: Path, key: str, name: str, instead: str | None, known: str
) -> None:
    resolved = settle(folder, f"option.{key}={name}\noption.strict=true")
    assert getattr(resolved.config.model, key) == instead
    (warning,) = resolved.warnings
    assert warning == (
        f"option.{key}={name} (serving.properties:1): this form stays plain text, read here are "
        f"{known}"
    )


def test_a_model_that_is_named_and_not_served_is_told(folder: Path, tmp_path: Path) -> None:
    second_model = tmp_path / "other"
    shutil.copytree(folder, second_model)
    (warning,) = settle(folder, "", {"HF_MODEL_ID": str(second_model)}).warnings

    assert (
        warning == f"option.model_id (HF_MODEL_ID): it is served and the model in {folder} is not"
    )

    warnings = settle(
        folder, f"option.model_id={second_model}", {"HF_MODEL_ID": "elsewhere"}
    ).warnings
    assert (
        warnings[-1]
        == "option.model_id=elsewhere (HF_MODEL_ID): has no effect beside serving.properties:1"
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("option.strict", "false"),
        ("load_on_devices", "*"),
        ("predict_timeout", "none"),
        ("option.env", ""),
        ("option.max_rolling_batch_size", "64"),
        ("option.max_rolling_batch_prefill_tokens", "1024"),
    ],
)
def test_a_default_is_shown_as_one_would_write_it(folder: Path, option: str, value: str) -> None:
    """Writing the shown default as a setting changes nothing."""
    unsaid = settle(folder)
    with_default = settle(folder, f"{option}={value}\n")
    for resolved in (unsaid, with_default):
        assert (
            next(setting.value for setting in resolved.settings if setting.option == option)
            == value
        )

    assert unsaid.config == with_default.config


def test_secrets_are_never_shown(folder: Path) -> None:
    secret = "hf_abcdefgh"
    resolved = settle(
        folder,
        f"option.hf_token={secret}\noption.aws_secret_access_key={secret}\noption.env=A={secret}\n",
        {"OPTION_HF_TOKEN": secret + "2", "HF_TOKEN": secret},
    )
    output = repr((resolved.settings, resolved.warnings, resolved.notes))
    assert secret not in output and "***" in output
    assert resolved.config.engine.options["hf_token"] == secret
    assert resolved.config.engine.environ == {"A": secret}


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        ("A=1", {"A": "1"}),
        ("A=1,B=2", {"A": "1", "B": "2"}),
        ("A=1; B=2", {"A": "1", "B": "2"}),
        ("A=1,2,B=x=y", {"A": "1,2", "B": "x=y"}),
        ("A=,B=2", {"A": "", "B": "2"}),
    ],
)
def test_option_env_is_a_variable_each_for_engines_and_code(
    folder: Path, text: str, environ: Mapping[str, str]
) -> None:
    resolved = settle(folder, f"option.env={text}\noption.strict=true")
    assert resolved.config.engine.environ == environ
    assert (resolved.warnings, resolved.config.engine.options) == ((), {})


def test_a_malformed_option_env_is_refused_without_its_values(folder: Path) -> None:
    (fault,) = faults(folder, "option.env=hf_abcdefgh")
    assert (
        fault
        == "option.env=*** (serving.properties:1): allowed is NAME=VALUE, several with , between"
    )


@pytest.mark.parametrize("task", ["fill-mask", "text-classification", "summarization"])
def test_another_task_than_generation_or_embedding_is_refused_except_for_user_code(
    folder: Path, task: str
) -> None:
    for refusal in (
        faults(folder, f"option.task={task}"),
        faults(folder, "", environ={"HF_TASK": task}),
    ):
        [line] = refusal
        assert (
            line.startswith(f"option.task='{task}' (")
            and "allowed is auto, text-generation, " in line
        )
        assert line.endswith(
            "(engines here generate text or give embeddings, and do nothing else; a model.py can)"
        )

    (folder / "model.py").write_text("def handle(inputs): ...")
    assert settle(folder, f"option.task={task}").warnings == ()


@pytest.mark.parametrize(
    "task",
    [
        "text-generation",
        "auto",
        "Text-Generation",
        "",
        "text_generation",
        "conversational",
        "text_embedding",
    ],
)
def test_the_task_of_generation_or_embedding_needs_no_word(folder: Path, task: str) -> None:
    resolved = settle(folder, f"option.task={task}")
    assert (resolved.warnings, resolved.config.engine.options) == ((), {})


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("task", ["text-embedding", "feature_extraction"])
def test_the_task_of_embeddings_makes_vllm_pool_whatever_the_checkpoint_is(
    folder: Path, task: str
) -> None:
    on_vllm = f"option.rolling_batch=vllm\noption.task={task}"

    assert settle(folder, on_vllm).config.engine.options == {"runner": "pooling"}

    resolved = settle(folder, f"{on_vllm}\noption.runner=generate")
    assert resolved.config.engine.options == {"runner": "generate"}


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("25.6k", 25_600),
        ("1m", 10**6),
        ("1M", 1 << 20),
    ],
)
def test_a_length_has_the_units_of_vllm(folder: Path, text: str, length: int) -> None:
    assert (
        settle(folder, "", {}, {"option.max_model_len": text}).config.engine.max_sequence_length
        == length
    )


@pytest.mark.parametrize("text", ["option.x=\\ud800", "option.dtype=\\udfff"])
def test_half_a_character_is_refused(folder: Path, text: str) -> None:
    assert len(faults(folder, text)) == 1


def test_entry_point_and_engine_of_the_reference_are_understood_from_the_environment(
    folder: Path,
) -> None:
    environ = {"OPTION_ENTRYPOINT": "djl_python.huggingface", "OPTION_ENGINE": "Python"}
    resolved = settle(folder, "", environ)
    assert (resolved.warnings, resolved.config.engine.options) == ((), {})
    assert source_of(resolved, "option.entryPoint") == "OPTION_ENTRYPOINT"
    assert source_of(resolved, "engine") == "OPTION_ENGINE"


@pytest.mark.parametrize("module", ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"])
@pytest.mark.parametrize("more", ["", "\nmulti_model=true"])
def test_traces_without_their_extra_are_refused_before_anything_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, more: str
) -> None:
    text = f"option.otlp_traces_endpoint=http://localhost:4318{more}"
    assert settle(folder, text).config.server.otlp_traces_endpoint
    monkeypatch.setitem(sys.modules, module, None)
    [fault] = faults(folder, text)
    assert fault.startswith("option.otlp_traces_endpoint=http://localhost:4318 (")
    assert fault.endswith(": the library opentelemetry is not installed")
    assert (
        hint("bad_configuration", fault)
        == "scripts/install otel, or pip install '.[otel]', in a clone of lmi"
    )


LONG_NAME = "m" * 300


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (LONG_NAME, {}),
        ("demo", {"option.model_id": LONG_NAME}),
        ("demo", {"option.chat_template": LONG_NAME}),
        ("demo", {"option.generation_config": LONG_NAME}),
        ("demo", {"load_models": LONG_NAME}),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_one_line(
    tmp_path: Path, text: str, options: dict[str, str]
) -> None:
    """As one with a name that is too long, or behind a folder that is closed to this user."""
    with pytest.raises(BadConfiguration, match="mmm… cannot be read: File name too long$"):
        resolve_folder(text, {}, options, tmp_path)
