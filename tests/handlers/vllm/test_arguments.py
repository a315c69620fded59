"""Options on their way into vLLM's argument class: types, faults, lmi's defaults, and the size of
the KV cache.
"""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from handlers.lmi_vllm import about
from lmi.errors import BadConfiguration, SecurityRefused
from lmi.settings.config import EngineConfig
from tests.handlers.vllm.asking import executor_of_vllm
from tests.settings.settling import settle
from tests.tiny_models import CONTEXT_LENGTH, tiny_model

pytestmark = pytest.mark.vllm


# Keys and values, layers, heads, head_dim, 16 bits
TOKEN_BYTES = 2 * 4 * 2 * 64 * 2


def config(options: dict[str, str] | None = None, **ours: Any) -> EngineConfig:
    return EngineConfig(handler="vllm", options=options or {}, **ours)


def faults(arguments: ModuleType, folder: Path, engine: EngineConfig) -> list[str]:
    with pytest.raises(BadConfiguration) as caught:
        arguments.engine_arguments(engine, str(folder))

    return str(caught.value).split("\n")


def test_our_options_reach_the_fields_of_vllm(arguments: ModuleType, folder: Path) -> None:
    engine = config(
        dtype="bf16",
        quantize="awq",
        max_num_sequences=7,
        max_prefill_tokens=99,
        max_sequence_length=512,
        tensor_parallel_degree=2,
        trust_remote_code=True,
        enable_prefix_caching=False,
    )
    expected = {
        "model": str(folder),
        "dtype": "bfloat16",
        "quantization": "awq",
        "max_num_seqs": 7,
        "max_num_batched_tokens": 99,
        "max_model_len": 512,
        "tensor_parallel_size": 2,
        "trust_remote_code": True,
        "enable_prefix_caching": False,
    }
    engine_arguments = arguments.engine_arguments(engine, str(folder))

    assert {name: engine_arguments[name] for name in expected} == expected


def test_what_nobody_said_is_vllms_own_but_for_what_the_front_end_owns(
    arguments: ModuleType, folder: Path
) -> None:
    engine_arguments = arguments.engine_arguments(config(), str(folder))
    assert (
        engine_arguments.keys()
        & {"max_num_seqs", "max_num_batched_tokens", "quantization", "served_model_name"}
        == set()
    )
    assert {name: engine_arguments[name] for name in arguments.DEFAULTS} == arguments.DEFAULTS
    assert (
        engine_arguments["dtype"],
        engine_arguments["trust_remote_code"],
        engine_arguments["generation_config"],
    ) == (
        "auto",
        False,
        "vllm",
    )


def test_the_defaults_of_requests_are_the_front_ends_and_vllm_adds_none(
    arguments: ModuleType, folder: Path
) -> None:
    properties = 'option.rolling_batch=vllm\noption.generation_config=auto\noption.override_generation_config={"top_k": 3}'  # noqa: E501
    resolved = settle(folder, properties)
    engine_arguments = arguments.engine_arguments(resolved.config.engine, str(folder))
    assert (
        engine_arguments["generation_config"],
        engine_arguments.get("override_generation_config"),
    ) == ("vllm", None)
    assert resolved.config.model.generation_defaults.values == {"top_k": 3}


def test_what_nobody_said_differs_from_vllms_own_only_where_it_is_written_down(
    arguments: ModuleType, folder: Path
) -> None:
    defaults = arguments.AsyncEngineArgs(model=str(folder))
    our_arguments = arguments.AsyncEngineArgs(**arguments.engine_arguments(config(), str(folder)))
    differing = {
        name for name in arguments.FIELDS if getattr(our_arguments, name) != getattr(defaults, name)
    }
    # The tests switch compilation off
    eager_here = {"enforce_eager"}
    # vLLM's default takes nine tenths of all memory
    cache_that_fits = {
        "kv_cache_memory_bytes",
        "max_model_len",
    }
    written_down = {
        "disable_log_stats",
        "generation_config",
        "scheduling_policy",
        "use_tqdm_on_load",
    }
    written_down |= {"mm_processor_cache_gb"}

    assert differing - eager_here - cache_that_fits == written_down


