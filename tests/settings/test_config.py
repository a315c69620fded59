import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi.errors import BadConfiguration, ModelUnusable
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig, dump, load
from lmi.settings.engine_choice import choose_handler
from lmi.settings.handler import Handler, announced
from lmi.settings.machine import Machine, num_engines
from lmi.settings.model_folder import demo_folder, find_folder, model_name
from lmi.settings.options import OPTIONS
from lmi.settings.properties import parse
from lmi.settings.reference import OF_SOME_ENGINES
from lmi.settings.report import Resolved
from lmi.settings.resolve import resolve, resolve_folder

CPU = Machine(num_cores=4)
FOUR_GPUS = Machine(num_cores=32, gpus=("0", "1", "2", "3"))


def settle(
    folder: Path,
    text: str = "",
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    machine: Machine = CPU,
) -> Resolved:
    return resolve(parse(text), environ or {}, flags or {}, folder=folder, cwd=folder.parent, machine=machine)


def faults(folder: Path, text: str = "", **given: object) -> list[str]:
    with pytest.raises(BadConfiguration) as caught:
        settle(folder, text, **given)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2
    return str(caught.value).split("\n")


def source_of(resolved: Resolved, option: str) -> str:
    return next(setting.source for setting in resolved.settings if setting.option == option)


def test_nothing_given_means_the_documented_defaults(folder: Path) -> None:
    config = settle(folder).config
    assert config.server == ServerConfig(frontend_workers=2)
    assert config.model == ModelConfig(path=str(folder), name="tiny")
    assert config.engine == EngineConfig(handler="lmi-dist", max_num_sequences=64, max_prefill_tokens=256)
    assert (config.server.host, config.server.port) == ("0.0.0.0", 8080)
    assert (config.server.job_queue_size, config.server.max_request_size) == (1000, 64 * 1024 * 1024)
    assert (config.server.drain_timeout_s, config.server.predict_timeout_s) == (25, None)
    assert (config.engine.step_timeout_s, config.engine.first_step_timeout_s) == (60, 300)
    assert (config.engine.retry_threshold, config.engine.retry_window_s) == (3, 600)


