"""What an engine lacks is refused by name, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lmi.errors import InvalidParameter, Unsupported
from lmi.executor import (
    AdditionalModelOutput,
    Capabilities,
    Executor,
    ExternalDraftTokensConfig,
    GuidedDecodingParams,
    GuideType,
    KvCacheRetentionConfig,
    LoraConfig,
    OutputConfig,
    PoolingParams,
    PromptTuningConfig,
    SamplingConfig,
)
from tests.conformance.asking import ask, run
from tests.conformance.table import Need, has


def asking(path: str, value: object) -> tuple[str, dict[str, Any]]:
    """The field of a path, and the fields of a request in which it has the value."""
    owner, _, name = path.rpartition(".")
    makers: dict[str, type] = {"sampling_config": SamplingConfig, "output_config": OutputConfig}
    return name, {owner: makers[owner](**{name: value})} if owner else {name: value}


# By the capability: the field that asks for it, and a request that does.
ASKING: dict[Need, tuple[str, dict[str, Any]]] = {
    ("max_beam_width", None): asking("sampling_config.beam_width", 2),
    ("num_return_sequences", None): asking("sampling_config.num_return_sequences", 2),
    ("typical_p", None): asking("sampling_config.typical_p", 0.5),
    ("min_p", None): asking("sampling_config.min_p", 0.5),
    ("seed", None): asking("sampling_config.seed", 0),
    ("no_repeat_ngram_size", None): asking("sampling_config.no_repeat_ngram_size", 2),
    ("bad_words", None): asking("bad_words", ((9,),)),
    ("stop_words", None): asking("stop_words", ((9,),)),
    ("embedding_bias", None): asking("embedding_bias", ((9, 1.0),)),
    ("priority", None): asking("priority", 1.0),
    ("lora", None): asking("lora_config", LoraConfig("style")),
    ("logits_post_processors", None): asking("logits_post_processor_name", "style"),
    ("log_probs", None): asking("output_config.return_log_probs", True),
    ("prompt_log_probs", None): asking("output_config.num_prompt_log_probs", 0),
    ("context_logits", None): asking("output_config.return_context_logits", True),
    ("generation_logits", None): asking("output_config.return_generation_logits", True),
    ("perf_metrics", None): asking("output_config.return_perf_metrics", True),
    ("additional_outputs", None): asking(
        "output_config.additional_model_outputs", (AdditionalModelOutput("logits"),)
    ),
    ("max_images", None): asking("images", (b"",)),
    ("kv_cache_retention", None): asking("kv_cache_retention_config", KvCacheRetentionConfig()),
    **{
        ("guided_decoding", kind): asking(
            "guided_decoding_params", GuidedDecodingParams(kind, '{"type": "null"}')
        )
        for kind in GuideType
    },
}
NOWHERE: list[tuple[str, dict[str, Any]]] = [
    # These engines have models that generate
    asking("pooling_params", PoolingParams()),
    asking("prompt_tuning_config", PromptTuningConfig([[0.0]])),
    asking("external_draft_tokens_config", ExternalDraftTokensConfig((1,))),
    asking("output_config.return_encoder_output", True),
]


def test_every_capability_has_a_request_that_needs_it() -> None:
    """All but those that bound a number or say why, in what or of what, and promises that no
    request asks for.
    """
    bounds = {
        "max_top_log_probs",
        "max_temperature",
        "why_no_guides",
        "logits_post_processor_arrays",
        "embeddings",
    }
    # An engine that lacks them says by itself why
    bounds |= {"penalties"}
    promises = {
        "log_probs_before_processors",
        "adapter_pins",
        "batch_invariant",
        "log_probs_invariant",
    }

    assert {name for name, _ in ASKING} | bounds | promises == set(Capabilities.__struct_fields__)


def test_what_an_engine_lacks_is_refused_by_the_name_of_the_field(executor: Executor) -> None:
    lacking = [asking for need, asking in ASKING.items() if not has(executor.capabilities, need)]
    for name, fields in [*NOWHERE, *lacking]:
        with pytest.raises(
            Unsupported, match=rf"^{name} is not supported here: {executor.info.name} "
        ):
            executor.enqueue_request(ask(**fields))

    assert len(run(executor).output_token_ids[0]) == 8


def test_an_engine_without_adapters_refuses_them_by_name(executor: Executor) -> None:
    if executor.capabilities.lora:
        return  # test_adapters.py

    calls: list[Callable[[], object]] = [
        lambda: executor.load_adapter("style", "/nowhere"),
        lambda: executor.unload_adapter("style"),
    ]
    for call in calls:
        with pytest.raises(
            Unsupported,
            match=f"lora_config is not supported here: {executor.info.name} has no adapters",
        ):
            call()


def test_what_is_over_the_bound_of_an_engine_is_refused_with_both_numbers(
    executor: Executor,
) -> None:
    can = executor.capabilities
    over: list[tuple[str, dict[str, Any]]] = [
        (
            f"num_top_log_probs must be at most {can.max_top_log_probs}",
            {
                "output_config": OutputConfig(
                    return_log_probs=True, num_top_log_probs=can.max_top_log_probs + 1
                )
            },
        )
    ]
    if can.max_beam_width > 1:
        words = rf"beam_width must be at most {can.max_beam_width} \(option.max_beam_width\)"
        over.append((words, {"sampling_config": SamplingConfig(can.max_beam_width + 1)}))

    for words, fields in over:
        with pytest.raises(InvalidParameter, match=rf"^{words}, given \d+$"):
            executor.enqueue_request(ask(**fields))
