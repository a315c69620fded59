"""The form that each field of a request has in TensorRT-LLM's parameters, in both lines."""

from __future__ import annotations

import math
import pickle
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
import torch

from handlers.base.sequence import new_sequences
from lmi.errors import Unsupported
from lmi.executor import (
    AdditionalModelOutput,
    KvCacheRetentionConfig,
    OutputConfig,
    Request,
    SamplingConfig,
    TokenRangeRetentionConfig,
)

VOCAB_SIZE = 320
HIDDEN = AdditionalModelOutput("hidden", gather_context=True)
# Of a request that samples: TensorRT-LLM is greedy without one
SAMPLED = {"temperature": 1.0}


@pytest.fixture
def sampling(line: str) -> Any:
    return import_module("handlers.lmi_trtllm.sampling")


@pytest.fixture
def sampler(line: str, sampling: Any) -> Any:
    submit = import_module("tensorrt_llm").LLM.generate_async
    return sampling.TrtllmSampler(
        import_module("handlers.lmi_trtllm.profile").installed(submit), VOCAB_SIZE
    )


def translated(sampling: Any, sampler: Any, **asked: Any) -> dict[str, Any]:
    """The parameters of a request that differ from the defaults of SamplingParams."""
    [sequence] = new_sequences(
        1, Request(**{"input_token_ids": (1, 2), "max_tokens": 8, **asked}), 512
    )
    params = sampling.sampling_params(sequence, sampler)
    defaults = type(params)()
    return {
        name: value
        for name, value in vars(params).items()
        if name[0] != "_" and value != getattr(defaults, name)
    }


ALWAYS = {
    "end_id": -1,
    "pad_id": 0,
    "max_tokens": 8,
    "include_stop_str_in_output": True,
    "detokenize": False,
}
ALWAYS |= {"add_special_tokens": False}
MAPPED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"sampling_config": SamplingConfig(temperature=0)}, {"top_k": 1}),
    ({"sampling_config": SamplingConfig(top_k=1, top_p=0.5)}, {"top_k": 1}),
    ({"max_tokens": 3, "sampling_config": SamplingConfig(top_k=1)}, {"top_k": 1, "max_tokens": 3}),
    ({}, SAMPLED),
    ({"sampling_config": SamplingConfig(temperature=2)}, {"temperature": 2.0}),
    ({"sampling_config": SamplingConfig(temperature=1e-9)}, {"temperature": 1e-3}),
    ({"sampling_config": SamplingConfig(top_k=7)}, SAMPLED | {"top_k": 7}),
    ({"sampling_config": SamplingConfig(top_k=9999)}, SAMPLED | {"top_k": VOCAB_SIZE}),
    ({"sampling_config": SamplingConfig(top_p=1)}, SAMPLED | {"top_p": 1.0}),
    ({"sampling_config": SamplingConfig(min_tokens=3)}, SAMPLED),
    (
        {"end_id": 3, "sampling_config": SamplingConfig(min_tokens=30)},
        SAMPLED | {"end_id": 3, "min_tokens": 8},
    ),
    ({"end_id": 3}, SAMPLED | {"end_id": 3}),
    ({"end_ids": (5, 4)}, SAMPLED | {"end_id": 4, "stop_token_ids": [5]}),
    ({"end_id": 6, "end_ids": (5,)}, SAMPLED | {"end_id": 6, "stop_token_ids": [5]}),
    ({"stop_words": ((6,), (7, 8))}, SAMPLED | {"stop_token_ids": [6]}),
    ({"end_id": 3, "ignore_eos": True, "stop_words": ((6,),)}, SAMPLED | {"stop_token_ids": [6]}),
    (
        {"end_id": 3, "stop_words": ((6,),), "sampling_config": SamplingConfig(min_tokens=2)},
        SAMPLED | {"end_id": 3, "min_tokens": 2},
    ),
    ({"output_config": OutputConfig(num_top_log_probs=4)}, SAMPLED | {"logprobs": 4}),
    (
        {"sampling_config": SamplingConfig(4, num_return_sequences=2)},
        {"use_beam_search": True, "best_of": 4, "n": 2, "length_penalty": 1.0, "early_stopping": 0},
    ),
    (
        {"sampling_config": SamplingConfig(2, length_penalty=2, early_stopping=1, temperature=0.5)},
        {"use_beam_search": True, "best_of": 2, "n": 2, "length_penalty": 2.0, "early_stopping": 1},
    ),
]


