"""A parameter that an engine lacks is refused by name; one that it has passes."""

from __future__ import annotations

from typing import Any

import pytest

from lmi.capabilities import check_request
from lmi.errors import InvalidParameter, InvalidRequest, UnknownAdapter, Unsupported
from lmi.executor import (
    AdditionalModelOutput,
    Capabilities,
    Embeddings,
    EngineInfo,
    GuidedDecodingParams,
    GuideType,
    LoraConfig,
    OutputConfig,
    PoolingParams,
    Request,
    SamplingConfig,
)
from tests.conformance.test_refusals import ASKING

CAN_ALL = Capabilities(
    max_beam_width=8,
    num_return_sequences=True,
    guided_decoding=tuple(GuideType),
    typical_p=True,
    embedding_bias=True,
    no_repeat_ngram_size=True,
    context_logits=True,
    generation_logits=True,
    perf_metrics=True,
    additional_outputs=(AdditionalModelOutput("logits"),),
    logits_post_processors=("style",),
    lora=True,
    kv_cache_retention=True,
    priority=True,
    max_images=2,
)
CAN_NOTHING = Capabilities(
    min_p=False,
    seed=False,
    penalties=False,
    bad_words=False,
    stop_words=False,
    log_probs=False,
    prompt_log_probs=False,
)
# The field that asks, and a request that does
NEEDS = dict(ASKING.values())


def info(capabilities: Capabilities = CAN_ALL) -> EngineInfo:
    return EngineInfo(
        name="some-engine",
        vocab_size=10,
        max_sequence_length=8,
        max_num_sequences=4,
        capabilities=capabilities,
        adapters=("style",),
    )


def request(**fields: Any) -> Request:
    return Request(**{"input_token_ids": (1, 2), "max_tokens": 4, **fields})


@pytest.mark.parametrize(
    ("name", "declared", "reason"),
    [
        ("logits_post_processor_name", {}, "no logits post-processors"),
        ("logits_post_processor_name", {"logits_post_processors": ("other",)}, r"\['other'\]"),
        ("additional_model_outputs", {}, "no additional outputs"),
        (
            "additional_model_outputs",
            {"additional_outputs": (AdditionalModelOutput("hidden"),)},
            r"\['hidden'\]",
        ),
    ],
)
def test_the_reason_names_what_is_declared(
    name: str, declared: dict[str, Any], reason: str
) -> None:
    with pytest.raises(
        Unsupported, match=f"^{name} is not supported here: some-engine has {reason}$"
    ):
        check_request(request(**NEEDS[name]), info(Capabilities(**declared)))


@pytest.mark.parametrize("name", NEEDS)
def test_what_an_engine_lacks_is_refused_by_name(name: str) -> None:
    check_request(request(**NEEDS[name]), info())
    with pytest.raises(Unsupported, match=f"^{name} is not supported here: some-engine ") as caught:
        check_request(request(**NEEDS[name]), info(CAN_NOTHING))

    assert caught.value.field == name


def test_a_plain_request_needs_nothing() -> None:
    check_request(request(), info(CAN_NOTHING))


def test_an_adapter_that_is_not_loaded_is_refused() -> None:
    with pytest.raises(UnknownAdapter, match="^Adapter tone is not registered$"):
        check_request(request(lora_config=LoraConfig("tone")), info())


def test_a_guide_of_another_kind_is_refused() -> None:
    can_json = Capabilities(guided_decoding=(GuideType.JSON,))
    check_request(
        request(guided_decoding_params=GuidedDecodingParams(GuideType.JSON)), info(can_json)
    )
    with pytest.raises(Unsupported, match="guided_decoding_params"):
        check_request(
            request(guided_decoding_params=GuidedDecodingParams(GuideType.REGEX, "a+")),
            info(can_json),
        )


def test_a_prompt_must_leave_room_for_one_token() -> None:
    check_request(request(input_token_ids=(1,) * 7), info())
    with pytest.raises(InvalidParameter, match="context of 8 tokens, given '8 tokens'"):
        check_request(request(input_token_ids=(1,) * 8), info())


