"""Every field of the contract on the real engine: its form in vLLM's parameters, and its effect on
an answer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from lmi.apis.openai import schema as openai
from lmi.errors import Unsupported
from lmi.executor import (
    AdditionalModelOutput,
    ErrorKind,
    Executor,
    ExternalDraftTokensConfig,
    FinishReason,
    GuidedDecodingParams,
    GuideType,
    KvCacheRetentionConfig,
    LoraConfig,
    OutputConfig,
    PoolingParams,
    PromptTuningConfig,
    Request,
    SamplingConfig,
)
from lmi.settings.config import EngineConfig, ModelConfig
from tests.conformance.asking import finish, results
from tests.handlers.vllm.asking import CONTEXT_LENGTH, GREEDY, TIE, ask, result, tokens, up_to_a_tie
from tests.tiny_models import END_ID, tiny_model

# Between vLLM and xgrammar
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning"),
]

# As many alternatives as the engine gives
NUM_TOP = 20

# Field -> a value with an effect, and what it changes in vLLM's parameters.
MAPPED: dict[str, tuple[Any, dict[str, Any]]] = {
    "SamplingConfig.top_k": (7, {"top_k": 7}),
    "SamplingConfig.top_p": (0.5, {"top_p": 0.5}),
    "SamplingConfig.min_p": (0.25, {"min_p": 0.25}),
    "SamplingConfig.temperature": (0.5, {"temperature": 0.5}),
    "SamplingConfig.seed": (5, {"seed": 5}),
    "SamplingConfig.min_tokens": (3, {"min_tokens": 3}),
    "SamplingConfig.repetition_penalty": (1.5, {"repetition_penalty": 1.5}),
    "SamplingConfig.presence_penalty": (0.5, {"presence_penalty": 0.5}),
    "SamplingConfig.frequency_penalty": (-0.5, {"frequency_penalty": -0.5}),
    "OutputConfig.return_log_probs": (True, {"logprobs": 0}),
    "OutputConfig.num_top_log_probs": (4, {"logprobs": 4}),
    "OutputConfig.num_prompt_log_probs": (
        2,
        {"prompt_logprobs": 2, "skip_reading_prefix_cache": True},
    ),
    "Request.max_tokens": (9, {"max_tokens": 9}),
    "Request.end_id": (3, {"stop_token_ids": [3]}),
    "Request.end_ids": ((5, 4), {"stop_token_ids": [4, 5]}),
    "Request.stop_words": (((6,), (7, 8)), {"stop_token_ids": [6]}),
    "Request.bad_words": (((6,), (7, 8)), {"_bad_words_token_ids": [[6], [7, 8]]}),
    "Request.embedding_bias": (((6, 1),), {"logit_bias": {6: 1.0}}),
}
# Fields that the executor itself implements, around vLLM; tests/conformance and other tests of this
# folder hold them.
OURS = {
    "SamplingConfig.beam_width",
    "SamplingConfig.num_return_sequences",
    "OutputConfig.exclude_input_from_output",
    "OutputConfig.return_perf_metrics",
    "Request.images",
    "Request.input_token_ids",
    "Request.streaming",
    "Request.sampling_config",
    "Request.output_config",
    # Takes the end ids out of vLLM's stop_token_ids
    "Request.ignore_eos",
    "Request.guided_decoding_params",
    "Request.return_all_generated_tokens",
    "Request.priority",
    "Request.is_express",
    "Request.allotted_time_ms",
    "Request.cache_salt",
    "Request.client_id",
    "Request.num_return_sequences",
}
REFUSED: dict[str, Any] = {
    "SamplingConfig.typical_p": 0.5,
    "SamplingConfig.no_repeat_ngram_size": 2,
    "OutputConfig.return_context_logits": True,
    "OutputConfig.return_generation_logits": True,
    "OutputConfig.return_encoder_output": True,
    "OutputConfig.additional_model_outputs": (AdditionalModelOutput("logits"),),
    "Request.lora_config": LoraConfig("style"),  # without option.enable_lora
    "Request.logits_post_processor_name": "mine",
    "Request.kv_cache_retention_config": KvCacheRetentionConfig(),
    # Of a model that generates
    "Request.pooling_params": PoolingParams(),
    "Request.prompt_tuning_config": PromptTuningConfig([[0.0]]),
    "Request.external_draft_tokens_config": ExternalDraftTokensConfig((5, 6)),
}
# Fields of beams, which have no effect without beams.
WITHOUT_EFFECT: dict[str, Any] = {
    "SamplingConfig.length_penalty": 2.0,
    "SamplingConfig.early_stopping": 1,
}


def with_field(field: str, value: Any) -> Request:
    owner, _, name = field.partition(".")
    if owner == "Request":
        return ask(sampling_config=SamplingConfig(), **{name: value})

    if owner == "SamplingConfig":
        return ask(sampling_config=SamplingConfig(**{name: value}))

    return ask(sampling_config=SamplingConfig(), output_config=OutputConfig(**{name: value}))


def in_words_of_vllm(request: Request) -> dict[str, Any]:
    from handlers.base.sequence import new_sequences
    from handlers.lmi_vllm.translation import sampling_params

    [sequence] = new_sequences(1, request, CONTEXT_LENGTH)
    params = sampling_params(sequence)
    return {name: getattr(params, name) for name in params.__struct_fields__}


def changed(field: str, value: Any) -> dict[str, Any]:
    before = in_words_of_vllm(ask(sampling_config=SamplingConfig()))
    after = in_words_of_vllm(with_field(field, value))
    return {
        name: after[name]
        for name in after
        if after[name] != before[name] and name != "_all_stop_token_ids"
    }


def test_no_field_of_the_contract_is_forgotten() -> None:
    structs = (Request, SamplingConfig, OutputConfig)
    fields = {
        f"{struct.__name__}.{name}" for struct in structs for name in struct.__struct_fields__
    }
    rows = [*MAPPED, *OURS, *REFUSED, *WITHOUT_EFFECT]
    assert sorted(rows) == sorted(fields)


@pytest.mark.parametrize("field", MAPPED)
def test_a_field_becomes_the_parameters_of_vllm_that_mean_it_and_no_other(
    engine: Executor, field: str
) -> None:
    value, expected = MAPPED[field]
    assert changed(field, value) == expected
    for name, sent_value in changed(field, value).items():
        assert type(sent_value) is type(expected[name]), "vLLM dies of a wrong type"


@pytest.mark.parametrize("field", WITHOUT_EFFECT)
def test_a_field_that_asks_for_nothing_here_changes_nothing(engine: Executor, field: str) -> None:
    assert changed(field, WITHOUT_EFFECT[field]) == {}


@pytest.mark.parametrize("field", REFUSED)
def test_what_vllm_cannot_do_is_refused_by_name(engine: Executor, field: str) -> None:
    with pytest.raises(
        Unsupported, match=f"^{field.partition('.')[2]} is not supported here: vllm has"
    ):
        engine.enqueue_request(with_field(field, REFUSED[field]))


@pytest.mark.parametrize("rank", [-(2**19), -3, 0, 1, 2**19])
def test_a_priority_of_vllm_s_api_reaches_vllm_unchanged(rank: int) -> None:
    from handlers.lmi_vllm.translation import priority

    model = ModelConfig(path="demo", name="demo")
    body = json.dumps({"prompt": "a", "priority": rank}).encode()
    parsed_request = openai.parse(openai.read(body, None, model)).request

    assert priority(ask(priority=parsed_request.priority)) == rank
    assert priority(ask(priority=parsed_request.priority, is_express=True)) <= -(2**19)


def test_whole_numbers_become_the_floats_that_vllm_wants(engine: Executor) -> None:
    config = SamplingConfig(
        temperature=1,
        top_p=1,
        min_p=0,
        repetition_penalty=2,
        presence_penalty=1,
        frequency_penalty=-1,
    )
    params = in_words_of_vllm(ask(sampling_config=config))
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ):
        assert type(params[name]) is float


# Against the embedded executor, on the same weights.


@pytest.fixture(scope="module")
def embedded() -> Iterator[Executor]:
    from handlers.lmi_dist import Executor

    config = EngineConfig(dtype="fp32", max_num_sequences=1, max_sequence_length=CONTEXT_LENGTH)
    with Executor(tiny_model("llama_wide"), config) as executor:
        yield executor


# The model's first greedy token after PROMPT
FIRST = 237
RULES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "one bad word": {"bad_words": ((FIRST,),)},
    "a bad word of two tokens": {"bad_words": ((FIRST, 236),)},
    "a bias for a token": {"embedding_bias": ((99, 12.5),)},
    "a bias against a token": {"embedding_bias": ((FIRST, -100),)},
    "a repetition penalty": {
        "sampling_config": SamplingConfig(temperature=0, repetition_penalty=1.7)
    },
    "a presence penalty": {"sampling_config": SamplingConfig(temperature=0, presence_penalty=2)},
    "a frequency penalty": {
        "sampling_config": SamplingConfig(temperature=0, frequency_penalty=1.5)
    },
    "a frequency penalty below 0": {
        "sampling_config": SamplingConfig(temperature=0, frequency_penalty=-2)
    },
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_changes_the_answer_as_it_does_in_the_embedded_executor(
    engine: Executor, embedded: Executor, name: str
) -> None:
    output = OutputConfig(return_log_probs=True, num_top_log_probs=2)
    fields = {"max_tokens": 40, "output_config": output, **RULES[name]}
    expected = result(embedded, **fields)
    got = result(engine, **fields)

    assert (
        expected.top_log_probs is not None
        and got.log_probs is not None
        and expected.log_probs is not None
    )

    sure = up_to_a_tie(expected.output_token_ids[0], expected.top_log_probs[0])
    assert len(sure) > 10, "the reference itself cannot tell"
    assert got.output_token_ids[0][: len(sure)] == sure

    if name == "nothing":
        assert got.log_probs[0][: len(sure)] == pytest.approx(
            expected.log_probs[0][: len(sure)], abs=1e-3
        )
    else:
        assert sure != tokens(engine, max_tokens=40)[: len(sure)], "the rule has no effect"


# Sampling: which tokens may be chosen, by the model's log-probs.


def ranks_and_masses(engine: Executor, **choice: Any) -> Iterator[tuple[int, float, float]]:
    """For each sampled token: its rank, the mass of the likelier tokens, its probability over that
    of the likeliest.
    """
    config = SamplingConfig(seed=11, **choice)
    output = OutputConfig(return_log_probs=True, num_top_log_probs=NUM_TOP)
    sampled = result(engine, sampling_config=config, output_config=output, max_tokens=60)

    assert sampled.top_log_probs is not None and sampled.log_probs is not None

    for token_id, log_prob, top in zip(
        sampled.output_token_ids[0], sampled.log_probs[0], sampled.top_log_probs[0], strict=True
    ):
        better = [
            top_token.log_prob
            for top_token in top
            if top_token.log_prob > log_prob and top_token.token_id != token_id
        ]
        yield len(better), sum(map(math.exp, better)), math.exp(log_prob - top[0].log_prob)


@pytest.mark.parametrize(
    ("choice", "is_kept"),
    [
        ({"top_k": 3}, lambda rank, mass, share: rank < 3),
        ({"top_p": 0.4}, lambda rank, mass, share: mass < 0.4 + TIE),
        ({"min_p": 0.3}, lambda rank, mass, share: share > 0.3 - TIE),
    ],
    ids=["top_k", "top_p", "min_p"],
)
def test_what_a_rule_of_sampling_cuts_off_is_never_chosen(
    engine: Executor, choice: Any, is_kept: Any
) -> None:
    assert all(is_kept(*kept_ranks) for kept_ranks in ranks_and_masses(engine, **choice))
    assert not all(is_kept(*kept_ranks) for kept_ranks in ranks_and_masses(engine)), (
        "without the rule it is"
    )


def test_a_high_temperature_chooses_less_likely_tokens(engine: Executor) -> None:
    hot = [rank for rank, _, _ in ranks_and_masses(engine, temperature=2)]
    cold = [rank for rank, _, _ in ranks_and_masses(engine, temperature=0.2)]
    assert sum(hot) > 3 * sum(cold)


def test_a_seed_gives_its_tokens_beside_any_neighbours_and_no_seed_gives_new_ones(
    engine: Executor,
) -> None:
    config = SamplingConfig(seed=2**63 - 1, temperature=1.5)
    alone = tokens(engine, sampling_config=config)
    crowd = [
        ask(sampling_config=sampling_config)
        for sampling_config in (SamplingConfig(seed=1), config, SamplingConfig())
    ]
    ids = engine.enqueue_requests(crowd)
    [_, [among], _] = engine.await_responses(ids)  # type: ignore[misc]
    assert among.result.output_token_ids[0] == alone  # type: ignore[union-attr]
    fresh = [tokens(engine, sampling_config=SamplingConfig(temperature=1.5)) for _ in range(2)]
    assert fresh[0] != fresh[1]


def test_sequences_of_one_request_differ_and_the_greatest_seed_wraps_around(
    engine: Executor,
) -> None:
    config = SamplingConfig(seed=2**63 - 1, temperature=1.5, num_return_sequences=2)
    answers = results(finish(engine, engine.enqueue_request(ask(sampling_config=config))))
    by_index = {answer.sequence_index: answer.output_token_ids[0] for answer in answers}

    assert by_index[0] == tokens(
        engine, sampling_config=SamplingConfig(seed=2**63 - 1, temperature=1.5)
    )
    assert (
        by_index[1]
        == tokens(engine, sampling_config=SamplingConfig(seed=0, temperature=1.5))
        != by_index[0]
    )


def test_a_seed_over_63_bits_is_folded_and_never_none(engine: Executor) -> None:
    assert (
        in_words_of_vllm(ask(sampling_config=SamplingConfig(seed=2**64 - 1)))["seed"] == 2**63 - 1
    )
    greatest = tokens(engine, sampling_config=SamplingConfig(seed=2**64 - 1, temperature=1.5))
    assert greatest == tokens(
        engine, sampling_config=SamplingConfig(seed=2**63 - 1, temperature=1.5)
    )


# Guided decoding.

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
SENTENCE = 'root ::= "select " name " from " name\nname ::= [a-z] | "table"'


@pytest.fixture(scope="module")
def words() -> Any:
    """A function from token ids to their text, without the end token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama_wide"))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def whitespace_ids(words: Any) -> tuple[tuple[int, ...], ...]:
    """A random model fills JSON with blanks, which JSON allows."""
    return tuple(
        (token_id,) for token_id in range(END_ID + 1, 320) if not words([token_id]).strip()
    )