def test_one_body_of_the_allowed_size_always_has_room(folder: Path) -> None:
    assert settle(folder).config.server.max_body_memory == 256 << 20
    resolved = settle(folder, "max_request_size=1g")
    assert (resolved.config.server.max_body_memory, resolved.warnings) == (1 << 30, ())
    assert source_of(resolved, "max_body_memory") == "max_request_size"
    resolved = settle(folder, "max_body_memory=1m")
    assert resolved.config.server.max_body_memory == 64 << 20
    assert resolved.warnings == (
        "max_body_memory=1m (serving.properties:1): less than max_request_size, so 67108864 bytes count",
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
        left = rungs[start:]
        resolved = settle(
            folder,
            "\n".join(f"{name}={value}" for kind, name, value in left if kind == "file"),
            {name: value for kind, name, value in left if kind == "env"},
            {name: value for kind, name, value in left if kind == "flag"},
        )
        setting = next(setting for setting in resolved.settings if setting.option == option)
        assert len(setting.shadowed) == len(left) - 1
        assert len([note for note in resolved.notes if note.startswith(f"{option}: ")]) == len(left) - 1
        assert rungs[start][1] in setting.source or rungs[start][0] != "env"
        winners.append(setting.value)
    numbers = [float(winner) for winner in winners]
    assert numbers == sorted(numbers) and len(set(numbers)) == len(rungs)


def test_every_row_can_be_given_by_flag_file_and_environment(folder: Path) -> None:
    samples = {
        "host": "127.0.0.1",
        "inference_address": "http://127.0.0.1:1",
        "safe_port_range": "1-2",
        "log_level": "debug",
        "log_format": "json",
        "max_body_memory": "1g",  # less than max_request_size is warned of
        "option.model_id": str(folder),
        "option.rolling_batch": "lmi-dist",
        "option.dtype": "bf16",
        "option.quantize": "int8",
        "option.device": "cpu",
        "option.output_formatter": "sse",
        "load_on_devices": "*",
        "engine": "MPI",
        "option.entryPoint": "djl_python.huggingface",
        "option.handler": "other",
        "option.input_formatter": "read",
        "option.tool_call_parser": "hermes",
        "option.env": "A=1",
        "option.task": "text-generation",
        "option.reasoning_parser": "think",
    }
    (folder / "model.py").write_text("@input_formatter\ndef read(inputs): ...\ndef other(inputs): ...")
    for option in OPTIONS:
        text = samples.get(option.key, "1")
        prefix = "OPTION_" if option.key.startswith("option.") else "SERVING_"
        name = prefix + option.flag.removeprefix("--").replace("-", "_").upper()
        given = [
            settle(folder, "", {}, {option.key: text}),
            settle(folder, f"{option.key}={text}"),
            settle(folder, "", {name: text}),
        ]
        assert given[0].config == given[1].config == given[2].config, option.key
        assert {bool(resolved.warnings) for resolved in given} == {option.key in OF_SOME_ENGINES}, option.key
        assert source_of(given[2], option.key).startswith(name), option.key
        if option.field and option.key not in ("option.model_id", "option.rolling_batch"):
            part, _, name = option.field.partition(".")
            assert getattr(getattr(given[0].config, part), name) == option.kind.parse(text)


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
        ("SAGEMAKER_MAX_PAYLOAD_IN_MB", "0", "server.max_request_size", 64 << 20),
        ("SERVING_MIN_WORKERS", "3", "engine.num_engines", 3),
        ("PROCESS_MAX_START_RETRIES", "5", "engine.retry_threshold", 5),
        ("PREDICT_TIMEOUT", "240", "server.predict_timeout_s", 240.0),
        ("MODEL_LOADING_TIMEOUT", "1800", "engine.model_loading_timeout_s", 1800.0),
        ("MAX_TOTAL_TOKENS", "4096", "engine.max_sequence_length", 4096),
        ("TENSOR_PARALLEL_SIZE", "1", "engine.tensor_parallel_degree", 1),
        ("SERVING_RETRY_THRESHOLD", "0", "engine.retry_threshold", 0),
        ("SERVING_JOB_QUEUE_SIZE", "", "server.job_queue_size", 1000),
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
    assert "option.quantize: int8 (OPTION_QUANTIZE) counts, not awq (HF_MODEL_QUANTIZE)" in resolved.notes


ONE_DEVICE = "1 on lmi-dist, which runs on one device; more with option.rolling_batch=vllm, once installed"
ENGINE = "Python or MPI; what runs the model is option.rolling_batch (auto, vllm, lmi-dist)"
LENGTH = "a whole number of at least 1, as in 4096, 32k (32000) or 32K (32768), or auto"
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
    "drain_timeout=-1": "seconds, more than 0",
    "drain_timeout=nan": "seconds, more than 0",
    "drain_timeout=inf": "seconds, more than 0",
    "log_level=loud": "DEBUG, INFO, WARNING, ERROR",
    "option.dtype=fp8": "auto, fp32, bf16, fp16",
    "option.tgi_compat=maybe": "true or false",
    "option.output_formatter=xml": "json, jsonlines, sse or a function of the model's own model.py",
    "option.output_formatter=a-b": "json, jsonlines, sse, or a function in the model's own model.py",
    "option.input_formatter=read": "a function of the model's own model.py",
    "option.tensor_parallel_degree=all": "a whole number of at least 1, or max",
    "option.tensor_parallel_degree=2": ONE_DEVICE,
    "option.pipeline_parallel_degree=2": ONE_DEVICE,
    "option.model_name=a/b": "1 to 128 letters, digits or ._:@-, a letter or digit first",
    "option.model_alias=a,b c": "names with ; between, each 1 to 128 letters, digits or ._:@-, a letter or digit first",
    "option.quantize=awq": "int8 on lmi-dist, more with option.rolling_batch=vllm",
    "option.device=cuda": "auto or cpu, since no GPU is visible",
    "option.entryPoint=model.py": "a Python file in the model's folder, or djl_python.…",
    "option.entryPoint=my.module": "a Python file in the model's folder, or djl_python.…",
    "engine=PyTorch": ENGINE,
    "engine=DeepSpeed": ENGINE,
    "engine=FasterTransformer": ENGINE,
    "option.entryPoint=djl_python.stable-diffusion": "an entry point that generates text, images are not made here",
    "option.max_model_len=0": LENGTH,
    "option.max_model_len=1.5K": LENGTH,
    "option.max_model_len=32g": LENGTH,
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
        environ={"SAGEMAKER_BIND_TO_PORT": "x", "OPTION_MAX_MODEL_LEN": "y", "SAGEMAKER_SAFE_PORT_RANGE": "9-1"},
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


@pytest.mark.parametrize(
    ("one", "other", "field"),
    [
        ("max_rolling_batch_size", "max_num_seqs", "max_num_sequences"),
        ("max_rolling_batch_prefill_tokens", "max_num_batched_tokens", "max_prefill_tokens"),
        ("tensor_parallel_degree", "tensor_parallel_size", "tensor_parallel_degree"),
        ("pipeline_parallel_degree", "pipeline_parallel_size", "pipeline_parallel_degree"),
    ],
)
def test_two_names_of_one_option_must_agree_in_one_source(folder: Path, one: str, other: str, field: str) -> None:
    (fault,) = faults(folder, f"option.{other}=2\noption.{one}=1\n")
    assert f"option.{other}=2 (serving.properties:1), option.{one}=1 (serving.properties:2)" in fault
    (fault,) = faults(folder, environ={f"OPTION_{one.upper()}": "1", f"OPTION_{other.upper()}": "2"})
    assert f"OPTION_{one.upper()}" in fault and f"OPTION_{other.upper()}" in fault
    agreeing = settle(folder, f"option.{other}=1\noption.{one}=1\n")
    assert getattr(agreeing.config.engine, field) == 1


def test_a_bad_value_that_is_shadowed_stops_nothing(folder: Path) -> None:
    assert settle(folder, "option.dtype=fp32", {"OPTION_DTYPE": "wrong"}).config.engine.dtype == "fp32"


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("option.rolling_back", "option.rolling_batch"),
        ("option.max_rolling_batchsize", "option.max_rolling_batch_size"),
        ("job_queue_sise", "job_queue_size"),
        ("dtype", "option.dtype"),
        ("option.job_queue_size", "job_queue_size"),
        ("option.Dtype", "option.dtype"),
        ("min_workers", "minWorkers"),
        ("option.tensor_parralel_degree", "option.tensor_parallel_degree"),
    ],
)
def test_an_unknown_key_is_told_with_the_closest_known_one(folder: Path, key: str, nearest: str) -> None:
    (warning,) = settle(folder, f"{key}=1").warnings
    assert warning == f"{key} (serving.properties:1): unknown option; the closest known key is {nearest}"


@pytest.mark.parametrize(
    ("key", "name", "form"),
    [
        ("tool_call_parser", "hermes", "hermes"),
        ("tool_call_parser", "qwen", "hermes"),
        ("tool_call_parser", "qwen3_json", "hermes"),
        ("tool_call_parser", "llama3_json", "json"),
        ("tool_call_parser", "Llama4_JSON", "json"),
        ("tool_call_parser", "text", "text"),
        ("reasoning_parser", "deepseek_r1", "think"),
        ("reasoning_parser", "qwen3", "think"),
    ],
)
@pytest.mark.parametrize("engine", ["lmi-dist", "vllm"])
@pytest.mark.usefixtures("vllm")
def test_vllms_names_of_a_form_that_we_read_mean_it(folder: Path, key: str, name: str, form: str, engine: str) -> None:
    resolved = settle(folder, f"option.rolling_batch={engine}\noption.{key}={name}\noption.strict=true")
    assert getattr(resolved.config.model, key) == form
    assert (resolved.warnings, resolved.config.engine.options) == ((), {})


