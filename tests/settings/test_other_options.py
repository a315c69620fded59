"""Options without a row or an effect: those that engines get, and those that are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.settings.settling import faults, settle, source_of


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
def test_an_unknown_key_is_told_with_the_closest_known_one(
    folder: Path, key: str, nearest: str
) -> None:
    (warning,) = settle(folder, f"{key}=1").warnings
    assert (
        warning
        == f"{key} (serving.properties:1): unknown option; the closest known key is {nearest}"
    )


@pytest.mark.parametrize(
    "key", ["worker", "option.enable_logging", "option.max_new_token_count", "option.lora", "rank"]
)
@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("engine", ["lmi-dist", "vllm"])
def test_a_key_that_is_not_nearly_a_known_one_gets_no_hint(
    folder: Path, key: str, engine: str
) -> None:
    (warning,) = settle(folder, f"option.rolling_batch={engine}\n{key}=1").warnings
    assert warning == f"{key} (serving.properties:2): unknown option"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("option.ssl_ca_certs", "this server asks no client for a certificate"),
        ("option.max_new_tokens", "a request says it, as max_new_tokens among its parameters"),
    ],
)
def test_a_key_that_means_something_elsewhere_is_told_so(folder: Path, key: str, said: str) -> None:
    assert settle(folder, f"{key}=1").warnings == (f"{key} (serving.properties:1): {said}",)
    (fault,) = faults(folder, f"{key}=1\noption.strict=true")
    assert (
        fault == f"{key} (serving.properties:1): unknown option, and option.strict is true; {said}"
    )


def test_an_unknown_option_is_handed_on_and_stops_the_start_only_when_strict(folder: Path) -> None:
    resolved = settle(folder, "option.zzqq=1\nzzqq=2\n")
    assert resolved.config.engine.options == {"zzqq": "1"}
    assert [warning.split(" ")[0] for warning in resolved.warnings] == ["option.zzqq", "zzqq"]
    (fault,) = faults(folder, "option.zzqq=1\nzzqq=2\noption.strict=true\n")
    assert fault == "option.zzqq (serving.properties:1): unknown option, and option.strict is true"


def test_an_option_of_another_engine_is_no_error_even_when_strict(folder: Path) -> None:
    resolved = settle(folder, "option.gpu_memory_utilization=0.9\noption.strict=true\n")
    assert resolved.warnings == (
        "option.gpu_memory_utilization (serving.properties:1): lmi-dist does not use it",
    )


def test_an_option_of_the_table_that_the_engine_does_not_use_is_told(folder: Path) -> None:
    assert settle(folder, "option.trust_remote_code=false\n").warnings == ()
    resolved = settle(
        folder, "option.chat_template={{ x }}\n", {"HF_MODEL_TRUST_REMOTE_CODE": "true"}
    )
    assert resolved.warnings == (
        "option.trust_remote_code (HF_MODEL_TRUST_REMOTE_CODE): has an effect on trtllm or vllm "
        "alone, "
        "code that comes with a model is never run",
    )


def test_what_the_reference_needs_and_we_do_not_is_only_noted(folder: Path) -> None:
    keys = "enable_auto_tool_choice enable_reasoning paged_attention n_positions device_map batch_size".split()  # noqa: E501
    text = "\n".join(f"option.{key}=1" for key in keys)
    resolved = settle(folder, f"{text}\noption.strict=true", {"SERVING_FAIL_FAST": "true"})
    assert resolved.warnings == () and resolved.config.engine.options == {}

    noted = [note for note in resolved.notes if "has no effect here" in note]
    assert len(noted) == len(keys) + 1
    assert (
        "fail_fast (SERVING_FAIL_FAST): has no effect here: a start that fails always ends the "
        "server" in noted
    )

    resolved = settle(
        folder, "option.mpi_mode=true\nmax_idle_time=4\nengine=MPI\n", {"SERVING_FEATURES": "vllm"}
    )

    assert resolved.warnings == () and resolved.config.engine.options == {}
    assert {note for note in resolved.notes if note.endswith("has no effect here")} == {
        "max_idle_time (serving.properties:2): has no effect here",
        "features (SERVING_FEATURES): has no effect here",
        "option.mpi_mode (serving.properties:1): has no effect here",
    }


@pytest.mark.parametrize("name", ["MAX_INPUT_LENGTH", "MAX_INPUT_TOKENS"])
def test_the_bound_of_a_prompt_that_tgi_has_is_told_with_the_one_that_counts(
    folder: Path, name: str
) -> None:
    resolved = settle(folder, "", {name: "1024"})
    assert resolved.warnings == ()
    assert (
        f"max_input_length ({name}): has no effect here: a prompt may fill all but one token of "
        f"the context, "
        "which option.max_model_len sets" in resolved.notes
    )


@pytest.mark.usefixtures("vllm")
def test_vllms_own_arguments_are_known_without_importing_it(folder: Path) -> None:
    text = "option.rolling_batch=vllm\noption.seed=7\noption.speculative_length=3\noption.strict=true\n"  # noqa: E501
    resolved = settle(folder, text, {"HF_MODEL_TRUST_REMOTE_CODE": "true"})
    assert resolved.warnings == ()
    assert resolved.config.engine.options == {"seed": "7", "speculative_length": "3"}
    assert resolved.config.engine.option_sources["seed"] == "serving.properties:2"
    assert resolved.config.engine.trust_remote_code and resolved.config.engine.strict
    assert (
        resolved.config.engine.max_num_sequences is None
        and resolved.config.engine.max_prefill_tokens is None
    )


@pytest.mark.usefixtures("vllm")
def test_what_vllm_does_not_have_is_told_with_its_closest_argument_and_stays_behind(
    folder: Path,
) -> None:
    resolved = settle(
        folder, "option.rolling_batch=vllm\noption.enable_lorra=true\noption.swap_space=4\n"
    )

    assert resolved.warnings == (
        (
            "option.enable_lorra (serving.properties:2): unknown option; the closest known key is "
            "option.enable_lora"
        ),
        "option.swap_space (serving.properties:3): vllm does not use it",
    )
    assert resolved.config.engine.options == {}

    (fault,) = faults(
        folder, "option.rolling_batch=vllm\noption.enable_log_request=1\noption.strict=true"
    )

    assert fault == (
        "option.enable_log_request (serving.properties:2): unknown option, and option.strict is "
        "true; "
        "the closest known key is option.enable_log_requests"
    )


def test_the_options_of_adapters_are_those_of_the_embedded_engine_too(folder: Path) -> None:
    options = {"enable_lora": "true", "max_loras": "8", "max_lora_rank": "64", "max_cpu_loras": "9"}
    lines = [f"option.{name}={value}" for name, value in options.items()]
    resolved = settle(
        folder, "\n".join(["option.rolling_batch=lmi-dist", "option.strict=true", *lines])
    )
    assert (resolved.config.engine.options, resolved.warnings) == (options, ())


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("engine", "options"), [("lmi-dist", {}), ("vllm", {"max_model_len": "auto"})]
)
def test_a_length_of_auto_is_the_engines_own_choice(
    folder: Path, engine: str, options: object
) -> None:
    for word in ("auto", "-1"):
        resolved = settle(folder, f"option.rolling_batch={engine}\noption.max_model_len={word}")
        assert (resolved.config.engine.max_sequence_length, resolved.config.engine.options) == (
            None,
            options,
        )


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("engine", ["lmi-dist", "vllm"])
def test_what_an_executor_offers_is_an_option_of_every_engine(folder: Path, engine: str) -> None:
    text = "option.request_stats_max_iterations=5\noption.max_beam_width=3\noption.strict=true"
    resolved = settle(folder, f"option.rolling_batch={engine}\n{text}")
    assert (resolved.config.engine.options, resolved.warnings) == ({}, ())
    assert resolved.config.engine.request_stats_max_iterations == 5
    assert resolved.config.engine.max_beam_width == 3


def test_outputs_and_post_processors_are_declared_by_name(folder: Path) -> None:
    text = (
        "option.additional_outputs=logits; "
        "hidden_states.3:context\noption.logits_post_processors=mine.py"
    )
    engine = settle(folder, text).config.engine
    assert (engine.additional_outputs, engine.logits_post_processors) == (
        ("logits", "hidden_states.3:context"),
        "mine.py",
    )


@pytest.mark.usefixtures("vllm")
def test_vllm_refuses_outputs_and_post_processors(folder: Path) -> None:
    text = "option.additional_outputs=logits\noption.logits_post_processors=mine.py"
    first, second = faults(folder, f"option.rolling_batch=vllm\n{text}")
    assert first.startswith(
        "option.additional_outputs='logits' (serving.properties:2): allowed is nothing on vllm"
    )
    assert second.startswith(
        "option.logits_post_processors='mine.py' (serving.properties:3): allowed is nothing on vllm"
    )


def test_the_beam_width_fits_the_sequences_that_run_at_once(folder: Path) -> None:
    assert settle(folder).config.engine.max_beam_width == 8
    resolved = settle(folder, "option.max_rolling_batch_size=4")
    assert resolved.config.engine.max_beam_width == 4
    assert source_of(resolved, "option.max_beam_width") == "option.max_rolling_batch_size"
    (fault,) = faults(folder, "option.max_rolling_batch_size=4\noption.max_beam_width=5")
    assert (
        fault == "option.max_beam_width='5' (serving.properties:2): allowed is at most "
        "option.max_rolling_batch_size, 4"
    )


@pytest.mark.usefixtures("vllm")
def test_prefix_caching_is_an_option_of_every_engine(folder: Path) -> None:
    for engine in ("lmi-dist", "vllm", "echo"):
        resolved = settle(
            folder, f"option.rolling_batch={engine}\noption.enable_prefix_caching=false"
        )
        assert resolved.config.engine.enable_prefix_caching is False and resolved.warnings == ()
        assert resolved.config.engine.options == {}, "it has a field"
        assert (
            settle(folder, f"option.rolling_batch={engine}").config.engine.enable_prefix_caching
            is None
        )


def test_what_only_the_embedded_engine_does_is_told_on_another(folder: Path) -> None:
    text = "option.max_step_ms=12.5\noption.speculative=NGRAM"
    resolved = settle(folder, f"option.rolling_batch=lmi-dist\n{text}")

    assert (resolved.config.engine.max_step_ms, resolved.config.engine.speculative) == (
        12.5,
        "ngram",
    )
    assert resolved.warnings == ()
    assert settle(folder, f"option.rolling_batch=echo\n{text}").warnings == (
        "option.max_step_ms (serving.properties:2): has an effect on lmi-dist alone, "
        "option.max_rolling_batch_prefill_tokens bounds a step",
        (
            "option.speculative (serving.properties:3): has an effect on lmi-dist alone, nothing is "  # noqa: E501
            "guessed ahead"
        ),
    )


@pytest.mark.usefixtures("vllm")
def test_drafts_of_the_embedded_engine_on_vllm_are_refused_with_its_own_option(
    folder: Path,
) -> None:
    (fault,) = faults(folder, "option.rolling_batch=vllm\noption.speculative=ngram")
    assert fault == (
        "option.speculative='ngram' (serving.properties:2): allowed is nothing on vllm, whose own "
        "option is "
        'option.speculative_config, as in {"method": "ngram", "num_speculative_tokens": 4, '
        '"prompt_lookup_max": 4}'
    )


def test_a_folder_for_prompts_is_refused_where_no_request_may_find_those_of_another(
    folder: Path,
) -> None:
    stored = "option.rolling_batch=lmi-dist\noption.prefix_cache_dir=/var/lib/prompts"
    assert settle(folder, stored).config.engine.prefix_cache_dir == "/var/lib/prompts"

    (fault,) = faults(folder, f"{stored}\noption.prefix_cache_scope=request")
    assert fault == (
        "option.prefix_cache_dir='/var/lib/prompts' (serving.properties:2): "
        "allowed is none beside option.prefix_cache_scope=request"
    )


def test_a_draft_model_on_the_embedded_engine_is_told_what_needs_none(folder: Path) -> None:
    (warning,) = settle(
        folder, "option.rolling_batch=lmi-dist\noption.speculative_draft_model=small"
    ).warnings
    assert warning.endswith(
        "lmi-dist does not use it, option.speculative=ngram guesses without a second model"
    )


def test_keys_are_shown_nowhere_and_useless_behind_sagemaker(folder: Path) -> None:
    resolved = settle(folder, "option.api_key=sk-one, sk-two", {"SAGEMAKER_BIND_TO_PORT": "8080"})
    assert len(resolved.config.server.api_keys) == 2
    assert "sk-" not in repr(resolved)
    (warning,) = resolved.warnings
    assert warning.startswith("option.api_key: SageMaker passes on neither")