@pytest.mark.parametrize(
    ("guide", "is_satisfied"),
    [
        (GuidedDecodingParams(GuideType.JSON), lambda text: isinstance(json.loads(text), dict)),
        (
            GuidedDecodingParams(GuideType.JSON_SCHEMA, json.dumps(SCHEMA)),
            lambda text: (
                json.loads(text)["name"] in ("ann", "bob") and type(json.loads(text)["old"]) is bool
            ),
        ),
        (
            GuidedDecodingParams(GuideType.REGEX, "[a-c]{3,5}-(yes|no)"),
            lambda text: re.fullmatch("[a-c]{3,5}-(yes|no)", text),
        ),
        (
            GuidedDecodingParams(GuideType.EBNF_GRAMMAR, SENTENCE),
            lambda text: re.fullmatch("select ([a-z]|table) from ([a-z]|table)", text),
        ),
    ],
    ids=[kind.name for kind in GuideType],
)
@pytest.mark.parametrize("config", [GREEDY, SamplingConfig(seed=3)], ids=["greedy", "sampled"])
def test_a_guided_answer_has_the_structure_and_ends_by_itself(
    engine: Executor,
    words: Any,
    guide: GuidedDecodingParams,
    is_satisfied: Any,
    config: SamplingConfig,
) -> None:
    guided = result(
        engine,
        guided_decoding_params=guide,
        sampling_config=config,
        end_id=END_ID,
        max_tokens=300,
        bad_words=whitespace_ids(words) if "JSON" in guide.guide_type.name else (),
        embedding_bias=tuple(
            (token_id, 8.0) for token_id in range(320) if words([token_id]) in ('"', "}")
        ),
    )

    assert guided.finish_reasons == [FinishReason.END_ID]
    assert is_satisfied(words(guided.output_token_ids[0])), words(guided.output_token_ids[0])