@pytest.mark.parametrize(
    ("key", "name", "instead", "known"),
    [
        ("tool_call_parser", "mistral", "text", "hermes, json"),
        ("tool_call_parser", "kimi_k2", "text", "hermes, json"),
        ("tool_call_parser", "qwen3_coder", "text", "hermes, json"),
        ("tool_call_parser", "granite-20b-fc", "text", "hermes, json"),
        ("reasoning_parser", "openai_gptoss", None, "think"),
    ],
)
def test_a_form_that_we_do_not_read_stays_text_with_a_warning(
    folder: Path, key: str, name: str, instead: str | None, known: str
) -> None:
    resolved = settle(folder, f"option.{key}={name}\noption.strict=true")
    assert getattr(resolved.config.model, key) == instead
    (warning,) = resolved.warnings
    assert warning == (f"option.{key}={name} (serving.properties:1): this form stays plain text, read here are {known}")


@pytest.mark.parametrize(
    "key", ["worker", "option.enable_logging", "option.max_new_token_count", "option.lora", "rank"]
)
@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("engine", ["lmi-dist", "vllm"])
def test_a_key_that_is_not_nearly_a_known_one_gets_no_hint(folder: Path, key: str, engine: str) -> None:
    (warning,) = settle(folder, f"option.rolling_batch={engine}\n{key}=1").warnings
    assert warning == f"{key} (serving.properties:2): unknown option"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("option.api_key", "this server has no keys yet"),
        ("option.max_new_tokens", "a request says it, as max_new_tokens among its parameters"),
    ],
)
def test_a_key_that_means_something_elsewhere_is_told_so(folder: Path, key: str, said: str) -> None:
    assert settle(folder, f"{key}=1").warnings == (f"{key} (serving.properties:1): {said}",)
    (fault,) = faults(folder, f"{key}=1\noption.strict=true")
    assert fault == f"{key} (serving.properties:1): unknown option, and option.strict is true; {said}"


def test_a_model_that_is_named_and_not_served_is_told(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (warning,) = settle(folder, "", {"HF_MODEL_ID": str(other)}).warnings
    assert warning == f"option.model_id (HF_MODEL_ID): it is served and the model in {folder} is not"
    shown = settle(folder, f"option.model_id={other}", {"HF_MODEL_ID": "elsewhere"}).warnings
    assert shown[-1] == "option.model_id=elsewhere (HF_MODEL_ID): has no effect beside serving.properties:1"


def test_an_unknown_option_is_handed_on_and_stops_the_start_only_when_strict(folder: Path) -> None:
    resolved = settle(folder, "option.zzqq=1\nzzqq=2\n")
    assert resolved.config.engine.options == {"zzqq": "1"}
    assert [warning.split(" ")[0] for warning in resolved.warnings] == ["option.zzqq", "zzqq"]
    (fault,) = faults(folder, "option.zzqq=1\nzzqq=2\noption.strict=true\n")
    assert fault == "option.zzqq (serving.properties:1): unknown option, and option.strict is true"


def test_an_option_of_another_engine_is_no_error_even_when_strict(folder: Path) -> None:
    resolved = settle(folder, "option.gpu_memory_utilization=0.9\noption.strict=true\n")
    assert resolved.warnings == ("option.gpu_memory_utilization (serving.properties:1): lmi-dist does not use it",)


def test_an_option_of_the_table_that_the_engine_does_not_use_is_told(folder: Path) -> None:
    assert settle(folder, "option.trust_remote_code=false\n").warnings == ()
    resolved = settle(folder, "option.chat_template={{ x }}\n", {"HF_MODEL_TRUST_REMOTE_CODE": "true"})
    assert resolved.warnings == (
        "option.trust_remote_code (HF_MODEL_TRUST_REMOTE_CODE): has an effect on vllm alone, "
        "code that comes with a model is never run",
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("option.strict", "false"),
        ("load_on_devices", "*"),
        ("predict_timeout", "none"),
        ("option.env", ""),
        ("option.max_rolling_batch_size", "64"),
        ("option.max_rolling_batch_prefill_tokens", "256"),
    ],
)
def test_a_default_is_shown_as_one_would_write_it(folder: Path, option: str, value: str) -> None:
    """And writing it changes nothing."""
    unsaid, said = settle(folder), settle(folder, f"{option}={value}\n")
    for resolved in (unsaid, said):
        assert next(setting.value for setting in resolved.settings if setting.option == option) == value
    assert unsaid.config == said.config


def test_what_the_reference_needs_and_we_do_not_is_only_noted(folder: Path) -> None:
    keys = "enable_auto_tool_choice enable_reasoning paged_attention n_positions device_map batch_size".split()
    text = "\n".join(f"option.{key}=1" for key in keys)
    resolved = settle(folder, f"{text}\noption.strict=true", {"SERVING_FAIL_FAST": "true"})
    assert resolved.warnings == () and resolved.config.engine.options == {}
    noted = [note for note in resolved.notes if "has no effect here" in note]
    assert len(noted) == len(keys) + 1
    assert "fail_fast (SERVING_FAIL_FAST): has no effect here: a start that fails always ends the server" in noted
    resolved = settle(folder, "option.mpi_mode=true\nmax_idle_time=4\nengine=MPI\n", {"SERVING_FEATURES": "vllm"})
    assert resolved.warnings == () and resolved.config.engine.options == {}
    assert {note for note in resolved.notes if note.endswith("has no effect here")} == {
        "max_idle_time (serving.properties:2): has no effect here",
        "features (SERVING_FEATURES): has no effect here",
        "option.mpi_mode (serving.properties:1): has no effect here",
    }


