"""Variables of AWS's vLLM and SGLang images: each is read into an option, handed to the engine, or
said to be not read.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi.settings.engine_flags import words_of
from lmi.settings.resolve import Resolved
from lmi.settings.sglang import FLAGS
from lmi.settings.table import find
from lmi.shared.machine import Machine
from tests.settings.settling import FOUR_GPUS, faults, settle, source_of


def value_of(resolved: Resolved, option: str) -> str:
    return next(setting.value for setting in resolved.settings if setting.option == option)


def lines_about(resolved: Resolved, name: str) -> list[str]:
    return [line for line in (*resolved.warnings, *resolved.notes) if name in line]


# SM_VLLM_<FLAG>


def test_a_flag_of_the_name_of_an_option_gives_that_option_and_its_source(folder: Path) -> None:
    environ = {
        "SM_VLLM_MAX_MODEL_LEN": "8192",
        "SM_VLLM_MAX_NUM_SEQS": "4",
        "SM_VLLM_DTYPE": "bfloat16",
        "SM_VLLM_SERVED_MODEL_NAME": "fox",
        "SM_VLLM_TOOL_CALL_PARSER": "hermes",
        "SM_VLLM_PORT": "8090",
    }
    resolved = settle(folder, environ=environ)

    config = resolved.config
    assert (config.engine.max_sequence_length, config.engine.max_num_sequences) == (8192, 4)
    assert (config.engine.dtype, config.model.name) == ("bf16", "fox")
    assert (config.model.tool_call_parser, config.server.port) == ("hermes", 8090)
    assert source_of(resolved, "option.max_model_len") == "SM_VLLM_MAX_MODEL_LEN"
    assert resolved.warnings == ()


@pytest.mark.usefixtures("vllm")
def test_a_flag_that_the_engine_alone_knows_is_handed_to_it(folder: Path) -> None:
    environ = {
        "SM_VLLM_GPU_MEMORY_UTILIZATION": "0.8",
        "SM_VLLM_LIMIT_MM_PER_PROMPT": '{"image": 2}',
        "SM_VLLM_ENFORCE_EAGER": "true",
        "SM_VLLM_TENSOR_PARALLEL_SIZE": "4",
    }
    resolved = settle(folder, environ=environ, machine=FOUR_GPUS)

    options = resolved.config.engine.options
    assert (options["gpu_memory_utilization"], options["enforce_eager"]) == ("0.8", "true")
    assert options["limit_mm_per_prompt"] == '{"image": 2}'
    assert resolved.config.engine.tensor_parallel_degree == 4
    assert resolved.config.engine.option_sources["enforce_eager"] == "SM_VLLM_ENFORCE_EAGER"
    assert resolved.warnings == ()


@pytest.mark.parametrize("text", ["true", " TRUE ", "", " "])
def test_a_true_or_empty_variable_is_a_flag_without_a_value(folder: Path, text: str) -> None:
    resolved = settle(folder, environ={"SM_VLLM_TRUST_REMOTE_CODE": text})
    assert resolved.config.engine.trust_remote_code is True


@pytest.mark.parametrize("text", ["false", " False "])
def test_a_false_variable_leaves_the_flag_out_and_says_so(folder: Path, text: str) -> None:
    resolved = settle(folder, environ={"SM_VLLM_ENABLE_PREFIX_CACHING": text})
    assert resolved.config == settle(folder).config
    assert lines_about(resolved, "SM_VLLM_ENABLE_PREFIX_CACHING") == [
        "SM_VLLM_ENABLE_PREFIX_CACHING: false leaves the flag out, so its default counts"
    ]

    off = settle(folder, environ={"SM_VLLM_NO_ENABLE_PREFIX_CACHING": "true"})
    assert off.config.engine.enable_prefix_caching is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('["a", "b c"]', ["a", "b c"]),
        ('[{"name": "x", "path": "/y"}, [1, 2]]', ['{"name":"x","path":"/y"}', "[1,2]"]),
        ("[true, false, null, 1.5]", ["true", "false", "", "1.5"]),
        ("[]", []),
        ('{"a": 1} {"b": [2]}\n{"c": {}}', ['{"a":1}', '{"b":[2]}', '{"c":{}}']),
        ('{"a": 1}', None),
        ('{"a": 1} x', None),
        ("[1, 2", None),
        ("[" * 100_000 + "]", None),
        ("{% for m in messages %}{{ m }}{% endfor %}", None),
        ("a=/path", None),
        ("text with spaces", None),
    ],
)
def test_an_array_and_several_objects_are_words_and_any_other_text_is_one(
    text: str, words: list[str] | None
) -> None:
    assert words_of(text) == words


@pytest.mark.usefixtures("vllm")
def test_an_array_gives_an_option_its_values_and_an_engine_its_words(folder: Path) -> None:
    environ = {
        "SM_VLLM_SERVED_MODEL_NAME": '["fox", "org/fox"]',
        "SM_VLLM_ALLOWED_ORIGINS": '["https://a.example"]',
        "SM_VLLM_HF_OVERRIDES": '[1, "b c"]',
        "SM_VLLM_LOAD_FORMAT": '["dummy"]',
        "SM_VLLM_SPECULATIVE_CONFIG": '{"method": "ngram", "num_speculative_tokens": 4}',
    }
    resolved = settle(folder, environ=environ, machine=Machine(num_cores=8, gpus=("0",)))

    config = resolved.config
    assert (config.model.name, config.model.aliases) == ("fox", ("org/fox",))
    assert config.server.cors_allowed_origins == ("https://a.example",)
    assert config.engine.options["hf_overrides"] == '["1", "b c"]'
    assert config.engine.options["load_format"] == "dummy"
    assert config.engine.options["speculative_config"] == environ["SM_VLLM_SPECULATIVE_CONFIG"]
    assert resolved.warnings == ()


def test_an_empty_array_leaves_the_flag_out_with_a_warning(folder: Path) -> None:
    resolved = settle(folder, environ={"SM_VLLM_SERVED_MODEL_NAME": "[]"})
    assert resolved.config == settle(folder).config
    assert resolved.warnings == ("SM_VLLM_SERVED_MODEL_NAME: an empty list leaves the flag out",)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("SM_VLLM_LORA_MODULES", "registered at /adapters"),
        ("SM_VLLM_CONFIG", "lmi serve --config FILE"),
        ("SM_VLLM_HF_TOKEN", "HF_TOKEN is the hub's token"),
        ("SM_VLLM_MIDDLEWARE", "a model.py may read and write bodies"),
        ("SM_VLLM_NO_SUCH_FLAG", "unknown option"),
        ("SM_SGLANG_LORA_PATHS", "registered at /adapters"),
        ("SM_SGLANG_SPECULATIVE_ALGORITHM", "option.speculative=ngram"),
        ("SM_SGLANG_ENGINE", "make no images"),
        ("SM_SGLANG_ATTENTION_BACKEND", "flags of SGLang that no option here means"),
    ],
)
def test_a_variable_that_is_not_read_is_one_warning_without_its_value(
    folder: Path, name: str, says: str
) -> None:
    (warning,) = settle(folder, environ={name: "hf_value"}).warnings
    assert name in warning and says in warning and "hf_value" not in warning


def test_a_bad_value_names_option_text_and_variable(folder: Path) -> None:
    (fault,) = faults(folder, environ={"SM_VLLM_MAX_MODEL_LEN": "long"})
    assert fault.startswith("option.max_model_len='long' (SM_VLLM_MAX_MODEL_LEN): allowed is ")


def test_the_command_line_beats_a_variable_and_the_variable_beats_the_file(folder: Path) -> None:
    environ = {"SM_VLLM_MAX_NUM_SEQS": "4"}
    in_file = "option.max_num_seqs=8"
    assert settle(folder, in_file, environ).config.engine.max_num_sequences == 4

    flags = {"option.max_rolling_batch_size": "2"}
    assert settle(folder, in_file, environ, flags).config.engine.max_num_sequences == 2


def test_a_key_in_a_variable_is_not_shown(folder: Path) -> None:
    resolved = settle(folder, environ={"SM_VLLM_API_KEY": "sesame"})
    assert value_of(resolved, "option.api_key") == "***"
    assert len(resolved.config.server.api_keys) == 1


def test_data_parallel_ranks_are_replicas(folder: Path) -> None:
    for name in ("SM_VLLM_DATA_PARALLEL_SIZE", "SM_SGLANG_DP"):
        resolved = settle(folder, environ={name: "2"})
        assert (resolved.config.engine.num_engines, resolved.warnings) == (2, ()), name


# SM_SGLANG_<FLAG>


def test_a_flag_of_sglang_gives_the_option_that_means_it(folder: Path) -> None:
    environ = {
        "SM_SGLANG_CONTEXT_LENGTH": "4096",
        "SM_SGLANG_MAX_RUNNING_REQUESTS": "8",
        "SM_SGLANG_CHUNKED_PREFILL_SIZE": "512",
        "SM_SGLANG_MAX_PREFILL_TOKENS": "16384",
        "SM_SGLANG_DISABLE_RADIX_CACHE": "true",
        "SM_SGLANG_TOOL_CALL_PARSER": "gpt-oss",
        "SM_SGLANG_REASONING_PARSER": "deepseek-r1",
        "SM_SGLANG_HOST": "0.0.0.0",
        "SM_SGLANG_ENGINE": "llm",
    }
    resolved = settle(folder, environ=environ)

    config = resolved.config
    assert (config.engine.max_sequence_length, config.engine.max_num_sequences) == (4096, 8)
    assert config.engine.max_prefill_tokens == 512
    assert config.engine.enable_prefix_caching is False
    assert config.model.tool_call_parser == "openai"
    assert config.model.reasoning_parser == "think"
    assert (config.server.host, resolved.warnings) == ("0.0.0.0", ())


@pytest.mark.usefixtures("vllm")
def test_sglangs_share_of_memory_and_ranks_are_the_engines(folder: Path) -> None:
    environ = {"SM_SGLANG_TP": "4", "SM_SGLANG_MEM_FRACTION_STATIC": "0.7"}
    resolved = settle(folder, environ=environ, machine=FOUR_GPUS)
    engine = resolved.config.engine
    assert (engine.tensor_parallel_degree, engine.options["gpu_memory_utilization"]) == (4, "0.7")


def test_a_template_that_sglang_brings_is_not_the_text_of_one(folder: Path) -> None:
    resolved = settle(folder, environ={"SM_SGLANG_CHAT_TEMPLATE": "chatml"})
    assert resolved.config.model.chat_template is None
    (warning,) = resolved.warnings
    assert "the model's own template counts" in warning


def test_the_default_of_a_chunk_is_the_default_here(folder: Path) -> None:
    resolved = settle(folder, environ={"SM_SGLANG_CHUNKED_PREFILL_SIZE": "-1"})
    assert resolved.config == settle(folder).config


def test_every_row_of_sglangs_flags_has_one_meaning() -> None:
    for flag in FLAGS.values():
        meanings = [meaning for meaning in (flag.key, flag.instead, flag.needless) if meaning]
        assert len(meanings) == 1, flag
        is_of_server = "." not in flag.key
        assert not flag.key or not is_of_server or find(flag.key) is not None, flag
