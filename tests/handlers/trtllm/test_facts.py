"""The facts are whole: each class says where it was read, and each signature can be made."""

from __future__ import annotations

from inspect import Parameter

import pytest

from tests.handlers.trtllm.facts import PROFILES, Expression, Facts, load


@pytest.fixture(params=PROFILES)
def facts(request: pytest.FixtureRequest) -> Facts:
    return load(request.param)


def test_each_class_names_its_source_and_has_a_signature(facts: Facts) -> None:
    for name, cls in facts.classes.items():
        assert facts.sources[cls.source].path
        assert facts.signature(name).parameters.keys() == cls.keywords
        for method in cls.methods:
            assert next(iter(facts.signature(f"{name}.{method}").parameters)) == "self"


def test_each_class_is_where_its_name_says(facts: Facts) -> None:
    for name in facts.classes:
        module, _, short = name.rpartition(".")
        # Else it is nested in another class
        if module not in facts.classes:
            assert short in facts.exports[module]
            assert facts.find(module, short) == name


def test_the_profiles_differ_in_what_the_adapter_must_know() -> None:
    old = load("main-2025-10")
    new = load("main-2026-08")
    submit = "tensorrt_llm.LLM.generate_async"
    assert "priority" not in old.signature(submit).parameters
    assert new.signature(submit).parameters["priority"].default == 0.5
    assert list(old.signature(submit).parameters)[:7] == list(new.signature(submit).parameters)[:7]
    assert "onboard_blocks" not in new.cls("tensorrt_llm.llmapi.KvCacheConfig").keywords
    assert "error" in new.cls("tensorrt_llm.llmapi.RequestOutput").names
    assert "error" not in old.cls("tensorrt_llm.llmapi.RequestOutput").names


def test_a_default_that_json_cannot_hold_keeps_its_text(facts: Facts) -> None:
    retention = facts.signature("tensorrt_llm.llmapi.KvCacheRetentionConfig").parameters
    assert retention["transfer_mode"].default == Expression("KvCacheTransferMode.DRAM")
    assert retention["token_range_retention_configs"].default is Parameter.empty
