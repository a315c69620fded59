"""Every option of the reference for TensorRT-LLM on its way through the settings: translated,
refused or ignored.

The names are written here from djl-serving's sources, not read from our table: its guide in all its
revisions, the class TensorRtLlmProperties with what it takes from the extras, and
trt_llm_partition.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from handlers.driven.arguments import OPTION_OF
from handlers.lmi_trtllm import about, options
from handlers.lmi_trtllm.options import CONFIG_CLASSES, FORBIDDEN, OURS, READ, TRANSLATED
from lmi.errors import BadConfiguration
from lmi.settings.config import EngineConfig
from lmi.settings.engine_choice import choose_handler
from lmi.settings.handler import announced
from lmi.settings.resolve import Resolved
from lmi.supervisor.kinds import environ_of_engine
from tests.handlers.trtllm import facts
from tests.handlers.trtllm.double import write_double
from tests.settings.settling import FOUR_GPUS, faults, settle

ROOT = Path(__file__).resolve().parents[3]
GUIDE = """
max_input_len max_output_len max_num_tokens use_custom_all_reduce tokens_per_block
batch_scheduler_policy kv_cache_free_gpu_mem_fraction max_num_sequences enable_trt_overlap
enable_kv_cache_reuse baichuan_model_version chatglm_model_version gpt_model_version
multi_block_mode use_fused_mlp rotary_base rotary_dim rotary_scaling_type rotary_scaling_factor
logits_dtype trtllm_checkpoint_path num_checkpoint_workers num_engine_workers load_by_shard quantize
smoothquant_alpha smoothquant_per_token smoothquant_per_channel multi_query_mode awq_format
awq_calib_size q_format calib_size calib_batch_size awq_block_size use_fp8_context_fmha
max_rolling_batch_size tensor_parallel_degree mpi_mode
""".split()
PROPERTIES = """
tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code dtype revision tokenizer_revision
pipeline_parallel_size context_parallel_size moe_tensor_parallel_size moe_expert_parallel_size
enable_attention_dp auto_parallel auto_parallel_world_size load_format enable_chunked_prefill
guided_decoding_backend iter_stats_max_iterations request_stats_max_iterations
embedding_parallel_mode fast_build enable_build_cache batching_type normalize_log_probs
gather_generation_logits extended_runtime_perf_knob_config max_batch_size max_seq_len max_beam_width
backend enable_block_reuse max_tokens max_attention_window sink_token_length
free_gpu_memory_fraction host_cache_size onboard_blocks cross_kv_cache_fraction
secondary_offload_min_priority event_buffer_max_size enable_overlap_scheduler kv_cache_dtype
attn_backend use_cuda_graph moe_backend enable_chunked_context
""".split()
QUANTISATION = """
quant_algo kv_cache_quant_algo group_size smoothquant_val clamp_val use_meta_recipe has_zero_point
pre_quant_scales exclude_modules calib_dataset calib_batches calib_max_seq_length random_seed
tokenizer_max_seq_length max_draft_len
""".split()
EVERY_NAME = [*GUIDE, *PROPERTIES, *QUANTISATION]
# A value for each option that is not a number.
VALUES = {
    "batch_scheduler_policy": "guaranteed_no_evict",
    "kv_cache_free_gpu_mem_fraction": "0.5",
    "free_gpu_memory_fraction": "0.5",
    "cross_kv_cache_fraction": "0.5",
    "max_attention_window": "[1024]",
    "quantize": "fp8",
    "quant_algo": "FP8",
    "kv_cache_quant_algo": "FP8",
    "kv_cache_dtype": "fp8",
    "dtype": "bf16",
    "tokenizer": "/elsewhere",
    "tokenizer_mode": "slow",
    "load_format": "dummy",
    "guided_decoding_backend": "llguidance",
    "attn_backend": "FLASHINFER",
    "moe_backend": "CUTLASS",
    "backend": "tensorrt",
    "batching_type": "static",
    "auto_parallel": "true",
}
# What an option means, as `lmi config` shows it: the option of the table that it sets, or an
# argument of LLM.
MEANS = {
    "max_input_len": "max_input_len",
    "max_output_len": "option.max_model_len",
    "max_num_tokens": "option.max_rolling_batch_prefill_tokens",
    "max_num_sequences": "option.max_rolling_batch_size",
    "enable_chunked_context": "enable_chunked_prefill",
    "max_batch_size": "option.max_rolling_batch_size",
    "max_seq_len": "option.max_model_len",
    "max_tokens": "option.max_kv_cache_tokens",
    "enable_block_reuse": "option.enable_prefix_caching",
    "enable_kv_cache_reuse": "option.enable_prefix_caching",
    "pipeline_parallel_size": "option.pipeline_parallel_degree",
    "tokens_per_block": "kv_cache_config.tokens_per_block",
    "kv_cache_free_gpu_mem_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "max_attention_window": "kv_cache_config.max_attention_window",
    "sink_token_length": "kv_cache_config.sink_token_length",
    "host_cache_size": "kv_cache_config.host_cache_size",
    "onboard_blocks": "kv_cache_config.onboard_blocks",
    "cross_kv_cache_fraction": "kv_cache_config.cross_kv_cache_fraction",
    "secondary_offload_min_priority": "kv_cache_config.secondary_offload_min_priority",
    "event_buffer_max_size": "kv_cache_config.event_buffer_max_size",
    "kv_cache_dtype": "kv_cache_config.dtype",
    "kv_cache_quant_algo": "kv_cache_config.dtype",
    "batch_scheduler_policy": "scheduler_config.capacity_scheduler_policy",
    "enable_overlap_scheduler": "disable_overlap_scheduler",
    "use_cuda_graph": "cuda_graph_config",
    "moe_backend": "moe_config.backend",
    **{
        name: name
        for name in "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init "
        "context_parallel_size "
        "moe_tensor_parallel_size moe_expert_parallel_size enable_attention_dp load_format "
        "enable_chunked_prefill "
        "guided_decoding_backend iter_stats_max_iterations gather_generation_logits attn_backend".split()  # noqa: E501
    },
    # Options that lmi has under the same name for every engine.
    **{
        name: f"option.{name}"
        for name in "max_rolling_batch_size tensor_parallel_degree quantize trust_remote_code "
        "dtype revision "
        "request_stats_max_iterations max_beam_width".split()
    },
}
# A part of the reason with which an option is refused.
REFUSED = {
    "rotary_base": "write rope_theta into config.json",
    "rotary_dim": "write rotary_dim into config.json",
    "rotary_scaling_type": "write rope_scaling into config.json",
    "rotary_scaling_factor": "write rope_scaling into config.json",
    "quant_algo": "give a checkpoint that is quantised",
    "auto_parallel": "false: option.tensor_parallel_degree",
    "batching_type": "inflight",
    "backend": "pytorch: TensorRT's engines are not served",
}
# All the others have no effect, which is said once.
IGNORED = set(EVERY_NAME) - MEANS.keys() - REFUSED.keys()


@pytest.fixture(scope="module", params=facts.PROFILES)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, named as the line, with the line's argument classes, which can be read
    and not run.
    """
    folder = tmp_path_factory.mktemp("site") / str(request.param)
    write_double(folder, request.param)
    (folder / "tensorrt_llm" / "__init__.py").write_text(
        "raise RuntimeError('imported by the supervisor')"
    )
    return folder


