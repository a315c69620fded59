"""What a version of TensorRT-LLM has: whole versions decide, and the signature that is there."""

from __future__ import annotations

from importlib import import_module

import pytest

from handlers.lmi_trtllm.profile import of_version
from lmi.errors import Unsupported
from lmi.executor import OutputConfig, SamplingConfig
from tests.conformance.asking import ask, run
from tests.handlers.trtllm.asking import start, tokens
from tests.handlers.trtllm.double import double, knobs, loaded

# Before a submit took a priority
CANDIDATE = "1.3.0rc5"


@pytest.mark.parametrize(
    ("version", "has_cpp_sampler", "has_cpp_beams"),
    [
        ("1.2.0rc6.post3", True, True),
        ("1.2.1", True, True),
        ("1.3.0rc0", True, False),
        ("1.3.0rc9", True, False),
        ("1.3.0rc15.post1", True, False),
        ("1.3.0rc26", False, False),
        ("1.3.0", False, False),
        ("1.4.0rc1", False, False),
        ("1.10.0", False, False),
    ],
)
def test_candidates_of_a_release_count_by_their_number(
    version: str, has_cpp_sampler: bool, has_cpp_beams: bool
) -> None:
    profile = of_version(version, takes_priority=True)
    assert (profile.has_cpp_sampler, profile.has_cpp_beams) == (has_cpp_sampler, has_cpp_beams)


def test_a_text_that_is_no_version_is_named() -> None:
    with pytest.raises(ValueError, match="'main' is no version of TensorRT-LLM"):
        of_version("main", takes_priority=True)


@pytest.mark.parametrize(
    ("line", "has_it"), [("main-2025-10", False), (CANDIDATE, False), ("main-2026-08", True)]
)
def test_the_signature_of_a_submit_says_whether_it_takes_a_priority(
    line: str, has_it: bool
) -> None:
    with loaded(line):
        profile = import_module("handlers.lmi_trtllm.profile")
        assert (
            profile.installed(import_module("tensorrt_llm").LLM.generate_async).takes_priority
            is has_it
        )


def test_a_candidate_between_the_facts_starts_and_refuses_what_its_sampler_would_ignore() -> None:
    with double(CANDIDATE) as executor_class, start(executor_class) as executor:
        can = executor.info.capabilities
        assert (can.priority, can.seed, can.min_p, can.no_repeat_ngram_size) == (False,) * 4

        with pytest.raises(
            Unsupported,
            match="sampler of TensorRT-LLM 1.3.0rc5 ignores it; option.sampler_type=TRTLLM",
        ):
            executor.enqueue_request(ask(sampling_config=SamplingConfig(repetition_penalty=1.3)))

        answer = run(executor, output_config=OutputConfig(True, num_prompt_log_probs=0))
        assert len(answer.output_token_ids[0]) == 8 and len((answer.log_probs or [[]])[0]) == 8


@pytest.mark.parametrize(("line", "has_rules"), [("main-2025-10", True), (CANDIDATE, False)])
def test_the_sampler_that_searches_beams_where_nobody_chose_one_is_counted(
    line: str, has_rules: bool
) -> None:
    with double(line) as executor_class, start(executor_class, max_beam_width=3) as executor:
        assert executor.info.capabilities.no_repeat_ngram_size is has_rules
        answer = run(executor, sampling_config=SamplingConfig(3), output_config=OutputConfig(True))
        assert len(answer.output_token_ids) == 3


def test_the_cpp_sampler_of_a_candidate_is_read_where_it_is_chosen() -> None:
    with (
        double(CANDIDATE) as executor_class,
        start(executor_class, sampler_type="TRTLLMSampler") as executor,
    ):
        assert executor.info.capabilities.seed
        with knobs(tokens_per_step=2):
            assert len(tokens(executor)) == 8