def test_secrets_are_never_shown(folder: Path) -> None:
    secret = "hf_abcdefgh"
    resolved = settle(
        folder,
        f"option.hf_token={secret}\noption.aws_secret_access_key={secret}\noption.env=A={secret}\n",
        {"OPTION_HF_TOKEN": secret + "2", "HF_TOKEN": secret},
    )
    told = repr((resolved.settings, resolved.warnings, resolved.notes))
    assert secret not in told and "***" in told
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
    assert fault == "option.env=*** (serving.properties:1): allowed is NAME=VALUE, several with , between"


@pytest.mark.parametrize("task", ["feature-extraction", "text-classification", "summarization"])
def test_another_task_than_generation_is_told_with_what_is_served(folder: Path, task: str) -> None:
    for resolved in (settle(folder, f"option.task={task}"), settle(folder, "", {"HF_TASK": task})):
        (warning,) = resolved.warnings
        assert warning.startswith(f"option.task={task} (")
        assert warning.endswith("): only text generation is served, so lmi-dist generates text")
    (folder / "model.py").write_text("def handle(inputs): ...")
    assert settle(folder, f"option.task={task}").warnings == ()


@pytest.mark.parametrize("task", ["text-generation", "auto", "Text-Generation"])
def test_the_task_of_generation_needs_no_word(folder: Path, task: str) -> None:
    resolved = settle(folder, f"option.task={task}")
    assert (resolved.warnings, resolved.config.engine.options) == ((), {})


@pytest.mark.parametrize("name", ["MAX_INPUT_LENGTH", "MAX_INPUT_TOKENS"])
def test_the_bound_of_a_prompt_that_tgi_has_is_told_with_the_one_that_counts(folder: Path, name: str) -> None:
    resolved = settle(folder, "", {name: "1024"})
    assert resolved.warnings == ()
    assert (
        f"max_input_length ({name}): has no effect here: a prompt may fill all but one token of the context, "
        "which option.max_model_len sets" in resolved.notes
    )


@pytest.mark.parametrize(
    ("text", "machine", "wanted"),
    [
        ("", CPU, (1, 1, ())),
        ("maxWorkers=3", CPU, (1, 1, ())),
        ("minWorkers=2", CPU, (2, 1, ())),
        ("", FOUR_GPUS, (4, 1, ("0", "1", "2", "3"))),
        ("maxWorkers=2", FOUR_GPUS, (2, 1, ("0", "1"))),
        ("load_on_devices=3;1", FOUR_GPUS, (2, 1, ("3", "1"))),
        ("load_on_devices=*", FOUR_GPUS, (4, 1, ("0", "1", "2", "3"))),
        ("option.device=cpu", FOUR_GPUS, (1, 1, ())),
        ("gpu.maxWorkers=1\ncpu.minWorkers=2", FOUR_GPUS, (1, 1, ("0",))),
        ("gpu.maxWorkers=1\ncpu.minWorkers=2", CPU, (2, 1, ())),
        ("option.rolling_batch=lmi-dist\noption.tensor_parallel_degree=max", FOUR_GPUS, (4, 1, ("0", "1", "2", "3"))),
    ],
)
@pytest.mark.usefixtures("no_vllm")
def test_replicas_are_as_many_as_fit_between_the_two_bounds(
    folder: Path, text: str, machine: Machine, wanted: object
) -> None:
    engine = settle(folder, text, machine=machine).config.engine
    assert (engine.num_engines, engine.tensor_parallel_degree, engine.device_ids) == wanted


@pytest.mark.usefixtures("vllm")
def test_vllms_own_arguments_are_known_without_importing_it(folder: Path) -> None:
    text = "option.rolling_batch=vllm\noption.seed=7\noption.speculative_length=3\noption.strict=true\n"
    resolved = settle(folder, text, {"HF_MODEL_TRUST_REMOTE_CODE": "true"})
    assert resolved.warnings == ()
    assert resolved.config.engine.options == {"seed": "7", "speculative_length": "3"}
    assert resolved.config.engine.option_sources["seed"] == "serving.properties:2"
    assert resolved.config.engine.trust_remote_code and resolved.config.engine.strict
    assert resolved.config.engine.max_num_sequences is None and resolved.config.engine.max_prefill_tokens is None


