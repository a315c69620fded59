"""Structures for TensorRT-LLM: which backend has which kind, and the check that each passes before
it is submitted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from handlers.base.sequence import Sequence, new_sequences
from handlers.guides.process import Start
from handlers.lmi_trtllm.profile import of_version
from lmi.errors import InvalidRequest, Unsupported
from lmi.executor import GuidedDecodingParams, GuideType, Request, SamplingConfig
from lmi.settings.config import EngineConfig
from tests.handlers.trtllm.double import loaded
from tests.tiny_models import END_ID, VOCAB_SIZE, tiny_model

FIELD = "guided_decoding_params"
NAME = GuidedDecodingParams(
    GuideType.JSON_SCHEMA, '{"type": "object", "properties": {"name": {"type": "string"}}}'
)
GOOD = [
    GuidedDecodingParams(GuideType.JSON),
    NAME,
    GuidedDecodingParams(GuideType.REGEX, "[a-c]{2,4}"),
    GuidedDecodingParams(GuideType.EBNF_GRAMMAR, 'root ::= "yes" | "no"'),
]
BAD = [
    GuidedDecodingParams(GuideType.JSON_SCHEMA, '{"type": 4}'),
    GuidedDecodingParams(GuideType.JSON_SCHEMA, "{"),
    GuidedDecodingParams(GuideType.JSON_SCHEMA, '{"not": {"multipleOf": 2}}'),
    GuidedDecodingParams(GuideType.REGEX, "(a"),
    GuidedDecodingParams(GuideType.EBNF_GRAMMAR, "root ::= other"),
]


@pytest.fixture(scope="module", params=["main-2025-10", "main-2026-08"])
def executor(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The module, over one line of the package."""
    with loaded(request.param):
        from handlers.lmi_trtllm import executor

        yield executor


@pytest.fixture(scope="module")
def sampling(executor: Any) -> Any:
    return import_module("handlers.lmi_trtllm.sampling")


def new_checks(executor: Any) -> Any:
    return executor.GuideChecks(str(tiny_model("llama")), Start(VOCAB_SIZE), lambda: None)


@pytest.fixture(scope="module")
def checks(executor: Any) -> Iterator[Any]:
    checks = new_checks(executor)
    yield checks
    checks.close()


def sequence_of(params: GuidedDecodingParams, **fields: Any) -> Sequence:
    [sequence] = new_sequences(1, Request((1,), 8, guided_decoding_params=params, **fields), 100)
    return sequence


def options(**given: str) -> EngineConfig:
    return EngineConfig(options=given)


def test_each_backend_has_its_kinds_and_a_grammar_of_llguidance_is_another_language(
    executor: Any,
) -> None:
    model = str(tiny_model("llama"))
    assert executor.guide_support(options(), model) == (tuple(GuideType), "")
    assert executor.guide_support(options(guided_decoding_backend="xgrammar"), model) == (
        tuple(GuideType),
        "",
    )
    assert executor.guide_support(options(guided_decoding_backend="llguidance"), model) == (
        (GuideType.JSON, GuideType.JSON_SCHEMA, GuideType.REGEX),
        "",
    )


def test_with_another_backend_without_a_tokenizer_or_its_file_there_are_no_guides_and_a_reason(
    executor: Any, tmp_path: Path
) -> None:
    model = str(tiny_model("llama"))
    skipped = options(guided_decoding_backend="xgrammar", skip_tokenizer_init="true")

    assert executor.guide_support(options(guided_decoding_backend="outlines"), model) == (
        (),
        "option.guided_decoding_backend=outlines is neither xgrammar nor llguidance",
    )
    assert executor.guide_support(skipped, model) == ((), executor.NO_TEXTS)
    assert executor.guide_support(options(guided_decoding_backend="xgrammar"), str(tmp_path)) == (
        (),
        "the model's folder has no tokenizer.json",
    )


def test_each_kind_has_its_own_field_and_json_is_one_object(sampling: Any) -> None:
    fields = [
        (guide.json, guide.regex, guide.grammar, guide.json_object)
        for guide in map(sampling.guided, GOOD)
    ]
    assert fields == [
        ('{"type": "object"}', None, None, False),
        (NAME.guide, None, None, False),
        (None, "[a-c]{2,4}", None, False),
        (None, None, 'root ::= "yes" | "no"', False),
    ]
    assert sampling.guided(None) is None


@pytest.mark.parametrize(
    "fields", [{"ignore_eos": True}, {"sampling_config": SamplingConfig(min_tokens=2)}], ids=str
)
def test_what_goes_on_behind_the_end_of_a_structure_is_refused(
    sampling: Any, fields: dict[str, Any]
) -> None:
    [name] = {"ignore_eos", "min_tokens"} & {
        *fields,
        *(["min_tokens"] if "sampling_config" in fields else []),
    }
    sampler = sampling.TrtllmSampler(of_version("1.3.0", takes_priority=True), VOCAB_SIZE)
    sampling.refuse_rules(Request((1,), 8, **fields), sampler)
    sampling.refuse_rules(Request((1,), 8, guided_decoding_params=NAME), sampler)
    with pytest.raises(Unsupported, match=f"^{name} is not supported here: TensorRT-LLM"):
        sampling.refuse_rules(Request((1,), 8, guided_decoding_params=NAME, **fields), sampler)


def test_the_tokenizers_end_token_ends_a_sequence_with_a_structure(checks: Any) -> None:
    sequence = sequence_of(NAME, end_ids=(9,))
    checks.equip(sequence, None)
    assert sequence.end_ids == {9, END_ID}


def test_good_structures_pass_and_bad_ones_name_the_field(checks: Any) -> None:
    errors = [checks.begin(sequence_of(params)).exception() for params in [*GOOD, *BAD]]
    assert errors[: len(GOOD)] == [None] * len(GOOD)
    assert [(type(error), error.field) for error in errors[len(GOOD) :]] == [
        (InvalidRequest, FIELD)
    ] * len(BAD)
    assert all(
        "must be a structure that lmi can follow: " in str(error) for error in errors[len(GOOD) :]
    )


def test_a_compiler_that_does_not_start_is_started_again(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = new_checks(executor)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(FileNotFoundError, match="/nowhere/python"):
            checks.begin(sequence_of(NAME)).result()

    # A second attempt may end otherwise
    checks.begin(sequence_of(NAME)).result()
    checks.close()