def test_the_size_of_the_batch_really_reaches_the_engine(
    arguments: ModuleType, folder: Path
) -> None:
    engine = config(
        {"block_size": "64"}, max_num_sequences=5, max_prefill_tokens=300, max_kv_cache_tokens=1000
    )
    vllm_config = engine_config(arguments, engine, folder)
    assert vllm_config.scheduler_config.max_num_seqs == 5
    assert vllm_config.scheduler_config.max_num_batched_tokens == 300
    assert vllm_config.cache_config.num_gpu_blocks_override == 1000 // 64 + 1 + 1
    assert vllm_config.cache_config.block_size == 64
    assert not vllm_config.observability_config.enable_logging_iteration_details
    assert vllm_config.model_config.get_diff_sampling_param() == {}


def engine_config(arguments: ModuleType, engine: EngineConfig, folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return arguments.AsyncEngineArgs(
            **arguments.engine_arguments(engine, str(folder))
        ).create_engine_config()


@pytest.mark.parametrize(
    ("model_type", "error"),
    [
        ("stranger", "contains custom code which must be executed"),
        ("llama", "architectures .'Stranger'. are not supported"),
    ],
)
def test_code_that_a_checkpoint_names_does_not_run_unless_it_is_trusted(
    arguments: ModuleType, folder: Path, model_type: str, error: str
) -> None:
    """CVE-2026-22807: vLLM before 0.14 ran it, whatever trust_remote_code said."""
    checkpoint = json.loads((folder / "config.json").read_text())
    checkpoint["architectures"] = ["Stranger"]
    checkpoint["model_type"] = model_type
    checkpoint["auto_map"] = {
        "AutoConfig": "stranger.StrangerConfig",
        "AutoModel": "stranger.Stranger",
        "AutoModelForCausalLM": "stranger.Stranger",
    }
    (folder / "config.json").write_text(json.dumps(checkpoint))
    trace = folder / "code-has-run"
    (folder / "stranger.py").write_text(f"open({str(trace)!r}, 'w').close()\n")

    with pytest.raises(ValueError, match=error):
        engine_config(arguments, config(), folder)

    assert not trace.exists()


@pytest.mark.parametrize(
    ("max_beam_width", "given", "expected"),
    [(8, None, 20), (16, None, 32), (8, "5", 16), (1, "5", 5), (16, "-1", -1)],
)
def test_there_are_log_probs_for_the_candidates_of_the_widest_beam_search(
    arguments: ModuleType, folder: Path, max_beam_width: int, given: str | None, expected: int
) -> None:
    engine = config({} if given is None else {"max_logprobs": given}, max_beam_width=max_beam_width)
    assert arguments.engine_arguments(engine, str(folder))["max_logprobs"] == expected


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("seed", "7", 7),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("enforce_eager", "false", False),
        ("enable_prefix_caching", "1", True),
        ("enable_chunked_prefill", "0", False),
        ("enable_lora", "TRUE", True),
        ("disable_log_stats", "false", False),
        ("enable_log_requests", "true", True),
        ("max_loras", "2", 2),
        ("max_lora_rank", "32", 32),
        ("max_cpu_loras", "None", None),
        ("load_format", "dummy", "dummy"),
        ("revision", "main", "main"),
        ("tokenizer", "/elsewhere", "/elsewhere"),
        ("kv_cache_dtype", "fp8", "fp8"),
        ("kv_cache_memory_bytes", "8M", 8 << 20),
        ("max_num_queued_tokens", "25.6k", 25_600),
        ("limit_mm_per_prompt", '{"image": 2}', {"image": 2}),
        ("override_generation_config", '{"temperature": 0.5}', {"temperature": 0.5}),
        ("cudagraph_capture_sizes", "1, 2 4", [1, 2, 4]),
        ("cudagraph_capture_sizes", "[1, 2]", [1, 2]),
        ("allowed_media_domains", '["a.example", "b.example"]', ["a.example", "b.example"]),
        ("hf_token", "true", True),
        ("hf_token", "hf_x", "hf_x"),
        # The command line has no flag for it
        ("enable_mm_processor_stats", "true", True),
        ("distributed_executor_backend", "mp", "mp"),
    ],
)
def test_a_text_becomes_what_the_field_is(
    arguments: ModuleType, folder: Path, name: str, text: str, value: object
) -> None:
    argument_value = arguments.engine_arguments(config({name: text}), str(folder))[name]
    assert argument_value == value and type(argument_value) is type(value)


