"""One model on two ranks as a library: what the contract's examples ask for, as far as
vLLM has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import msgspec
import pytest

from lmi.executor import (
    Executor,
    FinishReason,
    GuidedDecodingParams,
    GuideType,
    OutputConfig,
    Request,
    Response,
    SamplingConfig,
)
from lmi.settings.config import EngineConfig
from tests.beam_reference import Comparison, Found, transformers_beams
from tests.tiny_models import END_ID, tiny_model

# Between vLLM and xgrammar
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning"),
]

PROMPT = (11, 12, 13, 14, 15)
TIMEOUT_S = 120.0
FAMILY = "llama_wide"


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Executor]:
    from handlers.lmi_vllm import Executor as VllmExecutor

    config = EngineConfig(
        dtype="fp32", max_num_sequences=4, max_kv_cache_tokens=8192, tensor_parallel_degree=2
    )
    with VllmExecutor(tiny_model(FAMILY), config) as executor:
        yield executor


def all_of(executor: Executor, request_id: int) -> list[Response]:
    got: list[Response] = []
    while not got or not got[-1].is_final:
        batch = executor.await_responses(request_id, TIMEOUT_S)
        assert batch, "the request has no end"
        got += batch  # type: ignore[arg-type]

    return got


def test_two_ranks_answer_three_sequences_each_with_its_own_end(two_ranks: Executor) -> None:
    sampling = SamplingConfig(temperature=1.0, seed=7, num_return_sequences=3)
    request_id = two_ranks.enqueue_request(Request(PROMPT, 12, True, sampling))
    results = [result.get_result() for result in all_of(two_ranks, request_id)]

    assert {result.sequence_index for result in results} == {0, 1, 2}
    assert sum(result.is_sequence_final for result in results) == 3
    assert [result.is_final for result in results] == [False] * (len(results) - 1) + [True]

    tokens = [
        [
            token
            for result in results
            if result.sequence_index == index
            for token in result.output_token_ids[0]
        ]
        for index in range(3)
    ]

    assert [len(result) for result in tokens] == [12] * 3 and tokens[0] != tokens[1]


def test_two_ranks_search_with_beams_of_two_widths_as_transformers_does(
    two_ranks: Executor,
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(FAMILY)).eval()
    output = OutputConfig(return_log_probs=True)
    requests = [Request(PROMPT, 10, False, SamplingConfig(width), output) for width in (2, 4, 2)]
    requests = [
        msgspec.structs.replace(
            beam_request, num_return_sequences=beam_request.sampling_config.beam_width
        )
        for beam_request in requests
    ]
    comparison = Comparison()
    for request_id, request in zip(two_ranks.enqueue_requests(requests), requests, strict=True):
        [response] = all_of(two_ranks, request_id)
        result = response.get_result()

        assert (
            result.cum_log_probs is not None
            and result.is_sequence_final
            and result.sequence_index == 0
        )

        scores = [
            total / len(beam)
            for total, beam in zip(result.cum_log_probs, result.output_token_ids, strict=True)
        ]
        comparison.check(
            str(request), Found(result.output_token_ids, scores), transformers_beams(model, request)
        )


@pytest.mark.parametrize(
    ("kind", "guide", "pattern"),
    [
        (GuideType.JSON, None, None),
        (GuideType.JSON_SCHEMA, json.dumps({"type": "boolean"}), "true|false"),
        (GuideType.REGEX, "[abc]{3}", "[abc]{3}"),
        (GuideType.EBNF_GRAMMAR, 'root ::= "yes" | "no"', "yes|no"),
    ],
)
def test_two_ranks_follow_a_guide_of_each_kind(
    two_ranks: Executor, kind: GuideType, guide: str | None, pattern: str | None
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model(FAMILY))
    params = GuidedDecodingParams(kind, guide)
    sampling = SamplingConfig(temperature=1.0, seed=3)
    request = Request(PROMPT, 400, False, sampling, guided_decoding_params=params, end_id=END_ID)
    [response] = all_of(two_ranks, two_ranks.enqueue_request(request))
    result = response.get_result()
    text = tokenizer.decode(result.output_token_ids[0], skip_special_tokens=True)
    if pattern is not None:
        assert re.fullmatch(pattern, text.strip()), text
    elif result.finish_reasons == [FinishReason.END_ID]:
        assert isinstance(json.loads(text), dict | list)


def test_two_ranks_count_their_work(two_ranks: Executor) -> None:
    two_ranks.get_latest_iteration_stats()
    all_of(two_ranks, two_ranks.enqueue_request(Request(PROMPT, 6, False, SamplingConfig(3))))
    steps = two_ranks.get_latest_iteration_stats()
    assert sum(step.num_context_tokens for step in steps) == len(PROMPT)
    assert sum(step.num_generation_tokens for step in steps) == 5 * 3
    assert sum(step.num_completed_requests for step in steps) == 1