# Larger than the compiler takes
@pytest.mark.parametrize(
    "guide",
    [
        GuidedDecodingParams(GuideType.JSON_SCHEMA, '{"type":'),
        GuidedDecodingParams(GuideType.JSON_SCHEMA, '{"type": "nothing"}'),
        # No text has this structure
        GuidedDecodingParams(GuideType.JSON_SCHEMA, '{"$ref": "#"}'),
        GuidedDecodingParams(GuideType.JSON_SCHEMA, "[" * 5000),
        GuidedDecodingParams(GuideType.REGEX, "[a-"),
        GuidedDecodingParams(GuideType.REGEX, r"\p{L}{1,500}" * 20),
        GuidedDecodingParams(GuideType.EBNF_GRAMMAR, "root = a"),
        GuidedDecodingParams(GuideType.EBNF_GRAMMAR, "root ::= missing"),
    ],
    ids=lambda guide: f"{guide.guide_type.name} {guide.guide[:20]}",
)
def test_a_broken_structure_fails_alone(engine: Executor, guide: GuidedDecodingParams) -> None:
    before = tokens(engine)
    ids = engine.enqueue_requests([ask(), ask(guided_decoding_params=guide), ask()])
    [[first], [middle], [right]] = engine.await_responses(ids)  # type: ignore[misc]
    assert middle.error is not None and middle.error.kind is ErrorKind.INVALID
    assert middle.error_msg.startswith(
        "guided_decoding_params must be a structure that vLLM can follow: "
    )
    assert "\n" not in middle.error_msg and ".cc:" not in middle.error_msg
    assert first.result.output_token_ids == right.result.output_token_ids == [before]  # type: ignore[union-attr]
    assert tokens(engine) == before
