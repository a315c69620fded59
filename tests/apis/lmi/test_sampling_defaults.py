"""LMI's list of parameters for TensorRT-LLM: which defaults hold, and what decides between greedy
and sampling.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from handlers.lmi_trtllm.about import HANDLER
from lmi.apis.base.api import AnyApi
from lmi.apis.base.body import Parsed
from lmi.apis.batch import DYNAMIC_BATCH
from lmi.apis.lmi.api import LMI
from lmi.apis.table import APIS
from lmi.executor import SamplingConfig
from lmi.settings.config import ModelConfig
from lmi.types import GenerationRequest

PLAIN = ModelConfig(path="demo", name="demo")
MODEL = ModelConfig(path="demo", name="demo", sampling_defaults=HANDLER.sampling_defaults)
GREEDY = SamplingConfig(temperature=0.0)
SAMPLED = SamplingConfig(top_k=5, top_p=0.85)


def parse(parameters: dict[str, Any], api: AnyApi = LMI, model: ModelConfig = MODEL) -> Parsed[Any]:
    body = json.dumps({"inputs": "hi", "parameters": parameters}).encode()
    return api.parse(api.read(body, None, model))


def request(parameters: dict[str, Any]) -> GenerationRequest:
    return parse(parameters).request


# The lists of LMI's page, as they are printed there.
OF_GREEDY = {"temperature": 0.8, "top_k": 0, "top_p": 0}
OF_DO_SAMPLE = {"temperature": 1.0, "top_k": 5, "top_p": 0.85}

# What a client sends, and what the engine must do. A None in SamplingConfig is a temperature of 1,
# or no limit.
CASES: list[tuple[dict[str, Any], SamplingConfig]] = [
    ({}, GREEDY),
    ({"do_sample": False}, GREEDY),
    (OF_GREEDY, GREEDY),
    ({"temperature": 1.5}, GREEDY),
    ({"top_k": -1, "top_p": 0.0}, GREEDY),
    ({"do_sample": True}, SAMPLED),
    ({"do_sample": True, **OF_DO_SAMPLE}, SAMPLED),
    ({"do_sample": True, "temperature": None, "top_k": None, "top_p": None}, SAMPLED),
    ({"do_sample": True, "temperature": 0.5}, SamplingConfig(temperature=0.5, top_k=5, top_p=0.85)),
    ({"do_sample": True, "temperature": 2}, SamplingConfig(temperature=2.0, top_k=5, top_p=0.85)),
    ({"do_sample": True, "top_k": 7}, SamplingConfig(top_k=7, top_p=0.85)),
    ({"do_sample": True, "top_k": 0}, SamplingConfig(top_p=0.85)),
    ({"do_sample": True, "top_k": -1}, SamplingConfig(top_p=0.85)),
    ({"do_sample": True, "top_p": 0.5}, SamplingConfig(top_k=5, top_p=0.5)),
    ({"do_sample": True, "top_p": 1}, SamplingConfig(top_k=5)),
    ({"do_sample": True, "top_p": 0}, SamplingConfig(top_k=5)),
    ({"do_sample": True, "top_k": 0, "top_p": 1}, SamplingConfig()),
    ({"do_sample": True, "top_k": 0, "top_p": 0}, GREEDY),
    ({"do_sample": True, "top_k": 1}, GREEDY),
    ({"do_sample": True, "temperature": 0}, GREEDY),
    ({"top_k": 7}, SamplingConfig(temperature=0.8, top_k=7)),
    ({"top_k": 7, "do_sample": False}, SamplingConfig(temperature=0.8, top_k=7)),
    ({"top_k": 7, "top_p": 0}, SamplingConfig(temperature=0.8, top_k=7)),
    ({"top_k": 7, "temperature": 1}, SamplingConfig(top_k=7)),
    ({"top_k": 7, "temperature": 0}, GREEDY),
    ({"top_k": 1}, GREEDY),
    ({"top_k": 1, "top_p": 0.5}, GREEDY),
    ({"top_p": 0.5}, SamplingConfig(temperature=0.8, top_p=0.5)),
    ({"top_p": 0.5, "top_k": 0}, SamplingConfig(temperature=0.8, top_p=0.5)),
    ({"top_p": 1}, SamplingConfig(temperature=0.8)),
    ({"top_k": 7, "top_p": 0.5}, SamplingConfig(temperature=0.8, top_k=7, top_p=0.5)),
]


@pytest.mark.parametrize(
    ("parameters", "wanted"), CASES, ids=[json.dumps(case[0]) for case in CASES]
)
def test_the_page_s_defaults_hold(parameters: dict[str, Any], wanted: SamplingConfig) -> None:
    assert request(parameters).sampling == wanted


@pytest.mark.parametrize("others", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_each_default_of_the_page_sent_literally_is_the_same_as_leaving_it_out(
    others: dict[str, Any],
) -> None:
    for name, default in (OF_DO_SAMPLE if others else OF_GREEDY).items():
        assert request(others | {name: default}) == request(others)


@given(
    do_sample=st.booleans(),
    temperature=st.none() | st.sampled_from([0, 0.8, 1, 2]),
    top_k=st.none() | st.integers(-1, 6),
    top_p=st.none() | st.sampled_from([0, 0.5, 0.85, 1]),
)
def test_an_answer_is_sampled_if_and_only_if_something_asks_for_it(
    do_sample: bool, temperature: float | None, top_k: int | None, top_p: float | None
) -> None:
    sampling = request(
        {"do_sample": do_sample, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    ).sampling
    is_limited = (
        (top_k is None and do_sample)
        or (top_k or 0) > 0
        or (top_p is None and do_sample)
        or (top_p or 0) > 0
    )

    assert sampling.is_greedy == (temperature == 0 or top_k == 1 or not is_limited)
    assert sampling == GREEDY or not sampling.is_greedy


def test_a_seed_counts_wherever_an_answer_is_sampled() -> None:
    assert request({"top_k": 7, "seed": 3, "min_p": 0.1}).sampling == SamplingConfig(
        temperature=0.8, top_k=7, seed=3, min_p=0.1
    )
    parsed = parse({"seed": 3, "temperature": 0.5})
    assert parsed.request == request({})
    assert set(parsed.ignored) == {
        f"parameters.{name}: no effect in greedy decoding" for name in ("seed", "temperature")
    }


def test_nothing_is_told_of_values_that_the_client_did_not_send() -> None:
    for parameters in (
        {},
        {"do_sample": True},
        {"do_sample": True, "top_k": 1},
        {"num_beams": 2},
        {"top_k": 7},
    ):
        told_defaults = {
            line.partition(":")[0].removeprefix("parameters.") for line in parse(parameters).ignored
        }
        assert told_defaults <= set(parameters)


def test_a_search_is_not_sampled() -> None:
    parsed = parse({"num_beams": 2, "do_sample": True, "top_k": 7})
    assert parsed.request == parse({"num_beams": 2}, model=PLAIN).request
    assert len(parsed.ignored) == 2


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        ({"min_length": 0}, {}),
        ({"min_length": 1}, {}),
        ({"min_length": 5}, {"min_tokens": 5}),
        ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
        ({"frequency_penalty": -0.5}, {"frequency_penalty": -0.5}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"length_penalty": 0.5}, {}),
        ({"length_penalty": 0.5, "num_beams": 2}, {"length_penalty": 0.5}),
    ],
    ids=str,
)
def test_the_other_parameters_of_the_list_mean_the_same_as_elsewhere(
    parameters: dict[str, Any], wanted: dict[str, Any]
) -> None:
    sampling = request(parameters).sampling
    assert {name: getattr(sampling, name) for name in wanted} == wanted
    assert sampling == parse(parameters, model=PLAIN).request.sampling


def test_stop_is_a_list_and_a_boolean_stops_nothing() -> None:
    assert request({"stop": ["x"], "bad_sequences": ["y"]}).stop_sequences == ("x",)
    assert request({"bad_sequences": ["y"]}).bad_sequences == ("y",)
    assert (request({"stop": False}), parse({"stop": False}).ignored) == (request({}), ())
    assert request({"stop": True}) == request({})
    assert parse({"stop": True}).ignored == (
        "parameters.stop: no effect as true, which names no stop string",
    )


def test_a_batch_of_inputs_has_the_same_defaults() -> None:
    for parameters, expected in CASES:
        assert parse(parameters, DYNAMIC_BATCH).request.sampling == expected


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("tgi", {"inputs": "hi", "parameters": {"top_k": 7}}),
    ("tgi_generate", {"inputs": "hi", "parameters": {"do_sample": True}}),
    ("tgi_generate_stream", {"inputs": "hi", "parameters": {"do_sample": True}}),
    ("tgi", {"inputs": "hi"}),
    *((name, {"text_input": "hi", "temperature": 0.5}) for name in ("triton", "triton_stream")),
    ("triton", {"text_input": "hi", "top_k": 7}),
    *((name, {"prompt": "hi"}) for name in ("openai_completions", "openai_completions_lines")),
    *((name, {"messages": [{"role": "user", "content": "hi"}]}) for name in ("openai_chat", "openai_chat_lines")),  # noqa: E501
    ("openai_completions", {"prompt": "hi", "temperature": 0}),
    *((name, {"input": "hi"}) for name in ("responses", "embeddings")),
    ("anthropic", {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "body"), BODIES)
def test_other_apis_keep_their_own_defaults(name: str, body: dict[str, Any]) -> None:
    api = APIS[name]
    data = json.dumps(body).encode()
    with_defaults, without = (api.parse(api.read(data, None, model)) for model in (MODEL, PLAIN))

    assert (with_defaults.requests, with_defaults.format) == (without.requests, without.format)


def test_no_api_is_left_out_of_these_tests() -> None:
    assert {name for name, _ in BODIES} | {LMI.name, DYNAMIC_BATCH.name} == set(APIS)