@pytest.fixture
def profile(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The line that is installed."""
    monkeypatch.syspath_prepend(site)
    yield site.name
    assert "tensorrt_llm" not in sys.modules


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


def served(folder: Path, text: str = "") -> Resolved:
    return settle(
        folder, f"option.rolling_batch=trtllm\n{text}\noption.strict=true", machine=FOUR_GPUS
    )


def said_of(resolved: Resolved, name: str) -> list[str]:
    return [warning for warning in resolved.warnings if warning.startswith(f"option.{name} ")]


def row_of(resolved: Resolved, key: str) -> tuple[str, str]:
    return next((row.value, row.source) for row in resolved.settings if row.option == key)


def test_no_name_of_the_reference_is_missing_here() -> None:
    assert {*TRANSLATED, *FORBIDDEN, *options.IGNORED} - {*EVERY_NAME} == {
        *"enforce_eager enable_lora max_loras max_lora_rank max_cpu_loras "
        "gpu_memory_utilization swap_space".split(),
        # of vLLM
        *"speculative_draft_model speculative_length nnodes node_rank master_addr master_port".split(),  # noqa: E501
        *"model build_config batched_logits_processor checkpoint_loader decoding_config "
        "mpi_session".split(),
        *"num_postprocess_workers postprocess_tokenizer_dir post_processor_hook "
        "mm_encoder_only encode_only".split(),
    }


@pytest.mark.parametrize("name", sorted(MEANS))
def test_an_option_of_the_reference_is_translated_and_says_to_what(
    folder: Path, profile: str, name: str
) -> None:
    text = VALUES.get(name, "1")
    target = MEANS[name]
    if target.partition(".")[2] and not target.startswith("option.") and not has(profile, target):
        (fault,) = faults(
            folder, f"option.rolling_batch=trtllm\noption.{name}={text}", machine=FOUR_GPUS
        )
        assert f"allowed is nothing: this TensorRT-LLM has no {target}" in fault
        return

    resolved = served(folder, f"option.{name}={text}")
    assert said_of(resolved, name) == []

    value, source = row_of(resolved, target if target.startswith("option.") else f"option.{name}")
    assert value.lower() in (text.lower(), "true")
    assert source.startswith("serving.properties:2")

    if not target.startswith("option."):
        assert source.endswith(f", sets {target}")
        assert resolved.config.engine.options[name] == text


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_option_of_the_reference_that_changes_answers_is_refused_with_the_way_out(
    folder: Path, profile: str, name: str
) -> None:
    text = VALUES.get(name, "1")
    (fault,) = faults(
        folder, f"option.rolling_batch=trtllm\noption.{name}={text}", machine=FOUR_GPUS
    )
    assert fault.startswith(f"option.{name}='{text}' (serving.properties:2): allowed is ")
    assert REFUSED[name] in fault


@pytest.mark.parametrize("name", sorted(IGNORED - {"mpi_mode"}))
def test_an_option_of_the_reference_without_effect_is_told_once_with_the_reason(
    folder: Path, profile: str, name: str
) -> None:
    resolved = served(folder, f"option.{name}={VALUES.get(name, '1')}")
    (line,) = said_of(resolved, name)
    assert line.startswith(f"option.{name} (serving.properties:2): trtllm does not use it, ")
    assert name not in resolved.config.engine.options


def test_options_come_from_the_environment_too(folder: Path, profile: str) -> None:
    environ = {
        "OPTION_ROLLING_BATCH": "trtllm",
        "OPTION_MAX_NUM_TOKENS": "50000",
        "OPTION_MAX_OUTPUT_LEN": "512",
        "OPTION_BATCH_SCHEDULER_POLICY": "max_utilization",
        "OPTION_QUANTIZE": "fp8",
        "OPTION_NUM_ENGINE_WORKERS": "4",
        "TENSOR_PARALLEL_DEGREE": "max",
        "SERVING_FEATURES": "trtllm",
    }
    resolved = settle(
        folder, "option.strict=true\noption.mpi_mode=true", environ, machine=FOUR_GPUS
    )
    engine = resolved.config.engine

    assert (engine.max_prefill_tokens, engine.max_sequence_length, engine.quantize) == (
        50000,
        512,
        "fp8",
    )
    assert (engine.tensor_parallel_degree, engine.options) == (
        4,
        {"batch_scheduler_policy": "max_utilization"},
    )
    assert [warning.partition(" ")[0] for warning in resolved.warnings] == [
        "trtllm:",
        "option.num_engine_workers",
    ]
    assert any(note.startswith("option.mpi_mode") for note in resolved.notes)


def test_two_names_of_one_option_must_agree_and_a_file_wins_over_the_environment(
    folder: Path, profile: str
) -> None:
    text = "option.rolling_batch=trtllm\noption.max_seq_len=512"
    (fault,) = faults(folder, f"{text}\noption.max_model_len=1024", machine=FOUR_GPUS)

    assert fault.endswith("these mean the same option, allowed is one value")
    assert "option.max_seq_len=512" in fault and "option.max_model_len=1024" in fault

    resolved = settle(folder, text, {"OPTION_MAX_MODEL_LEN": "1024"}, machine=FOUR_GPUS)
    assert resolved.config.engine.max_sequence_length == 512
    assert any("not 1024 (OPTION_MAX_MODEL_LEN)" in note for note in resolved.notes)

    (fault,) = faults(
        folder, "option.rolling_batch=trtllm\noption.max_num_tokens=many", machine=FOUR_GPUS
    )

    assert fault.startswith(
        "option.max_num_tokens='many' (serving.properties:2): allowed is a whole number"
    )


def test_the_references_defaults_hold_unless_something_else_is_said(
    folder: Path, profile: str
) -> None:
    engine = served(folder).config.engine
    assert (engine.max_num_sequences, engine.max_prefill_tokens, engine.max_beam_width) == (
        256,
        16384,
        1,
    )
    assert served(folder, "option.max_num_sequences=7").config.engine.max_num_sequences == 7


def test_the_engines_own_batch_counts_beside_the_one_of_all_engines(
    folder: Path, profile: str
) -> None:
    resolved = served(folder, "option.max_num_sequences=32\noption.max_rolling_batch_size=64")
    assert resolved.config.engine.max_num_sequences == 32
    assert (
        "option.max_rolling_batch_size (serving.properties:3): option.max_num_sequences "
        "(serving.properties:2) counts"
    ) in resolved.warnings


def test_lmi_config_marks_what_is_not_used(folder: Path, profile: str) -> None:
    resolved = served(folder, "option.use_fused_mlp=true\noption.tokens_per_block=32")
    assert row_of(resolved, "option.use_fused_mlp") == ("true", "serving.properties:2, not used")
    assert row_of(resolved, "option.tokens_per_block")[1].startswith("serving.properties:3, sets ")


def test_a_configuration_says_what_was_proven_and_what_was_not(folder: Path, profile: str) -> None:
    line = f"trtllm: {about.CHECKED}"
    assert line in served(folder).warnings
    assert about.HANDLER.describe() == about.CHECKED and "never run on the wheel" in line
    for month in ("October 2025", "August 2026"):
        assert (
            f"main-{datetime.strptime(month, '%B %Y'):%Y-%m}" in facts.PROFILES
            and month in about.CHECKED
        )


@pytest.mark.parametrize("page", ["README.md", "docs/docker.md", "docs/kubernetes.md"])
def test_each_page_that_names_it_says_that_nobody_has_run_it(page: str) -> None:
    text = (ROOT / page).read_text()
    assert "never run" in text[text.index("TensorRT-LLM") :].partition("\n\n")[0].lower(), (
        "where it comes first"
    )


def test_lmi_config_shows_what_options_set_and_warns_of_what_nobody_has_run(
    folder: Path, profile: str, site: Path
) -> None:
    (folder / "serving.properties").write_text(
        "option.rolling_batch=trtllm\noption.max_output_len=512\noption.kv_cache_free_gpu_mem_fraction=0.8\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "from lmi.cli import run; run(['config'])"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{site}"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    file = folder / "serving.properties"

    assert rows["option.max_model_len"] == ["512", f"{file}:2"]
    assert rows["option.kv_cache_free_gpu_mem_fraction"] == [
        *("0.8", f"{file}:3,"),
        *("sets", "kv_cache_config.free_gpu_memory_fraction"),
    ]
    assert f"warning: trtllm: {about.CHECKED}" in done.stderr.splitlines()


def test_an_argument_of_the_installed_package_is_an_option_and_an_unknown_one_is_not(
    folder: Path, profile: str
) -> None:
    resolved = served(
        folder, "option.stream_interval=2\noption.garbage_collection_gen0_threshold=9"
    )

    assert resolved.config.engine.options == {
        "stream_interval": "2",
        "garbage_collection_gen0_threshold": "9",
    }

    (fault,) = faults(
        folder,
        "option.rolling_batch=trtllm\noption.strict=true\noption.stream_intervall=2",
        machine=FOUR_GPUS,
    )

    assert fault.endswith("the closest known key is option.stream_interval")


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        (
            "option.speculative=ngram",
            "nothing on trtllm, whose own option is option.speculative_config",
        ),
        ("option.quantize=smoothquant", "nothing: TensorRT-LLM quantises no weights at load"),
        ("option.device=cpu", "auto or cuda on trtllm"),
        ("option.num_postprocess_workers=2", "0: the front end makes text of tokens"),
        ("option.nnodes=2", "1: the ranks are on one machine; vLLM serves a model over several"),
    ],
)
def test_what_this_engine_cannot_do_is_refused(
    folder: Path, profile: str, text: str, allowed: str
) -> None:
    (fault,) = faults(folder, f"option.rolling_batch=trtllm\n{text}", machine=FOUR_GPUS)
    assert f"allowed is {allowed}" in fault


def test_a_value_that_asks_for_what_happens_anyway_is_taken(folder: Path, profile: str) -> None:
    resolved = served(
        folder, "option.backend=pytorch\noption.auto_parallel=false\noption.batching_type=inflight"
    )
    assert resolved.warnings == (f"trtllm: {about.CHECKED}",)


def test_auto_never_picks_an_engine_that_nobody_has_run(folder: Path, profile: str) -> None:
    handlers = dict(announced())
    handlers["vllm"] = replace(handlers["vllm"], library="no_such_library")
    assert choose_handler("auto", FOUR_GPUS, handlers) == ("lmi-dist", "vllm is not installed")
    with pytest.raises(BadConfiguration, match="trtllm"):
        choose_handler("auto", FOUR_GPUS, {"trtllm": handlers["trtllm"]})

    assert choose_handler("tensorrt-llm", FOUR_GPUS, handlers)[0] == "trtllm"


def test_auto_prefers_vllm_where_both_are_installed(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert choose_handler("auto", FOUR_GPUS, announced())[0] == "vllm"


def test_nothing_is_sent_to_its_makers_unless_the_operator_says_so(
    folder: Path, profile: str
) -> None:
    config = served(folder).config
    environ = environ_of_engine(config, {}, slot=0)
    assert {name: environ[name] for name in about.NOTHING_IS_SENT} == about.NOTHING_IS_SENT
    assert "TELEMETRY_DISABLED" not in environ_of_engine(
        config, {"TELEMETRY_DISABLED": "0"}, slot=0
    )


def test_ranks_see_the_gpus_of_their_engine_and_use_no_network() -> None:
    two = EngineConfig(
        handler="trtllm", tensor_parallel_degree=2, num_engines=2, device_ids=("4", "5", "6", "7")
    )
    variables = about.environment(two, {"OMPI_MCA_oob_tcp_if_include": "eth0"}, 1, "")
    assert variables["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert variables["OMPI_MCA_btl_tcp_if_include"] == "lo"
    assert "OMPI_MCA_oob_tcp_if_include" not in variables, "the operator's value counts"
    assert "CUDA_VISIBLE_DEVICES" not in about.environment(EngineConfig(), {}, 0, "")


def test_a_stub_of_the_wheel_has_no_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert about.option_names() is None
    assert about.check(EngineConfig(options={"onboard_blocks": "true"})) == {}


@pytest.mark.parametrize("line", facts.PROFILES)
def test_every_translated_argument_is_in_the_facts_of_both_lines_or_has_a_reason(line: str) -> None:
    targets = {*TRANSLATED.values(), *OURS.values()}
    missing = {
        target for target in targets if not target.startswith("option.") and not has(line, target)
    }
    assert missing <= options.LACKING.keys()
    our_targets = {f"option.{OPTION_OF[field]}" for field in OURS}
    assert {target for target in targets if target.startswith("option.")} <= our_targets


@pytest.mark.parametrize("line", facts.PROFILES)
def test_the_policies_of_the_scheduler_are_those_of_the_facts(line: str) -> None:
    published = facts.load(line).enums["tensorrt_llm.llmapi.CapacitySchedulerPolicy"]
    assert {policy.upper() for policy in options.POLICIES} == {*published}


def has(line: str, target: str) -> bool:
    """Whether a line has an argument, or a field of a nested one, as the facts say."""
    argument, _, field = target.partition(".")
    published = facts.load(line)
    if not field:
        return argument in published.cls("tensorrt_llm.llmapi.TorchLlmArgs").keywords

    kind = {**CONFIG_CLASSES, "lora_config": "LoraConfig"}[argument]
    return any(
        name.endswith(f".{kind}") and field in cls.keywords
        for name, cls in published.classes.items()
    )


def test_an_option_is_in_one_table_and_no_row_lacks_a_word() -> None:
    assert not TRANSLATED.keys() & FORBIDDEN.keys() and not options.IGNORED.keys() & {
        *TRANSLATED,
        *FORBIDDEN,
    }
    assert READ.keys() <= TRANSLATED.keys()
    for name, words in (TRANSLATED | FORBIDDEN | options.IGNORED).items():
        assert words and not words.endswith("."), name