@pytest.mark.usefixtures("vllm")
def test_what_vllm_does_not_have_is_told_with_its_closest_argument_and_stays_behind(folder: Path) -> None:
    resolved = settle(folder, "option.rolling_batch=vllm\noption.enable_lorra=true\noption.swap_space=4\n")
    assert resolved.warnings == (
        "option.enable_lorra (serving.properties:2): unknown option; the closest known key is option.enable_lora",
        "option.swap_space (serving.properties:3): vllm does not use it",
    )
    assert resolved.config.engine.options == {}
    (fault,) = faults(folder, "option.rolling_batch=vllm\noption.enable_log_request=1\noption.strict=true")
    assert fault == (
        "option.enable_log_request (serving.properties:2): unknown option, and option.strict is true; "
        "the closest known key is option.enable_log_requests"
    )


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("text", "machine", "wanted"),
    [
        ("", CPU, (1, 1)),
        ("option.tensor_parallel_degree=2", CPU, (1, 2)),
        ("option.tensor_parallel_degree=max", CPU, (1, 1)),
        ("option.tensor_parallel_degree=2\nminWorkers=2", CPU, (2, 2)),
        ("option.tensor_parallel_degree=2", FOUR_GPUS, (2, 2)),
        ("option.tensor_parallel_degree=max", FOUR_GPUS, (1, 4)),
        ("option.tensor_parallel_degree=8\noption.nnodes=2", FOUR_GPUS, (1, 8)),
    ],
)
def test_ranks_of_vllm_are_gpus_or_share_the_cores(folder: Path, text: str, machine: Machine, wanted: object) -> None:
    engine = settle(folder, f"option.rolling_batch=vllm\n{text}", machine=machine).config.engine
    assert (engine.num_engines, engine.tensor_parallel_degree) == wanted
    (fault,) = faults(folder, "option.rolling_batch=vllm\noption.pipeline_parallel_degree=2")
    assert fault.endswith("allowed is 1 on vllm where no GPU is used")


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("text", "machine", "wanted"),
    [
        ("option.rolling_batch=lmi-dist\noption.tensor_parallel_degree=4", FOUR_GPUS, ("vllm", 4, 1)),
        ("option.rolling_batch=lmi-dist\noption.tensor_parallel_degree=max", FOUR_GPUS, ("vllm", 4, 1)),
        ("option.rolling_batch=scheduler\noption.pipeline_parallel_degree=2", FOUR_GPUS, ("vllm", 1, 2)),
        ("option.rolling_batch=lmi-dist\noption.tensor_parallel_degree=2", CPU, ("vllm", 2, 1)),
        ("option.rolling_batch=disable\noption.tensor_parallel_degree=2", CPU, ("vllm", 2, 1)),
        ("option.rolling_batch=lmi-dist\noption.tensor_parallel_degree=1", FOUR_GPUS, ("lmi-dist", 1, 1)),
        ("option.rolling_batch=lmi-dist\noption.tensor_parallel_degree=max", CPU, ("lmi-dist", 1, 1)),
    ],
)
def test_the_embedded_engine_gives_a_parallel_degree_over_one_to_vllm(
    folder: Path, text: str, machine: Machine, wanted: object
) -> None:
    resolved = settle(folder, text, machine=machine)
    engine = resolved.config.engine
    assert (engine.handler, engine.tensor_parallel_degree, engine.pipeline_parallel_degree) == wanted
    said = ": lmi-dist runs on one device, so the engine is vllm"
    assert [warning.endswith(said) for warning in resolved.warnings] == [True] * (engine.handler == "vllm")
    assert resolved.config.model.dynamic_batch == ("disable" in text)


def test_adapters_on_the_embedded_engine_are_told_which_engine_has_them(folder: Path) -> None:
    resolved = settle(folder, "option.rolling_batch=lmi-dist\noption.enable_lora=true")
    assert resolved.warnings == (
        "option.enable_lora (serving.properties:2): lmi-dist does not use it, option.rolling_batch=vllm does",
    )


@pytest.mark.parametrize(
    ("num_gpus", "gpus_each", "low", "high", "wanted"),
    [(8, 2, None, None, 4), (8, 2, 2, 3, 3), (7, 2, None, None, 3), (8, 8, None, None, 1), (0, 1, None, None, 1)],
)
def test_replicas_share_the_gpus(num_gpus: int, gpus_each: int, low: int, high: int, wanted: int) -> None:
    assert num_engines(num_gpus, gpus_each, low, high) == wanted


def test_replicas_that_do_not_fit_are_refused_with_numbers(folder: Path) -> None:
    (fault,) = faults(folder, "minWorkers=5", machine=FOUR_GPUS)
    assert fault == "5 replicas of 1 GPUs each do not fit: allowed are 4 GPUs in all (serving.properties:1)"
    (fault,) = faults(folder, "minWorkers=2\nmaxWorkers=1")
    assert "minWorkers=2, maxWorkers=1" in fault
    with pytest.raises(BadConfiguration, match="1 replicas of 2 GPUs"):
        num_engines(1, 2, None, None)


def test_auto_takes_the_embedded_engine_where_vllm_cannot_run() -> None:
    assert choose_handler("auto", CPU, announced()) == ("lmi-dist", "no GPU is visible")
    without = {name: handler for name, handler in announced().items() if name != "vllm"}
    assert choose_handler("auto", FOUR_GPUS, without)[0] == "lmi-dist"
    assert choose_handler("Scheduler", CPU, announced())[0] == "lmi-dist"
    assert choose_handler("other", CPU, announced() | {"other": Handler(load="of:others")}) == ("other", "asked for")


@pytest.mark.usefixtures("vllm")
def test_auto_takes_vllm_where_it_is_installed_beside_a_gpu(folder: Path) -> None:
    assert choose_handler("auto", FOUR_GPUS, announced())[0] == "vllm"
    assert choose_handler("auto", CPU, announced())[0] == "lmi-dist"


def test_an_announced_engine_without_its_library_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    assert choose_handler("auto", FOUR_GPUS, announced())[0] == "lmi-dist"
    (fault,) = faults(folder, "option.rolling_batch=vllm")
    assert "lmi-dist" in fault and fault.endswith("(vllm: the library vllm is not installed)")


def test_without_a_rolling_batch_the_engine_is_the_one_of_auto(folder: Path) -> None:
    resolved = settle(
        folder, "option.rolling_batch=Disable\nbatch_size=4\nmax_batch_delay=50\noption.enable_streaming=true"
    )
    model, engine = resolved.config.model, resolved.config.engine
    assert (model.dynamic_batch, model.enable_streaming) == (True, True)
    assert (engine.handler, engine.max_num_sequences, resolved.warnings) == ("lmi-dist", 4, ())
    assert (
        "max_batch_delay (serving.properties:3): unneeded, a request joins the running batch at once" in resolved.notes
    )
    assert choose_handler("disable", FOUR_GPUS, announced()) == choose_handler("auto", FOUR_GPUS, announced())
    both = settle(folder, "option.rolling_batch=disable\nbatch_size=4\noption.max_rolling_batch_size=7")
    assert both.config.engine.max_num_sequences == 7


ASYNC_SERVICE = "option.entryPoint=djl_python.lmi_vllm.vllm_async_service"


@pytest.mark.parametrize("text", ["option.async_mode=true", ASYNC_SERVICE, f"{ASYNC_SERVICE}\noption.async_mode=true"])
def test_no_rolling_batch_in_asynchronous_mode_is_the_engine_of_auto_in_the_lmi_schema(folder: Path, text: str) -> None:
    resolved = settle(folder, f"option.rolling_batch=disable\n{text}\noption.strict=true")
    assert not resolved.config.model.dynamic_batch
    assert (resolved.config.engine.handler, resolved.config.engine.options) == ("lmi-dist", {})
    assert resolved.warnings == ()
    assert any("option.rolling_batch=disable means auto beside" in note for note in resolved.notes)


