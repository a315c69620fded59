"""The contract's rules on guided decoding. Prompts and answers are text here, by the tokenizer of
the model.
"""

from __future__ import annotations

import json
import re

import pytest

from lmi.errors import InvalidParameter
from lmi.executor import (
    Executor,
    FinishReason,
    GuidedDecodingParams,
    GuideType,
    Result,
    SamplingConfig,
)
from lmi.text.tokenizer import Tokenizer
from tests.conformance.asking import ask, finish, results, run, several
from tests.conformance.table import needs
from tests.tiny_models import END_ID, tiny_model

# vLLM meets a newer xgrammar.
pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")

PATTERN = "(red|green|blue)-[0-9]{2}"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "ok": {"type": "boolean"}},
    "required": ["kind", "ok"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "yes" | "no" "!"'
SEEDS = range(4)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(str(tiny_model("llama_wide")))


def guided(executor: Executor, kind: GuideType, guide: str | None, seed: int) -> Result:
    return run(
        executor,
        guided_decoding_params=GuidedDecodingParams(kind, guide),
        sampling_config=SamplingConfig(seed=seed if executor.capabilities.seed else None),
        end_id=END_ID,
        max_tokens=64,
    )


def said(tokenizer: Tokenizer, result: Result) -> str:
    """The text of a whole answer."""
    assert result.finish_reasons == [FinishReason.END_ID]
    assert result.output_token_ids[0][-1] == END_ID
    return tokenizer.decode(result.output_token_ids[0][:-1])


@needs("guided_decoding", GuideType.REGEX)
def test_an_answer_matches_its_regex_and_ends(executor: Executor, tokenizer: Tokenizer) -> None:
    texts = [said(tokenizer, guided(executor, GuideType.REGEX, PATTERN, seed)) for seed in SEEDS]
    assert all(re.fullmatch(PATTERN, text) for text in texts), texts


@needs("guided_decoding", GuideType.JSON_SCHEMA)
def test_an_answer_fits_its_json_schema_or_begins_a_value_that_does(
    executor: Executor, tokenizer: Tokenizer
) -> None:
    values = [{"kind": kind, "ok": ok} for kind in ("a", "b") for ok in (True, False)]
    texts = [json.dumps(value, separators=(",", ":")) for value in values]
    for seed in SEEDS:
        result = guided(executor, GuideType.JSON_SCHEMA, json.dumps(SCHEMA), seed)
        text = re.sub(
            r"\s",
            "",
            tokenizer.decode(
                [token_id for token_id in result.output_token_ids[0] if token_id != END_ID]
            ),
        )

        assert any(token_id.startswith(text) for token_id in texts), (
            "it may have spaces without end"
        )
        assert result.finish_reasons == [FinishReason.LENGTH] or text in texts


@needs("guided_decoding", GuideType.JSON)
def test_an_answer_in_json_is_a_value_or_begins_one(
    executor: Executor, tokenizer: Tokenizer
) -> None:
    for seed in SEEDS:
        result = guided(executor, GuideType.JSON, None, seed)
        text = tokenizer.decode(
            [token_id for token_id in result.output_token_ids[0] if token_id != END_ID]
        )
        if result.finish_reasons == [FinishReason.END_ID]:
            json.loads(text)

        assert text.lstrip()[:1] in ("", *'{["-0123456789tfn')


@needs("guided_decoding", GuideType.EBNF_GRAMMAR)
def test_an_answer_follows_its_grammar_and_ends(executor: Executor, tokenizer: Tokenizer) -> None:
    for seed in SEEDS:
        assert said(tokenizer, guided(executor, GuideType.EBNF_GRAMMAR, GRAMMAR, seed)) in (
            "yes",
            "no!",
        )


@needs("guided_decoding", GuideType.REGEX)
@needs("num_return_sequences")
def test_each_sequence_of_a_request_follows_its_guide(
    executor: Executor, tokenizer: Tokenizer
) -> None:
    answers = several(
        executor,
        guided_decoding_params=GuidedDecodingParams(GuideType.REGEX, PATTERN),
        sampling_config=SamplingConfig(
            num_return_sequences=3, seed=5 if executor.capabilities.seed else None
        ),
        end_id=END_ID,
        max_tokens=64,
    )
    assert len(answers) == 3
    assert all(re.fullmatch(PATTERN, said(tokenizer, answer)) for answer in answers)


@needs("guided_decoding", GuideType.EBNF_GRAMMAR)
def test_a_guide_that_cannot_be_read_ends_only_its_request(executor: Executor) -> None:
    wrong = ask(
        guided_decoding_params=GuidedDecodingParams(GuideType.EBNF_GRAMMAR, "root ::= ("),
        end_id=END_ID,
    )
    running = executor.enqueue_request(ask(max_tokens=40))
    try:
        [response] = finish(executor, executor.enqueue_request(wrong))
    except InvalidParameter as error:
        assert error.field == "guided_decoding_params"
    else:
        assert response.has_error() and response.error_msg

    [result] = results(finish(executor, running))
    assert len(result.output_token_ids[0]) == 40


@needs("guided_decoding", GuideType.REGEX)
def test_a_guide_leaves_neighbours_alone(executor: Executor) -> None:
    alone = run(executor, max_tokens=20).output_token_ids
    guide = GuidedDecodingParams(GuideType.REGEX, PATTERN)
    beside = executor.enqueue_request(
        ask(guided_decoding_params=guide, end_id=END_ID, max_tokens=64)
    )
    assert run(executor, max_tokens=20).output_token_ids == alone
    finish(executor, beside)
