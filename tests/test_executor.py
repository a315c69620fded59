"""The types of the contract: each rule of a Request and of its parts, broken one at a time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import lmi.executor
from lmi.executor import (
    AdditionalModelOutput,
    ErrorKind,
    GuidedDecodingParams,
    GuideType,
    KvCacheRetentionConfig,
    OutputConfig,
    Request,
    RequestPerfMetrics,
    Response,
    ResponseError,
    Result,
    SamplingConfig,
    TokenRangeRetentionConfig,
)


@pytest.mark.parametrize(
    ("field", "given", "rule"),
    [
        ("beam_width", 0, "at least 1"),
        ("beam_width", 1.5, "an integer"),
        ("beam_width", True, "an integer"),
        ("beam_width", 10**6, "at most 512"),
        ("num_return_sequences", 0, "at least 1"),
        ("num_return_sequences", 513, "at most 512"),
        ("top_k", -1, "at least 0"),
        ("top_p", 0.0, "over 0 and at most 1"),
        ("top_p", 1.01, "over 0 and at most 1"),
        ("top_p", "0.5", "a finite number"),
        ("typical_p", 0, "over 0 and at most 1"),
        ("typical_p", 1.5, "over 0 and at most 1"),
        ("min_p", -0.1, "at least 0 and at most 1"),
        ("min_p", 1.1, "at least 0 and at most 1"),
        ("temperature", -0.5, "at least 0 and at most 100"),
        ("temperature", 101, "at least 0 and at most 100"),
        ("temperature", float("nan"), "a finite number"),
        ("temperature", float("inf"), "a finite number"),
        ("seed", -1, "from 0 to 18446744073709551615"),
        ("seed", 2**64, "an integer of at most 64 bits"),
        ("min_tokens", -1, "at least 0"),
        ("repetition_penalty", 0.0, "at least 0.01 and at most 100"),
        ("repetition_penalty", 1e30, "at least 0.01 and at most 100"),
        ("presence_penalty", float("inf"), "a finite number"),
        ("presence_penalty", -2.1, "at least -2 and at most 2"),
        ("frequency_penalty", 2.1, "at least -2 and at most 2"),
        ("frequency_penalty", float("nan"), "a finite number"),
        ("length_penalty", -1.0, "at least 0"),
        ("early_stopping", -1, "at least 0"),
        ("no_repeat_ngram_size", -2, "at least 0"),
    ],
)
def test_a_broken_sampling_rule_names_field_rule_and_value(
    field: str, given: Any, rule: str
) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingConfig(**{field: given})

    assert str(caught.value) == f"{field} must be {rule}, given {given!r}"


def test_more_sequences_than_beams_are_refused_only_with_beams() -> None:
    SamplingConfig(num_return_sequences=3)
    with pytest.raises(
        ValueError, match=r"^num_return_sequences must be at most beam_width \(2\), given 3$"
    ):
        SamplingConfig(beam_width=2, num_return_sequences=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_token_ids": ()}, "input_token_ids must not be empty"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, given 0"),
        ({"priority": 1.5}, "priority must be at least 0 and at most 1, given 1.5"),
        ({"priority": -0.5}, "priority must be at least 0 and at most 1, given -0.5"),
        ({"allotted_time_ms": 0}, "allotted_time_ms must be at least 1, given 0"),
        ({"num_return_sequences": 0}, "num_return_sequences must be at least 1, given 0"),
        (
            {"num_return_sequences": 3, "sampling_config": SamplingConfig(2)},
            "num_return_sequences must be at most beam_width (2), given 3",
        ),
        ({"stop_words": ((1,), ())}, "stop_words must not hold an empty word"),
        ({"bad_words": ((),)}, "bad_words must not hold an empty word"),
        (
            {"embedding_bias": ((1, float("inf")),)},
            "embedding_bias must be finite in float32, given inf",
        ),
        (
            {"embedding_bias": ((1, 0.5), (2, -1e308))},
            "embedding_bias must be finite in float32, given -1e+308",
        ),
        (
            {"num_return_sequences": 10**6},
            "num_return_sequences must be at most 512, given 1000000",
        ),
        ({"cache_salt": ""}, "cache_salt must not be empty"),
        (
            {
                "guided_decoding_params": GuidedDecodingParams(GuideType.JSON),
                "sampling_config": SamplingConfig(beam_width=2),
            },
            "guided_decoding_params must not be combined with beam_width over 1",
        ),
    ],
)
def test_a_broken_request_rule_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Request(**{"input_token_ids": (1,), "max_tokens": 1, **fields})

    assert str(caught.value) == message


def test_a_search_returns_all_its_beams_unless_it_is_told_fewer() -> None:
    assert SamplingConfig(4).num_return_sequences == 4
    assert SamplingConfig(4, num_return_sequences=2).num_return_sequences == 2
    assert SamplingConfig().num_return_sequences == 1
    fewer = Request((1,), 1, sampling_config=SamplingConfig(4), num_return_sequences=2)
    assert fewer.sampling_config.num_return_sequences == 2


def test_the_number_of_sequences_stands_on_the_request_or_on_its_sampling() -> None:
    fields = {"input_token_ids": (1,), "max_tokens": 1}
    assert Request(**fields, num_return_sequences=3).sampling_config == SamplingConfig(
        num_return_sequences=3
    )

    alike = Request(
        **fields, num_return_sequences=3, sampling_config=SamplingConfig(num_return_sequences=3)
    )

    assert alike.sampling_config.num_return_sequences == 3
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(alike), type=Request) == alike

    for num in (2, 1):
        with pytest.raises(ValueError) as caught:
            Request(
                **fields,
                num_return_sequences=num,
                sampling_config=SamplingConfig(num_return_sequences=3),
            )

        reason = f"given {num} and sampling_config.num_return_sequences=3"
        assert (
            str(caught.value) == f"num_return_sequences must be given once or twice alike, {reason}"
        )


@pytest.mark.parametrize("field", ["num_top_log_probs", "num_prompt_log_probs"])
def test_a_negative_count_of_log_probs_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be at least 0, given -1$"):
        OutputConfig(**{field: -1})


@pytest.mark.parametrize("kind", [GuideType.JSON_SCHEMA, GuideType.REGEX, GuideType.EBNF_GRAMMAR])
def test_every_guide_but_json_needs_its_text(kind: GuideType) -> None:
    GuidedDecodingParams(GuideType.JSON)
    GuidedDecodingParams(kind, "x")
    with pytest.raises(ValueError, match=f"^guide must be given for {kind.name}$"):
        GuidedDecodingParams(kind)


@pytest.mark.parametrize(
    ("config", "is_greedy"),
    [
        (SamplingConfig(), False),
        (SamplingConfig(temperature=0), True),
        (SamplingConfig(top_k=1, temperature=2.0), True),
        (SamplingConfig(top_k=0), False),
        (SamplingConfig(seed=3), False),
    ],
)
def test_greedy_is_temperature_0_or_top_k_1_and_nothing_else(
    config: SamplingConfig, is_greedy: bool
) -> None:
    assert config.is_greedy is is_greedy


def test_a_request_survives_the_wire() -> None:
    request = Request(
        input_token_ids=(1, 2),
        max_tokens=3,
        end_ids=(4, 5),
        stop_words=((6, 7),),
        embedding_bias=((8, -1.5),),
        sampling_config=SamplingConfig(typical_p=0.5, seed=2**64 - 1),
        output_config=OutputConfig(num_prompt_log_probs=0),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request


def test_the_times_of_a_request_survive_the_wire() -> None:
    times = RequestPerfMetrics(arrival_time=1.5, first_scheduled_time=2.0, num_reused_tokens=3)
    result = Result([[2]], is_final=True, request_perf_metrics=times)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=Result) == result


def test_a_broken_request_on_the_wire_is_a_validation_error() -> None:
    wire = msgspec.msgpack.encode({"input_token_ids": [1], "max_tokens": 0})
    with pytest.raises(msgspec.ValidationError, match="max_tokens must be at least 1, given 0"):
        msgspec.msgpack.decode(wire, type=Request)


def test_an_error_is_always_final_and_a_result_when_it_says_so() -> None:
    error = Response(1, error=ResponseError("broken", ErrorKind.OUT_OF_MEMORY))
    assert (error.is_final, error.has_error(), error.error_msg) == (True, True, "broken")
    open_result = Response(1, result=Result([[2]]))
    last_result = Response(1, result=Result([[2]], is_final=True))
    assert (open_result.is_final, last_result.is_final, last_result.has_error()) == (
        False,
        True,
        False,
    )
    assert last_result.error_msg == ""


def test_an_error_names_its_field_first_and_can_be_sent_whatever_bytes_a_file_name_has() -> None:
    error = ResponseError("must not be \udcff.json", ErrorKind.INVALID, "guide")
    response = msgspec.msgpack.decode(
        msgspec.msgpack.encode(Response(1, error=error)), type=Response
    )
    assert (response.error, response.error_msg) == (error, "guide must not be ?.json")


def test_structs_take_the_positional_arguments_of_upstream() -> None:
    output = OutputConfig(
        False, False, False, True, False, False, (AdditionalModelOutput("logits"),)
    )
    request = Request((1, 2), 4, True, SamplingConfig(2), output, end_id=3)

    assert (request.max_tokens, request.streaming, request.sampling_config.beam_width) == (
        4,
        True,
        2,
    )
    assert request.output_config.additional_model_outputs[0].name == "logits"

    with pytest.raises(TypeError):
        Request((1, 2), 4, True, SamplingConfig(2), output, 3)  # type: ignore[misc]


def test_the_result_of_an_errored_response_raises_its_message() -> None:
    response = Response(7, error=ResponseError("the step failed", ErrorKind.GENERATION))
    with pytest.raises(RuntimeError, match="request 7 ended with an error: the step failed"):
        response.get_result()


def test_ranges_of_retention_must_not_overlap() -> None:
    KvCacheRetentionConfig((TokenRangeRetentionConfig(5), TokenRangeRetentionConfig(0, 5)))
    with pytest.raises(ValueError, match="must not overlap"):
        KvCacheRetentionConfig((TokenRangeRetentionConfig(0), TokenRangeRetentionConfig(3, 5)))


def test_the_overview_names_every_class() -> None:
    classes = [name for name in vars(lmi.executor) if name[0].isupper() and not name.isupper()]
    assert "Executor" in classes
    assert [name for name in classes if name not in (lmi.executor.__doc__ or "")] == []