@pytest.mark.parametrize("text", ["option.async_mode=false", "option.entryPoint=djl_python.huggingface"])
def test_no_rolling_batch_without_asynchronous_mode_is_a_dynamic_batch(folder: Path, text: str) -> None:
    assert settle(folder, f"option.rolling_batch=disable\n{text}").config.model.dynamic_batch


def test_what_only_a_dynamic_batch_has_is_noted_with_a_rolling_one(folder: Path) -> None:
    resolved = settle(folder, "max_dynamic_batch_size=4\noption.enable_streaming=huggingface")
    assert (resolved.config.model.dynamic_batch, resolved.config.engine.max_num_sequences) == (False, 64)
    alone = "has an effect with option.rolling_batch=disable alone"
    assert len([note for note in resolved.notes if note.endswith(alone)]) == 2


@pytest.mark.parametrize("word", ["trtllm", "nonsense"])
def test_an_engine_that_is_not_there_is_refused_with_those_that_are(folder: Path, word: str) -> None:
    (fault,) = faults(folder, f"option.rolling_batch={word}")
    assert fault.startswith(
        f"option.rolling_batch='{word}' (serving.properties:1): allowed is auto, disable, scheduler, "
    )
    assert "lmi-dist" in fault


@pytest.mark.parametrize("word", ["trtllm", "DeepSpeed", "neuronx"])
def test_an_engine_of_the_reference_that_is_not_here_is_refused_with_the_reason_and_the_way_out(
    folder: Path, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = folder / "site" / "tensorrt_llm"  # installed, and still no reason to say that it is not
    library.mkdir(parents=True)
    (library / "__init__.py").touch()
    monkeypatch.syspath_prepend(library.parent)
    (fault,) = faults(folder, f"option.rolling_batch={word}")
    assert f"; auto chooses lmi-dist or vllm ({word.lower()}: " in fault
    assert "not installed" not in fault


def test_an_entry_point_for_neuron_devices_is_told(folder: Path) -> None:
    for name in ("transformers-neuronx", "transformers_neuronx"):
        (warning,) = settle(folder, f"option.entryPoint=djl_python.{name}").warnings
        assert warning == (
            f"option.entryPoint=djl_python.{name} (serving.properties:1): Neuron devices are not served here, "
            "the model runs on GPUs or a CPU"
        )


@pytest.mark.parametrize(
    ("text", "length"),
    [("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("25.6k", 25_600), ("1m", 10**6), ("1M", 1 << 20)],
)
def test_a_length_has_the_units_of_vllm(folder: Path, text: str, length: int) -> None:
    assert settle(folder, "", {}, {"option.max_model_len": text}).config.engine.max_sequence_length == length


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(("engine", "options"), [("lmi-dist", {}), ("vllm", {"max_model_len": "auto"})])
def test_a_length_of_auto_is_the_engines_own_choice(folder: Path, engine: str, options: object) -> None:
    for word in ("auto", "-1"):
        resolved = settle(folder, f"option.rolling_batch={engine}\noption.max_model_len={word}")
        assert (resolved.config.engine.max_sequence_length, resolved.config.engine.options) == (None, options)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("engine", ["lmi-dist", "vllm"])
def test_request_statistics_are_an_option_of_every_engine(folder: Path, engine: str) -> None:
    text = f"option.rolling_batch={engine}\noption.request_stats_max_iterations=5\noption.strict=true"
    resolved = settle(folder, text)
    assert (resolved.config.engine.options, resolved.warnings) == ({"request_stats_max_iterations": "5"}, ())


def test_a_model_beside_the_file_or_named_by_it_is_found(folder: Path) -> None:
    outer = folder.parent
    assert settle(outer, "option.model_id=tiny").config.model.path == str(folder)
    for text in (str(folder), f"file:{folder}", f"file://{folder}"):
        model = settle(outer, f"option.model_id={text}").config.model
        assert (model.path, model.name) == (str(folder), "tiny")
    named = settle(folder, "option.model_name=My-Model").config.model
    assert (named.path, named.name) == (str(folder), "My-Model")


def test_a_model_may_have_further_names(folder: Path) -> None:
    assert settle(folder).config.model.aliases == ()
    for text in ("ensemble; vllm_model", "ensemble,vllm_model"):
        resolved = settle(folder, f"option.model_alias={text}")
        assert resolved.config.model.aliases == ("ensemble", "vllm_model")
        assert load(dump(resolved.config)) == resolved.config
        assert (
            next(row.value for row in resolved.settings if row.option == "option.model_alias") == "ensemble;vllm_model"
        )


@pytest.mark.parametrize("text", ["org/chat-7b, chat", "org/chat-7b chat", '["org/chat-7b", "chat"]'])
def test_the_first_served_name_is_the_models_and_the_others_answer_too(folder: Path, text: str) -> None:
    model = settle(folder, f"option.rolling_batch=lmi-dist\noption.served_model_name={text}").config.model
    assert (model.name, model.aliases) == ("org/chat-7b", ("chat",))
    named = settle(folder, f"option.model_name=ours\noption.model_alias=more\noption.served_model_name={text}")
    assert (named.config.model.name, named.config.model.aliases) == ("ours", ("more", "org/chat-7b", "chat"))
    assert named.warnings == ()
    assert source_of(named, "option.model_name") == "serving.properties:1"


@pytest.mark.parametrize("url", ["{folder}", "file:{folder}", "file://{folder}"])
def test_load_models_gives_the_folder_and_the_name(folder: Path, url: str) -> None:
    text = f"test::MPI={url.format(folder=folder)}"
    for environ, flags in (({"SERVING_LOAD_MODELS": text}, {}), ({}, {"load_models": text})):
        resolved = resolve_folder(None, environ, flags, folder.parent.parent)
        assert (resolved.config.model.path, resolved.config.model.name) == (str(folder), "test")
        assert resolved.warnings == ()
    resolved = resolve_folder(str(folder), {"SERVING_LOAD_MODELS": text}, {}, folder.parent)
    assert (resolved.config.model.name, resolved.warnings) == ("test", ())


def test_the_name_of_load_models_stays_where_another_option_names_the_model(folder: Path) -> None:
    environ = {"SERVING_LOAD_MODELS": f"test::MPI={folder.parent}/nowhere", "HF_MODEL_ID": str(folder)}
    resolved = resolve_folder(None, environ, {}, folder.parent)
    assert (resolved.config.model.path, resolved.config.model.name) == (str(folder), "test")
    del environ["HF_MODEL_ID"]
    with pytest.raises(ModelUnusable, match="nowhere: does not exist"):
        resolve_folder(None, environ, {}, folder.parent)


def test_the_names_of_both_ways_answer(folder: Path) -> None:
    environ = {"SERVING_LOAD_MODELS": f"test={folder}", "OPTION_SERVED_MODEL_NAME": "llama"}
    model = resolve_folder(None, environ, {}, folder.parent).config.model
    assert (model.name, model.aliases) == ("llama", ("test",))


def test_models_of_load_models_that_are_not_served_are_told(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    both = {"SERVING_LOAD_MODELS": f"a={folder},b={other}"}
    resolved = resolve_folder(None, both, {}, tmp_path)
    assert (resolved.config.model.name, resolved.config.model.path) == ("a", str(folder))
    assert resolved.warnings == (f"load_models (SERVING_LOAD_MODELS): one model is served, so 'b::={other}' is not",)
    elsewhere = resolve_folder(str(other), {"SERVING_LOAD_MODELS": f"a={folder}"}, {}, tmp_path)
    assert elsewhere.config.model.name == "other"
    (warning,) = elsewhere.warnings
    assert warning == f"load_models (SERVING_LOAD_MODELS): the model in {other} is served and this is not"


@pytest.mark.parametrize("text", ["ALL", "NONE"])
def test_all_models_of_the_store_are_the_folder_that_is_served(folder: Path, text: str) -> None:
    assert settle(folder, "", {"SERVING_LOAD_MODELS": text}).config == settle(folder).config


def test_the_engine_of_load_models_is_held_to_the_same_rule(folder: Path) -> None:
    (fault,) = faults(folder, environ={"SERVING_LOAD_MODELS": "test::DeepSpeed=/opt/ml/model"})
    assert fault.startswith("load_models='DeepSpeed' (SERVING_LOAD_MODELS): allowed is ")


@pytest.mark.parametrize("text", ["test=", "a b=", "[a=/m", "-=/m"])
def test_a_malformed_load_models_is_refused(folder: Path, text: str) -> None:
    with pytest.raises(BadConfiguration, match="allowed is NAME=PATH"):
        resolve_folder(str(folder), {"SERVING_LOAD_MODELS": text}, {}, folder.parent)


@pytest.mark.parametrize("model_id", ["someone/some-model", "s3://bucket/prefix/", "missing"])
def test_a_model_that_is_no_folder_is_refused_by_name(folder: Path, model_id: str) -> None:
    for text, environ in ((f"option.model_id={model_id}", {}), ("", {"HF_MODEL_ID": model_id})):
        with pytest.raises(ModelUnusable, match=model_id) as caught:
            settle(folder, text, environ)
        assert "is not built yet" in str(caught.value) and caught.value.exit_code == 4


def test_folders_without_a_model_are_refused_with_what_they_hold(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match="is empty"):
        settle(tmp_path)
    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(ModelUnusable, match=r"holds weights\.bin; a model's folder has a config\.json"):
        settle(tmp_path)
    with pytest.raises(ModelUnusable, match="does not exist"):
        resolve_folder(str(tmp_path / "nowhere"), {}, {}, tmp_path)
    with pytest.raises(ModelUnusable, match="is not a folder"):
        resolve_folder("weights.bin", {}, {}, tmp_path)
    with pytest.raises(ModelUnusable, match="hub is not built yet"):
        resolve_folder("someone/some-model", {}, {}, tmp_path)
    with pytest.raises(ModelUnusable, match="s3://bucket/m: does not exist; downloading a model is not built yet"):
        resolve_folder(None, {"SERVING_LOAD_MODELS": "m::Python=s3://bucket/m"}, {}, tmp_path)


def test_the_folder_is_the_one_asked_for_else_the_platforms_else_the_current_else_none(tmp_path: Path) -> None:
    platform, current = tmp_path / "platform", tmp_path / "current"
    current.mkdir()
    assert find_folder(None, current, platform) is None
    platform.mkdir()
    assert find_folder(None, current, platform) is None
    (current / "serving.properties").write_text("")
    assert find_folder(None, current, platform) == current
    (platform / "config.json").write_text("{}")
    assert find_folder(None, current, platform) == platform
    assert find_folder("../current", current, platform) == current / "../current"


def test_a_folder_that_only_holds_a_folder_stands_for_it(folder: Path) -> None:
    assert find_folder(str(folder.parent), Path.cwd()) == folder


def test_the_demo_is_found_without_importing_an_engine(tmp_path: Path) -> None:
    demo = demo_folder()
    assert demo.parts[-3:] == ("handlers", "lmi_dist", "demo")
    for flags in ({}, {"option.model_id": "demo"}):
        resolved = resolve_folder(None, {}, flags, tmp_path)
        assert resolved.config.model.path == str(demo)
        assert resolved.config.model.name == "demo"


def test_demo_as_the_folder_is_the_demo_where_no_folder_has_that_name(tmp_path: Path) -> None:
    assert resolve_folder("demo", {}, {}, tmp_path).config.model.path == str(demo_folder())
    (tmp_path / "demo").mkdir()
    with pytest.raises(ModelUnusable, match="is empty"):
        resolve_folder("demo", {}, {}, tmp_path)


@pytest.mark.parametrize(
    ("text", "name"),
    [("Llama-3.1_8B", "Llama-3.1_8B"), ("my model (v2)", "my_model__v2_"), ("…", "model"), ("..", "model")],
)
def test_a_folders_name_becomes_a_safe_model_name(text: str, name: str) -> None:
    assert model_name(text) == name


def test_the_machine_has_cores_and_obeys_the_list_of_visible_gpus() -> None:
    assert Machine.here({}).num_cores >= 1
    assert Machine.here({"CUDA_VISIBLE_DEVICES": ""}).gpus == ()


def test_code_that_holds_nothing_to_run_is_told(folder: Path) -> None:
    (folder / "model.py").write_text("x = 1")
    resolved = settle(folder)
    (warning,) = resolved.warnings
    assert warning == f"{folder / 'model.py'}: has neither a function handle nor a formatter, so it is not run"
    assert resolved.config.code is None


def test_a_handler_that_an_entry_point_hides_is_told_as_what_it_is(folder: Path) -> None:
    (folder / "model.py").write_text("def handle(inputs): ...")
    resolved = settle(folder, "option.entryPoint=djl_python.huggingface")
    (warning,) = resolved.warnings
    assert warning == (
        f"{folder / 'model.py'}: has no formatter, and option.entryPoint=djl_python.huggingface answers "
        "in place of its function handle, so it is not run"
    )


@pytest.mark.parametrize(
    ("source", "text", "found"),
    [
        ("def handle(inputs): ...", "", {"handler": "handle"}),
        ("async def handle(inputs): ...", "option.entryPoint=model.py", {"handler": "handle"}),
        ("from service import handle", "", {"handler": "handle"}),
        ("def other(inputs): ...", "option.handler=other", {"handler": "other"}),
        ("handle = other = print", "option.handler=other", {"handler": "other"}),
        ("@output_formatter\ndef f(o): ...", "", {"has_output_formatter": True}),
        ("@djl_python.input_parser.input_formatter\ndef f(o): ...", "", {"has_input_formatter": True}),
        (
            "def f(o): ...",
            "option.output_formatter=f",
            {"output_formatter": "f", "has_output_formatter": True},
        ),
        (
            "@output_formatter\ndef f(o): ...\ndef handle(inputs): ...",
            "option.entryPoint=djl_python.huggingface",
            {"has_output_formatter": True},
        ),
        ("def handle(inputs): ...", ASYNC_SERVICE, {"handler": "handle"}),
        ("def other(inputs): ...", f"{ASYNC_SERVICE}\noption.handler=other", {"handler": "other"}),
        ("async def handle(inputs): ...", f"{ASYNC_SERVICE}\noption.rolling_batch=disable", {"handler": "handle"}),
        ("@output_formatter\ndef f(o): ...", f"{ASYNC_SERVICE}\noption.rolling_batch=disable", {"handler": None}),
    ],
)
def test_what_a_models_code_is_for_is_read_from_its_text(
    folder: Path, source: str, text: str, found: dict[str, object]
) -> None:
    (folder / "model.py").write_text(source)
    config = settle(folder, text).config
    assert config.code is not None and {name: getattr(config.code, name) for name in found} == found
    assert config.is_custom == bool(found.get("handler"))
    assert config.model.output_formatter is None
    assert config.engine.handler == ("python" if config.is_custom else "lmi-dist")
    assert load(dump(config)) == config


def test_a_handler_is_given_every_option_and_needs_no_model_beside_it(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def handle(inputs): ...")
    resolved = settle(tmp_path, "option.model_id=org/name\noption.task=fill\noption.mine=1\noption.hf_token=x")
    assert resolved.warnings == ()
    assert resolved.config.code is not None
    assert resolved.config.code.properties == {
        "model_id": "org/name",
        "task": "fill",
        "mine": "1",
        "tensor_parallel_degree": "1",
        "model_dir": str(tmp_path),
        "device_id": "-1",
    }


def test_code_that_is_not_python_makes_the_model_unusable(folder: Path) -> None:
    (folder / "model.py").write_text("\n\ndef handle(:")
    with pytest.raises(ModelUnusable, match=r"model.py: line 3: SyntaxError"):
        settle(folder)


@pytest.mark.parametrize("text", ["option.x=\\ud800", "option.dtype=\\udfff"])
def test_half_a_character_is_refused(folder: Path, text: str) -> None:
    assert len(faults(folder, text)) == 1


words = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.builds(ServerConfig), st.builds(ModelConfig, path=words), st.builds(EngineConfig))
def test_a_configuration_survives_the_way_to_a_child(
    server: ServerConfig, model: ModelConfig, engine: EngineConfig
) -> None:
    config = Config(server=server, model=model, engine=engine)
    assert load(dump(config)) == config


def test_a_resolved_configuration_survives_the_way_to_a_child(folder: Path) -> None:
    text = "option.x=ü\nload_on_devices=1;2\npredict_timeout=1.5\noption.quantize=int8\n"
    config = settle(folder, text, machine=FOUR_GPUS).config
    assert load(dump(config)) == config
    assert config.engine.device_ids == ("1", "2")


def test_entry_point_and_engine_of_the_reference_are_understood_from_the_environment(folder: Path) -> None:
    environ = {"OPTION_ENTRYPOINT": "djl_python.huggingface", "OPTION_ENGINE": "Python"}
    resolved = settle(folder, "", environ)
    assert (resolved.warnings, resolved.config.engine.options) == ((), {})
    assert source_of(resolved, "option.entryPoint") == "OPTION_ENTRYPOINT"
    assert source_of(resolved, "engine") == "OPTION_ENGINE"