def test_json_becomes_a_configuration_of_vllm(arguments: ModuleType, folder: Path) -> None:
    engine_arguments = arguments.engine_arguments(
        config({"compilation_config": '{"mode": 0}'}), str(folder)
    )
    assert type(engine_arguments["compilation_config"]).__name__ == "CompilationConfig"


def test_every_field_of_vllm_can_be_named(arguments: ModuleType) -> None:
    assert about.option_names() == about.SPECULATIVE.keys() | (arguments.FIELDS.keys() - {"model"})


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("seed", "zero", "a whole number"),
        ("seed", "1.5", "a whole number"),
        ("max_loras", "", "a whole number"),
        ("max_cpu_loras", "many", "a whole number"),
        ("gpu_memory_utilization", "half", "a number"),
        ("enable_lora", "maybe", "true or false"),
        ("scheduling_policy", "lifo", "fcfs, priority"),
        ("max_lora_rank", "17", "1, 8, 16, 32, 64, 128, 256, 320, 512"),
        ("cudagraph_capture_sizes", "1,x", "a whole number"),
        ("cudagraph_capture_sizes", "[1,", "a list in JSON, or words with commas between"),
        (
            "enable_mm_processor_stats",
            "perhaps",
            "Input should be a valid boolean, unable to interpret input",
        ),
    ],
)
def test_a_wrong_value_is_told_with_its_source_and_what_is_allowed(
    arguments: ModuleType, folder: Path, name: str, text: str, allowed: str
) -> None:
    engine = config({name: text}, option_sources={name: "serving.properties:3"})
    assert faults(arguments, folder, engine) == [
        f"option.{name}={text!r} (serving.properties:3): allowed is {allowed}"
    ]


def test_broken_json_is_one_line_and_all_faults_come_at_once(
    arguments: ModuleType, folder: Path
) -> None:
    options = {
        "compilation_config": '{"mode": 0',
        "hf_overrides": "{no}",
        "seed": "x",
        "model": "/other",
    }
    lines = faults(arguments, folder, config(options))

    assert len(lines) == 4 and all(line.isprintable() and len(line) < 400 for line in lines)
    assert lines[0].startswith(
        "option.compilation_config='{\"mode\": 0': allowed is what vLLM's compilation_config takes"
    )
    assert lines[3] == "option.model='/other': the model is named by option.model_id"


def test_an_option_that_vllm_has_not_is_told_with_the_closest(
    arguments: ModuleType, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"enable_prefix_cachin": "true"}
    engine_arguments = arguments.engine_arguments(config(options), str(folder))
    warning = (
        "option.enable_prefix_cachin='true': vLLM has no such argument; the closest one is "
        "option.enable_prefix_caching"
    )
    assert engine_arguments.keys() & options.keys() == set()
    assert [record.message for record in caplog.records if record.name == "lmi.options"] == [
        warning
    ]
    assert faults(arguments, folder, config(options, strict=True)) == [warning]