@pytest.mark.parametrize("field", ["num_top_log_probs", "num_prompt_log_probs"])
def test_more_alternatives_than_the_engine_has_are_refused(field: str) -> None:
    check_request(request(output_config=OutputConfig(**{field: 20})), info())
    with pytest.raises(InvalidParameter, match=f"^{field} must be at most 20, given 21$"):
        check_request(request(output_config=OutputConfig(**{field: 21})), info())


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("input_token_ids", lambda one: (1, one)),
        ("end_ids", lambda one: (one,)),
        ("end_id", lambda one: one),
        ("stop_words", lambda one: ((1,), (2, one))),
        ("bad_words", lambda one: ((one, 1),)),
        ("embedding_bias", lambda one: ((one, 1.0),)),
    ],
)
@pytest.mark.parametrize("token_id", [-1, 10])
def test_a_token_id_outside_the_vocabulary_is_refused(field: str, make: Any, token_id: int) -> None:
    check_request(request(**{field: make(9)}), info())
    with pytest.raises(
        InvalidParameter, match=f"^{field} must be token ids from 0 to 9, given {token_id}$"
    ):
        check_request(request(**{field: make(token_id)}), info())


def test_a_beam_width_over_the_engines_bound_is_refused() -> None:
    with pytest.raises(
        InvalidParameter,
        match=r"^beam_width must be at most 8 \(option.max_beam_width\), given 16$",
    ):
        check_request(request(sampling_config=SamplingConfig(16)), info())


@pytest.mark.parametrize(
    ("asked", "has"),
    [
        (AdditionalModelOutput("gates"), r"\['logits'\]"),
        (AdditionalModelOutput("logits", True), "logits without"),
    ],
)
def test_an_output_that_was_not_declared_is_refused(asked: AdditionalModelOutput, has: str) -> None:
    with pytest.raises(
        Unsupported, match=f"^additional_model_outputs is not supported here: some-engine has {has}"
    ):
        check_request(
            request(output_config=OutputConfig(additional_model_outputs=(asked,))), info()
        )


def test_a_temperature_over_the_engines_bound_is_refused() -> None:
    hot = request(sampling_config=SamplingConfig(temperature=3))
    check_request(hot, info())
    with pytest.raises(InvalidParameter, match="^temperature must be at most 2, given 3$"):
        check_request(hot, info(Capabilities(max_temperature=2)))


def embedding(dimensions: int | None = None, num_tokens: int = 2) -> Request:
    return request(input_token_ids=(1,) * num_tokens, pooling_params=PoolingParams(dimensions))


def gives(*shorter: int, size: int = 6, is_matryoshka: bool = True) -> EngineInfo:
    return info(Capabilities(embeddings=Embeddings(size, shorter if is_matryoshka else None)))


def test_an_embedding_model_gives_embeddings_and_generates_nothing() -> None:
    check_request(embedding(), gives())
    with pytest.raises(
        InvalidRequest, match="^this is an embedding model, which answers at /v1/embeddings and gen"
    ):
        check_request(request(), gives())

    with pytest.raises(
        Unsupported, match="^pooling_params is not supported here: some-engine has a model that gen"
    ):
        check_request(embedding(), info())


def test_an_embedding_may_fill_the_context() -> None:
    check_request(embedding(num_tokens=8), gives())
    with pytest.raises(
        InvalidParameter, match="no longer than the model's context of 8 tokens, given '9 tokens'"
    ):
        check_request(embedding(num_tokens=9), gives())


def test_an_embedding_is_as_short_as_the_model_was_trained_for() -> None:
    for dimensions in (6, None):
        check_request(embedding(dimensions), gives(is_matryoshka=False))

    check_request(embedding(1), gives())
    check_request(embedding(4), gives(2, 4))
    for dimensions, engine, why in [
        (
            5,
            gives(is_matryoshka=False),
            "is not supported here: the model's embeddings have 6 numbers and no shorter",
        ),
        (7, gives(), "must be at most 6, given 7"),
        (3, gives(2, 4), "must be one of 2, 4, given 3"),
    ]:
        with pytest.raises(InvalidRequest, match=f"^dimensions {why}"):
            check_request(embedding(dimensions), engine)


def test_more_images_than_a_prompt_may_have_are_refused() -> None:
    check_request(request(images=(b"", b"")), info())
    with pytest.raises(
        InvalidRequest,
        match=r"^images must have at most 2 images \(option.limit_mm_per_prompt\), given 3$",
    ):
        check_request(request(images=(b"", b"", b"")), info())
