"""Options on their way to the arguments of LLM: types, faults, collisions, and folders that LLM
does not read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, ConfigDict

from handlers.lmi_trtllm.profile import Profile, of_version
from lmi.errors import BadConfiguration, ModelUnusable, SecurityRefused
from lmi.settings.config import EngineConfig
from tests.handlers.trtllm import facts
from tests.handlers.trtllm.double import loaded

LINES = dict(
    zip(
        facts.PROFILES,
        [of_version("1.2.1", takes_priority=False), of_version("1.3.0rc26", takes_priority=True)],
        strict=True,
    )
)


@pytest.fixture(params=facts.PROFILES)
def published(request: pytest.FixtureRequest) -> str:
    """The name of the facts of which the package is made."""
    return str(request.param)


@pytest.fixture
def line(published: str) -> Profile:
    return LINES[published]


@pytest.fixture
def arguments(published: str) -> Iterator[ModuleType]:
    with loaded(published):
        yield import_module("handlers.lmi_trtllm.arguments")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint as Hugging Face has it."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'
    )
    (model / "model.safetensors").touch()
    return model


def config(options: dict[str, str] | None = None, **ours: Any) -> EngineConfig:
    return EngineConfig(
        **{"handler": "trtllm", "options": options or {}, "max_beam_width": 1, **ours}
    )


def faults(arguments: ModuleType, folder: Path, engine: EngineConfig, line: Profile) -> list[str]:
    with pytest.raises(BadConfiguration) as caught:
        arguments.llm_arguments(engine, str(folder), line)

    return str(caught.value).split("\n")


def test_our_options_reach_the_arguments_of_llm(
    arguments: ModuleType, folder: Path, line: Profile
) -> None:
    engine = config(
        dtype="bf16",
        max_num_sequences=7,
        max_prefill_tokens=99,
        max_sequence_length=512,
        max_beam_width=4,
        tensor_parallel_degree=2,
        pipeline_parallel_degree=3,
        trust_remote_code=True,
        enable_prefix_caching=False,
        max_kv_cache_tokens=4096,
    )
    llm_arguments = arguments.llm_arguments(engine, str(folder), line)
    cache = llm_arguments.pop("kv_cache_config")

    assert (cache.enable_block_reuse, cache.max_tokens, cache.free_gpu_memory_fraction) == (
        False,
        4096,
        0.9,
    )

    llm_arguments.pop("scheduler_config", None)
    assert llm_arguments == {
        "model": str(folder),
        "dtype": "bfloat16",
        "max_batch_size": 7,
        "max_num_tokens": 99,
        "max_seq_len": 512,
        "max_beam_width": 4,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "trust_remote_code": True,
        "guided_decoding_backend": "xgrammar",
        # A search that answers at its end shows so that it goes on
        "enable_iter_perf_stats": True,
    }


def test_every_argument_is_one_that_llm_takes(
    arguments: ModuleType, folder: Path, line: Profile, published: str
) -> None:
    known_class = facts.load(published).cls("tensorrt_llm.llmapi.TorchLlmArgs")
    llm_arguments = arguments.llm_arguments(
        config({"enable_lora": "true", "max_loras": "2"}), str(folder), line
    )
    assert llm_arguments.keys() <= known_class.keywords
    arguments.TorchLlmArgs(**llm_arguments)


def test_what_nobody_said_is_upstreams_own(
    arguments: ModuleType, folder: Path, line: Profile
) -> None:
    llm_arguments = arguments.llm_arguments(config(), str(folder), line)
    assert llm_arguments.keys() - {"scheduler_config", "kv_cache_config"} == {
        *(
            "model",
            "dtype",
            "max_beam_width",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "trust_remote_code",
        ),
        "guided_decoding_backend",
    }


def test_guides_are_on_unless_there_is_no_tokenizer_for_them(
    arguments: ModuleType, folder: Path, line: Profile
) -> None:
    without = arguments.llm_arguments(config({"skip_tokenizer_init": "true"}), str(folder), line)
    assert without["skip_tokenizer_init"] is True and "guided_decoding_backend" not in without

    with_one = arguments.llm_arguments(config({"skip_tokenizer_init": "false"}), str(folder), line)
    assert with_one["guided_decoding_backend"] == "xgrammar"


def test_priorities_have_an_effect_where_requests_may_have_them(
    arguments: ModuleType, folder: Path, line: Profile
) -> None:
    llm_arguments = arguments.llm_arguments(config(), str(folder), line)
    assert ("scheduler_config" in llm_arguments) == line.takes_priority
    if line.takes_priority:
        assert llm_arguments["scheduler_config"].waiting_queue_policy == "priority"
        engine_config = config({"scheduler_config": '{"waiting_queue_policy": "fcfs"}'})
        scheduler_config = arguments.llm_arguments(engine_config, str(folder), line)[
            "scheduler_config"
        ]
        assert scheduler_config.waiting_queue_policy == "fcfs"


def test_parts_of_blocks_are_shared_only_where_the_operator_says_so(
    arguments: ModuleType, folder: Path, line: Profile
) -> None:
    def cache(options: dict[str, str]) -> object:
        return arguments.llm_arguments(config(options), str(folder), line)["kv_cache_config"]

    assert cache({}).enable_partial_reuse is False
    assert cache({"kv_cache_config": '{"max_tokens": 64}'}).enable_partial_reuse is False
    assert cache({"kv_cache_config": '{"enable_partial_reuse": true}'}).enable_partial_reuse is True


@pytest.mark.parametrize(
    ("name", "text", "target", "value"),
    [
        ("max_input_len", "4096", "max_input_len", 4096),
        ("stream_interval", "2", "stream_interval", 2),
        ("enable_chunked_prefill", "TRUE", "enable_chunked_prefill", True),
        ("batch_wait_timeout_ms", "2.5", "batch_wait_timeout_ms", 2.5),
        ("guided_decoding_backend", "llguidance", "guided_decoding_backend", "llguidance"),
        ("guided_decoding_backend", "none", "guided_decoding_backend", None),
        ("tokens_per_block", "64", "kv_cache_config.tokens_per_block", 64),
        ("kv_cache_free_gpu_mem_fraction", "0.5", "kv_cache_config.free_gpu_memory_fraction", 0.5),
        (
            "max_attention_window",
            "[1024, 2048]",
            "kv_cache_config.max_attention_window",
            [1024, 2048],
        ),
        ("kv_cache_quant_algo", "FP8", "kv_cache_config.dtype", "fp8"),
        (
            "batch_scheduler_policy",
            "max_utilization",
            "scheduler_config.capacity_scheduler_policy",
            "MAX_UTILIZATION",
        ),
        ("enable_overlap_scheduler", "false", "disable_overlap_scheduler", True),
        ("use_cuda_graph", "false", "cuda_graph_config", None),
        ("enforce_eager", "true", "cuda_graph_config", None),
        ("moe_backend", "TRTLLM", "moe_config.backend", "TRTLLM"),
        ("kv_cache_config", '{"host_cache_size": 1024}', "kv_cache_config.host_cache_size", 1024),
        (
            "cuda_graph_config",
            '{"batch_sizes": [1, 2]}',
            "cuda_graph_config",
            {"batch_sizes": [1, 2]},
        ),
    ],
)
def test_a_text_becomes_what_the_field_is(
    arguments: ModuleType,
    folder: Path,
    line: Profile,
    name: str,
    text: str,
    target: str,
    value: object,
) -> None:
    llm_arguments = arguments.llm_arguments(config({name: text}), str(folder), line)
    argument, _, field = target.partition(".")
    argument_value = getattr(llm_arguments[argument], field) if field else llm_arguments[argument]

    assert argument_value == value and isinstance(argument_value, type(value))


@pytest.mark.parametrize(("name", "text"), [("use_cuda_graph", "true"), ("enforce_eager", "false")])
def test_graphs_are_upstreams_own_choice_unless_they_are_switched_off(
    arguments: ModuleType, folder: Path, line: Profile, name: str, text: str
) -> None:
    assert "cuda_graph_config" not in arguments.llm_arguments(
        config({name: text}), str(folder), line
    )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("max_input_len", "many", "max_input_len: Input should be a valid integer"),
        (
            "guided_decoding_backend",
            "outlines",
            "guided_decoding_backend: Input should be 'xgrammar' or 'llguidance'",
        ),
        (
            "kv_cache_free_gpu_mem_fraction",
            "most",
            "kv_cache_config.free_gpu_memory_fraction: Input should be a valid",
        ),
        (
            "batch_scheduler_policy",
            "fastest",
            "allowed is max_utilization, guaranteed_no_evict, static_batch",
        ),
        ("use_cuda_graph", "perhaps", "allowed is true or false"),
        ("kv_cache_config", "{", "allowed is JSON"),
        ("kv_cache_config", '{"blocks": 1}', "has no kv_cache_config.blocks"),
        ("rotary_base", "1e6", "allowed is nothing: write rope_theta into config.json"),
    ],
)
def test_a_wrong_value_is_one_line_with_the_option_and_the_rule(
    arguments: ModuleType, folder: Path, line: Profile, name: str, text: str, said: str
) -> None:
    engine = config({name: text}, option_sources={name: "serving.properties:3"})
    (fault,) = faults(arguments, folder, engine, line)
    assert fault.startswith(f"option.{name}='") and "(serving.properties:3): " in fault
    assert said in fault


class NGramDrafts(BaseModel):
    """As a class of drafts of main of October 2025: its word is no field."""

    model_config = ConfigDict(extra="forbid")
    decoding_type: ClassVar[str] = "NGram"
    max_draft_len: int


def test_drafts_are_named_by_their_word_in_either_line(
    arguments: ModuleType, folder: Path, line: Profile
) -> None:
    arguments.TorchLlmArgs.model_fields["speculative_config"].annotation = NGramDrafts | None
    engine = config({"speculative_config": '{"decoding_type": "NGram", "max_draft_len": "4"}'})
    assert arguments.llm_arguments(engine, str(folder), line)["speculative_config"] == NGramDrafts(
        max_draft_len=4
    )
    engine = config(
        {"speculative_config": '{"decoding_type": "NGram", "max_draft_len": 4, "depth": 2}'}
    )
    (fault,) = faults(arguments, folder, engine, line)
    assert fault.endswith(f"TensorRT-LLM ({line.name}) has no speculative_config.depth")


def test_several_faults_are_all_told(arguments: ModuleType, folder: Path, line: Profile) -> None:
    engine = config(
        {
            "stream_interval": "x",
            "max_input_len": "y",
            "tokens_per_block": "z",
            "host_cache_size": "?",
        }
    )
    assert len(faults(arguments, folder, engine, line)) == 4


@pytest.mark.parametrize(
    ("options", "target"),
    [
        (
            {"free_gpu_memory_fraction": "0.5", "kv_cache_free_gpu_mem_fraction": "0.6"},
            "free_gpu_memory_fraction",
        ),
        (
            {"kv_cache_dtype": "fp8", "kv_cache_config": '{"dtype": "auto"}'},
            "kv_cache_config.dtype",
        ),
        (
            {"max_loras": "2", "enable_lora": "true", "lora_config": '{"max_loras": 3}'},
            "lora_config.max_loras",
        ),
        (
            {"enforce_eager": "true", "cuda_graph_config": '{"batch_sizes": [1]}'},
            "cuda_graph_config",
        ),
    ],
)
def test_two_options_for_one_argument_must_agree(
    arguments: ModuleType, folder: Path, line: Profile, options: dict[str, str], target: str
) -> None:
    (fault,) = faults(arguments, folder, config(options), line)
    assert (
        "these set the same argument, " in fault
        and target in fault
        and fault.endswith("allowed is one of them")
    )


def test_two_options_that_agree_are_one_argument(
    arguments: ModuleType, folder: Path, line: Profile
) -> None:
    engine = config(
        {"kv_cache_config": '{"max_tokens": 64, "tokens_per_block": 16}'}, max_kv_cache_tokens=64
    )
    cache = arguments.llm_arguments(engine, str(folder), line)["kv_cache_config"]
    assert (cache.max_tokens, cache.tokens_per_block) == (64, 16)


def test_adapters_have_their_limits_and_none_without_the_switch(
    arguments: ModuleType, folder: Path, line: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"max_loras": "2", "max_lora_rank": "16", "max_cpu_loras": "4"}
    llm_arguments = arguments.llm_arguments(
        config({"enable_lora": "true", **limits}), str(folder), line
    )
    lora = llm_arguments["lora_config"]

    assert (
        llm_arguments["enable_lora"],
        lora.max_loras,
        lora.max_lora_rank,
        lora.max_cpu_loras,
    ) == (
        True,
        2,
        16,
        4,
    )

    with caplog.at_level(logging.WARNING):
        assert "lora_config" not in arguments.llm_arguments(config(limits), str(folder), line)

    assert [record.getMessage() for record in caplog.records] == [
        f"option.{name}='{limits[name]}': has no effect without option.enable_lora=true"
        for name in sorted(limits)
    ]


def test_adapters_need_no_option_but_the_one_that_enables_them(
    arguments: ModuleType, folder: Path, line: Profile
) -> None:
    llm_arguments = arguments.llm_arguments(config({"enable_lora": "true"}), str(folder), line)
    assert arguments.TorchLlmArgs(**llm_arguments).lora_config.max_lora_rank == 64
    assert "lora_config" not in arguments.llm_arguments(
        config({"enable_lora": "false"}), str(folder), line
    )


@pytest.mark.parametrize(("length", "is_told"), [(512, True), (2048, False)])
def test_a_prompt_length_that_the_context_has_no_room_for_is_told(
    arguments: ModuleType,
    folder: Path,
    line: Profile,
    caplog: pytest.LogCaptureFixture,
    length: int,
    is_told: bool,
) -> None:
    with caplog.at_level(logging.WARNING):
        arguments.llm_arguments(
            config({"max_input_len": "1024"}, max_sequence_length=length), str(folder), line
        )

    assert (
        f"option.max_input_len='1024': a prompt has at most {length - 1} tokens" in caplog.text
    ) is is_told


def test_what_a_line_lacks_is_told_with_the_reason(
    arguments: ModuleType, folder: Path, line: Profile
) -> None:
    engine = config({"onboard_blocks": "true"})
    if line.has_cpp_sampler:
        assert (
            arguments.llm_arguments(engine, str(folder), line)["kv_cache_config"].onboard_blocks
            is True
        )
        return

    (fault,) = faults(arguments, folder, engine, line)
    assert fault.endswith(
        "nothing: this TensorRT-LLM has no kv_cache_config.onboard_blocks, main has removed it"
    )

    (fault,) = faults(
        arguments, folder, config({"kv_cache_config": '{"onboard_blocks": true}'}), line
    )

    assert fault.endswith(
        "TensorRT-LLM (1.3.0rc26) has no kv_cache_config.onboard_blocks, main has removed it"
    )


def test_an_unknown_option_is_told_with_the_closest(
    arguments: ModuleType, folder: Path, line: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    ending = (
        f"TensorRT-LLM ({line.name}) has no argument stream_intervall; the closest one is "
        f"option.stream_interval"
    )
    (fault,) = faults(arguments, folder, config({"stream_intervall": "2"}, strict=True), line)
    assert fault.endswith(ending)

    with caplog.at_level(logging.WARNING):
        assert "stream_intervall" not in arguments.llm_arguments(
            config({"stream_intervall": "2"}), str(folder), line
        )

    assert caplog.records[0].getMessage().endswith(ending)


def test_options_of_one_node_and_harmless_ones_are_no_arguments(
    arguments: ModuleType, folder: Path, line: Profile
) -> None:
    of_one_node = {"nnodes": "1", "node_rank": "0", "master_addr": "a", "backend": "pytorch"}
    engines = [
        config(options, tensor_parallel_degree=2, strict=True) for options in (of_one_node, {})
    ]
    with_node, without = (
        arguments.llm_arguments(engine, str(folder), line).keys() for engine in engines
    )
    assert with_node == without


# Folders.


def test_a_folder_with_a_built_engine_is_refused_with_the_folder_to_take(
    arguments: ModuleType, folder: Path, line: Profile
) -> None:
    (folder / "tensorrt_llm" / "1").mkdir(parents=True)
    (folder / "tensorrt_llm" / "1" / "rank0.engine").touch()
    with pytest.raises(
        ModelUnusable, match="a built engine of TensorRT: .* name the folder of the checkpoint"
    ):
        arguments.llm_arguments(config(), str(folder), line)


def test_a_checkpoint_that_was_converted_for_engines_is_refused(
    arguments: ModuleType, folder: Path, line: Profile
) -> None:
    (folder / "config.json").write_text(
        '{"architecture": "LlamaForCausalLM", "mapping": {"tp_size": 1}}'
    )
    with pytest.raises(
        ModelUnusable, match="a checkpoint that was converted for TensorRT's engines"
    ):
        arguments.llm_arguments(config(), str(folder), line)


def test_pickled_weights_are_refused_unless_they_are_allowed_or_not_read(
    arguments: ModuleType, folder: Path, line: Profile
) -> None:
    (folder / "pytorch_model.bin").touch()
    assert arguments.llm_arguments(config(), str(folder), line)
    (folder / "model.safetensors").unlink()
    with pytest.raises(SecurityRefused, match="pytorch_model.bin: pickled weights"):
        arguments.llm_arguments(config(), str(folder), line)

    assert arguments.llm_arguments(config(allow_pickle=True), str(folder), line)


@pytest.mark.parametrize(
    ("file", "content", "quantize"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "fp8"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "W4A16_AWQ"}}, "awq"),
        ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_a_method_of_quantisation_must_be_the_checkpoints_own(
    arguments: ModuleType,
    folder: Path,
    line: Profile,
    file: str,
    content: dict[str, Any],
    quantize: str,
) -> None:
    (fault,) = faults(arguments, folder, config(quantize=quantize), line)
    assert fault.startswith(
        f"option.quantize='{quantize}': allowed is nothing: TensorRT-LLM quantises no weights"
    )
    (folder / "config.json").write_text('{"quantization_config": null}')
    assert len(faults(arguments, folder, config(quantize=quantize), line)) == 1
    (folder / file).write_text(json.dumps(content))
    assert "quantize" not in arguments.llm_arguments(config(quantize=quantize), str(folder), line)
    (fault,) = faults(arguments, folder, config(quantize="nvfp4"), line)
    assert fault.endswith("as the checkpoint has it")
