"""Structures are checked within limits before vLLM gets them, and no step waits for that."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lmi.executor import ErrorKind, Executor, GuidedDecodingParams, GuideType, SamplingConfig
from tests.handlers.vllm.asking import ask, finals, result, tokens
from tests.tiny_models import END_ID

# Between vLLM and xgrammar
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning"),
]

PATTERNS = [{"type": "string", "pattern": f"[a-z]{{1,{20 + number}}}x"} for number in range(60)]
EXPLODING = GuidedDecodingParams(GuideType.JSON_SCHEMA, json.dumps({"allOf": PATTERNS}))
LARK = 'start: "yes" | "no"'


def guided(kind: GuideType, guide: str, **fields: Any) -> dict[str, Any]:
    return {"guided_decoding_params": GuidedDecodingParams(kind, guide), "end_id": END_ID, **fields}


def test_a_structure_that_explodes_is_refused_and_no_step_waits_for_it(engine: Executor) -> None:
    answer = result(engine, **guided(GuideType.REGEX, "[ab]{3}"))  # starts the process
    assert len(answer.output_token_ids[0]) > 1

    request_id = engine.enqueue_request(ask(guided_decoding_params=EXPLODING))
    for _ in range(3):
        assert len(tokens(engine)) == 16

    assert engine.get_num_responses_ready(request_id) == 0, (
        "it must explode for longer than the others took"
    )

    refused = finals(engine, [request_id])[request_id]
    assert refused.error is not None and refused.error.kind is ErrorKind.INVALID
    assert "to compile it takes more than" in refused.error_msg


@pytest.mark.parametrize(
    ("kind", "guide"),
    [
        (GuideType.EBNF_GRAMMAR, LARK),
        (
            GuideType.JSON_SCHEMA,
            json.dumps({"type": "integer", "multipleOf": 5, "minimum": 5, "maximum": 9}),
        ),
        (GuideType.JSON_SCHEMA, json.dumps({"type": "string", "not": {"const": "a"}})),
    ],
)
def test_what_only_one_of_vllm_s_backends_reads_is_followed_as_before(
    engine: Executor, kind: GuideType, guide: str
) -> None:
    """lmi's own engine refuses some of it."""
    fields = guided(kind, guide, sampling_config=SamplingConfig(seed=3))
    assert result(engine, **fields).output_token_ids[0]


def test_a_request_that_leaves_while_its_structure_is_checked_ends_at_once(
    engine: Executor,
) -> None:
    second_guide = GuidedDecodingParams(
        GuideType.JSON_SCHEMA, json.dumps({"allOf": PATTERNS, "title": "other"})
    )
    request_id = engine.enqueue_request(ask(guided_decoding_params=second_guide))
    engine.cancel_request(request_id)
    assert finals(engine, [request_id])[request_id].is_final
    assert len(tokens(engine)) == 16