@pytest.mark.parametrize(("asked", "expected"), MAPPED, ids=lambda one: ",".join(one))
def test_a_request_becomes_these_parameters_and_no_others(
    sampling: Any, sampler: Any, asked: dict[str, Any], expected: dict[str, Any]
) -> None:
    params = translated(sampling, sampler, **asked)
    params.pop("seed", None)
    assert params == ALWAYS | expected
    assert {name: type(value) for name, value in params.items()} == {
        name: type(value) for name, value in (ALWAYS | expected).items()
    }


def test_log_probs_of_the_chosen_tokens_are_asked_for_as_each_line_wants_it(
    sampling: Any, sampler: Any, line: str
) -> None:
    params = translated(sampling, sampler, output_config=OutputConfig(True, num_prompt_log_probs=0))
    if line == "main-2025-10":
        assert (params["logprobs"], params["return_context_logits"]) == (1, True), (
            "0 means none, and rows lack tokens"
        )
        assert "prompt_logprobs" not in params
    else:
        assert (params["logprobs"], params["prompt_logprobs"]) == (0, 1)


def test_a_seed_is_folded_and_a_sequence_without_one_gets_a_fresh_one(
    sampling: Any, sampler: Any, line: str
) -> None:
    config = SamplingConfig(seed=2**64 - 1)
    seeds = [
        translated(sampling, sampler, sampling_config=seed_config).get("seed")
        for seed_config in (config, SamplingConfig())
    ]
    if line == "main-2025-10":
        assert seeds == [None, None], "its Torch sampler ignores them"
    else:
        assert seeds[0] == 2**63 - 1 and seeds[1] is not None
        assert translated(sampling, sampler)["seed"] != seeds[1]


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_penalty_that_the_sampler_ignores_is_refused(
    sampling: Any, sampler: Any, line: str, name: str
) -> None:
    request = Request(
        input_token_ids=(1,), max_tokens=1, sampling_config=SamplingConfig(**{name: 1.5})
    )
    neutral = SamplingConfig(repetition_penalty=1, presence_penalty=0, frequency_penalty=0)
    sampling.refuse_rules(
        Request(input_token_ids=(1,), max_tokens=1, sampling_config=neutral), sampler
    )
    if line == "main-2025-10":
        with pytest.raises(
            Unsupported,
            match=f"{name} .*Torch sampler .* option.sampler_type=TRTLLMSampler reads it",
        ):
            sampling.refuse_rules(request, sampler)
    else:
        sampling.refuse_rules(request, sampler)
        assert translated(sampling, sampler, sampling_config=request.sampling_config)[name] == 1.5


def test_the_cpp_sampler_of_the_older_line_takes_every_rule(
    sampling: Any, sampler: Any, line: str
) -> None:
    if not sampler.profile.has_cpp_sampler:
        assert line == "main-2026-08"
        return

    cpp = sampling.TrtllmSampler(sampler.profile, VOCAB_SIZE, is_cpp=True)
    config = SamplingConfig(seed=5, min_p=0.25, presence_penalty=1, no_repeat_ngram_size=2)
    sampling.refuse_rules(Request(input_token_ids=(1,), max_tokens=1, sampling_config=config), cpp)
    params = translated(sampling, cpp, sampling_config=config)
    rules = {"seed": 5, "min_p": 0.25, "presence_penalty": 1.0, "no_repeat_ngram_size": 2}
    assert {name: params[name] for name in rules} == rules