def test_a_draft_model_under_lmis_names_becomes_a_speculative_config(
    arguments: ModuleType, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def speculation(**options: str) -> object:
        return arguments.engine_arguments(config(options), str(folder)).get("speculative_config")

    assert speculation(speculative_draft_model="/draft") == {
        "model": "/draft",
        "num_speculative_tokens": 5,
    }
    assert speculation(
        speculative_draft_model="/draft", speculative_length="3", draft_model_tp_size="2"
    ) == {
        "model": "/draft",
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 2,
    }

    with caplog.at_level(logging.WARNING, "lmi.vllm"):
        assert speculation(speculative_length="3") is None

    assert (
        "option.speculative_length='3': has no effect without option.speculative_draft_model"
        in caplog.messages
    )

    wrong = config({"speculative_draft_model": "/draft", "speculative_length": "0"})
    assert faults(arguments, folder, wrong) == [
        "option.speculative_length='0': allowed is a whole number 1..1023"
    ]

    both = config(
        {"speculative_draft_model": "/draft", "speculative_config": '{"model": "/draft"}'}
    )

    assert "allowed is one of them" in faults(arguments, folder, both)[0]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_refused_before_vllm_reads_them(
    arguments: ModuleType, folder: Path, name: str
) -> None:
    (folder / name).write_bytes(b"")
    # Safetensors are there, so nothing is unpickled
    arguments.engine_arguments(config(), str(folder))
    with pytest.raises(SecurityRefused, match=name):
        arguments.engine_arguments(config({"load_format": "pt"}), str(folder))

    (folder / "model.safetensors").unlink()
    with pytest.raises(SecurityRefused, match=name):
        arguments.engine_arguments(config(), str(folder))

    arguments.engine_arguments(config({"load_format": "dummy"}), str(folder))
    arguments.engine_arguments(config(allow_pickle=True), str(folder))


@pytest.mark.parametrize(
    ("engine", "num_tokens", "length"),
    [
        (config(), 128 * 2048, -1),
        (config(max_num_sequences=3), 3 * 2048, -1),
        (config(max_num_sequences=1, max_sequence_length=4096), 4096, 4096),
        (config(max_num_sequences=1, max_sequence_length=512), 512, 512),
    ],
)
def test_a_cache_on_a_cpu_holds_what_the_sequences_can_use(
    arguments: ModuleType, folder: Path, engine: EngineConfig, num_tokens: int, length: int
) -> None:
    engine_arguments = arguments.engine_arguments(engine, str(folder))
    num_blocks = -(-num_tokens // 128) + 1  # vLLM reserves one
    assert engine_arguments["kv_cache_memory_bytes"] == num_blocks * 128 * TOKEN_BYTES
    assert engine_arguments["max_model_len"] == length
    assert "num_gpu_blocks_override" not in engine_arguments


def test_a_cache_on_a_cpu_takes_a_quarter_of_memory_at_most(
    arguments: ModuleType, folder: Path
) -> None:
    memory_bytes = 400 * 128 * TOKEN_BYTES
    sizes = [
        arguments.engine_arguments(
            config(num_engines=number, tensor_parallel_degree=ranks), str(folder), memory_bytes
        )
        for number, ranks in ((1, 1), (2, 1), (1, 2))
    ]
    assert [size["kv_cache_memory_bytes"] // (128 * TOKEN_BYTES) for size in sizes] == [101, 51, 50]

    (folder / "config.json").write_text("{}")
    unknown = arguments.engine_arguments(config(), str(folder), memory_bytes)

    assert unknown["kv_cache_memory_bytes"] == 100 * 128 * TOKEN_BYTES


@pytest.mark.parametrize(
    "name", ["gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"]
)
def test_a_cache_that_is_given_in_vllms_words_is_left_alone(
    arguments: ModuleType, folder: Path, name: str
) -> None:
    text = "0.5" if name == "gpu_memory_utilization" else "1000"
    engine_arguments = arguments.engine_arguments(config({name: text}), str(folder))
    words = {
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
        "gpu_memory_utilization",
        "max_model_len",
    }
    assert engine_arguments.keys() & words == {name}


def sizes_of_the_engine(**ours: Any) -> tuple[int, int, int]:
    """The blocks of its cache, its context and its batch, as vLLM has set them."""
    with warnings.catch_warnings():
        # What vLLM's start warns of.
        warnings.simplefilter("ignore")
        settings = config(dtype="fp32", max_num_sequences=5, **ours)
        executor = executor_of_vllm()(tiny_model("llama_wide"), settings)

    # vLLM forgets the number of blocks when it ends.
    with executor:
        engine = executor._engine.config
        return (
            engine.cache_config.num_gpu_blocks,
            engine.model_config.max_model_len,
            engine.scheduler_config.max_num_seqs,
        )


@pytest.mark.timeout(300)
def test_the_real_engine_has_the_cache_and_the_batch_that_were_asked_for() -> None:
    by_default = sizes_of_the_engine()
    assert by_default == (5 * CONTEXT_LENGTH // 128 + 1, CONTEXT_LENGTH, 5)

    # 500 tokens are four blocks, and the context is their capacity.
    assert sizes_of_the_engine(max_kv_cache_tokens=500) == (4 + 1, 512, 5)


def test_a_cache_that_cannot_hold_the_context_is_refused(
    arguments: ModuleType, folder: Path
) -> None:
    engine = config(max_kv_cache_tokens=500, max_sequence_length=1024)
    assert faults(arguments, folder, engine) == [
        "option.max_kv_cache_tokens='500': allowed is at least option.max_model_len, 1024"
    ]


def test_a_build_for_the_other_device_is_refused(arguments: ModuleType, folder: Path) -> None:
    is_cpu = arguments.current_platform.is_cpu()
    (fault,) = faults(arguments, folder, config(device="cuda" if is_cpu else "cpu"))
    assert fault.endswith(f"this vLLM is built for {'CPUs' if is_cpu else 'GPUs'}")


def test_what_vllms_classes_refuse_names_our_option_and_its_source(
    arguments: ModuleType, folder: Path
) -> None:
    from pydantic import ValidationError

    from handlers.lmi_vllm.start import explained

    sources = {"gpu_memory_utilization": "OPTION_GPU_MEMORY_UTILIZATION"}
    engine = config({"gpu_memory_utilization": "7"}, option_sources=sources)
    with pytest.raises(ValidationError) as caught:
        engine_config(arguments, engine, folder)

    assert str(explained(caught.value, str(folder), engine)) == (
        "option.gpu_memory_utilization='7' (OPTION_GPU_MEMORY_UTILIZATION): Input should be less "
        "than or equal to 1"
    )


class WrappedError(RuntimeError):
    """An error as Ray hands it over: its text is a traceback, and `cause` is the error
    of the rank.
    """

    cause = ValueError("the cause")


def test_the_error_of_a_rank_on_ray_is_the_cause(arguments: ModuleType) -> None:
    from handlers.lmi_vllm.start import explained

    reason = str(
        explained(
            WrappedError("ray::RayWorkerProc.initialize_worker() (pid=1)"), "/model", config({})
        )
    )
    assert reason == "/model: vLLM cannot start: ValueError: the cause"


@pytest.mark.parametrize(
    ("asked", "more"), [(31, 0), (32, 1), (64, 2), (95, 2), (96, 3), (128, 4), (299, 4)]
)
def test_a_few_places_stand_beside_the_batch_that_was_asked_for(
    arguments: ModuleType, folder: Path, asked: int, more: int
) -> None:
    max_num_seqs = arguments.engine_arguments(config(max_num_sequences=asked), str(folder))[
        "max_num_seqs"
    ]
    assert max_num_seqs - asked == arguments.num_express_places(max_num_seqs) == more