def test_no_two_sequences_share_their_parameters(sampling: Any, sampler: Any) -> None:
    [sequence] = new_sequences(1, Request(input_token_ids=(1, 2), max_tokens=8), 512)
    first, second = (sampling.sampling_params(sequence, sampler) for _ in range(2))
    assert first is not second, "a submit changes them"


def test_biases_and_banned_tokens_become_one_tensor_as_wide_as_the_logits(sampling: Any) -> None:
    request = Request(
        (1,), 4, embedding_bias=((2, 1.5), (5, -3.0), (2, 1.0), (4, 9.0)), bad_words=((4,), (6, 7))
    )
    biases = sampling.embedding_bias(request, 8)

    assert (
        biases is not None
        and biases.dtype == torch.float32
        and biases.shape == (8,)
        and biases.is_cpu
    )
    assert biases.tolist() == [0, 0, 2.5, 0, -math.inf, -3, 0, 0]


def test_a_request_that_changes_no_logit_has_no_bias(sampling: Any) -> None:
    assert sampling.embedding_bias(Request((1,), 4, bad_words=((6, 7),)), 8) is None


def test_a_bias_travels_to_another_process_as_it_is(sampling: Any) -> None:
    biases = sampling.embedding_bias(Request((1,), 4, bad_words=((3,),)), 4)
    assert biases is not None and torch.equal(pickle.loads(pickle.dumps(biases)), biases)


def test_wanted_rows_become_flags_and_names(sampling: Any) -> None:
    assert sampling.row_parameters(Request((1,), 1)) == {
        "return_context_logits": False,
        "return_generation_logits": False,
        "additional_model_outputs": None,
    }

    logits = AdditionalModelOutput("logits", gather_context=True)
    output = OutputConfig(additional_model_outputs=(logits, HIDDEN))

    assert sampling.row_parameters(Request((1,), 1, output_config=output)) == {
        "return_context_logits": True,
        "return_generation_logits": True,
        "additional_model_outputs": ["hidden"],
    }


@pytest.mark.parametrize("name", ["return_generation_logits", "additional_model_outputs"])
def test_rows_do_not_follow_beams_so_they_are_refused_there(sampling: Any, name: str) -> None:
    output = OutputConfig(**{name: True} if name.startswith("return") else {name: (HIDDEN,)})
    sampling.check_beams(Request((1,), 3, output_config=output), 1)
    with pytest.raises(Unsupported, match=f"^{name} is not supported here"):
        sampling.check_beams(
            Request((1,), 3, sampling_config=SamplingConfig(2), output_config=output), 2
        )


def test_ranges_keep_their_bounds_and_durations_become_timedeltas(sampling: Any) -> None:
    ranges = (TokenRangeRetentionConfig(0, 8, 90, 1500), TokenRangeRetentionConfig(8, None, 10))
    retention = sampling.retention(KvCacheRetentionConfig(ranges, 70, 30_000))
    ranges_made = [
        (
            range_config.token_start,
            range_config.token_end,
            range_config.priority,
            range_config.duration_ms,
        )
        for range_config in retention.token_range_retention_configs
    ]

    assert ranges_made == [(0, 8, 90, timedelta(seconds=1.5)), (8, None, 10, None)]
    assert (retention.decode_retention_priority, retention.decode_duration_ms) == (
        70,
        timedelta(seconds=30),
    )


def test_the_defaults_are_those_of_the_contract(sampling: Any) -> None:
    retention = sampling.retention(KvCacheRetentionConfig())
    assert (retention.decode_retention_priority, retention.decode_duration_ms) == (35, None)
    assert list(retention.token_range_retention_configs) == []


def test_overlapping_ranges_do_not_reach_the_engine() -> None:
    with pytest.raises(ValueError, match="must not overlap"):
        KvCacheRetentionConfig((TokenRangeRetentionConfig(0, 8), TokenRangeRetentionConfig(7, 9)))
