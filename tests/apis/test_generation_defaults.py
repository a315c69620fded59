"""A model's own defaults: at which APIs they count, and that whatever a client writes counts before
them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lmi.apis.base.body import Parsed
from lmi.apis.table import APIS
from lmi.executor import SamplingConfig
from lmi.settings.config import GenerationDefaults, ModelConfig
from tests.apis.lmi.test_sampling_defaults import BODIES as OF_OTHER_APIS

DEFAULTS = GenerationDefaults(
    temperature=0.6,
    top_p=0.95,
    top_k=20,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    max_new_tokens=77,
)
PLAIN = ModelConfig(path="demo", name="demo")
MODEL = ModelConfig(path="demo", name="demo", generation_defaults=DEFAULTS)
OF_MAKER = SamplingConfig(
    temperature=0.6,
    top_p=0.95,
    top_k=20,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
)
USER = {"role": "user", "content": "hi"}
ANTHROPIC = {"max_tokens": 9, "messages": [USER]}
# The APIs that follow OpenAI's or Anthropic's rule: a body that is silent, and the longest answer
# to it.
SILENT: list[tuple[str, dict[str, Any], int]] = [
    ("openai_chat", {"messages": [USER]}, 77),
    ("openai_chat_lines", {"messages": [USER]}, 77),
    # OpenAI's own default, as with vLLM
    ("openai_completions", {"prompt": "hi"}, 16),
    ("openai_completions_lines", {"prompt": "hi"}, 16),
    ("responses", {"input": "hi"}, 77),
    ("anthropic", ANTHROPIC, 9),
]
NAMES = [name for name, _, _ in SILENT]


def parse(name: str, body: dict[str, Any], model: ModelConfig = MODEL) -> Parsed[Any]:
    api = APIS[name]
    return api.parse(api.read(json.dumps(body).encode(), None, model))


def silent(name: str) -> dict[str, Any]:
    return next(body for api, body, _ in SILENT if api == name)


@pytest.mark.parametrize(("name", "body", "num_tokens"), SILENT)
def test_a_silent_request_gets_the_models_defaults(
    name: str, body: dict[str, Any], num_tokens: int
) -> None:
    parsed = parse(name, body)
    assert parsed.request.sampling == OF_MAKER
    assert parsed.request.max_new_tokens == num_tokens
    assert parsed.ignored == ()


@pytest.mark.parametrize("name", NAMES)
def test_null_is_silent_too(name: str) -> None:
    nothing = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"))
    assert parse(name, silent(name) | nothing).request.sampling == OF_MAKER


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("field", "value", "meant"),
    [
        ("temperature", 1, None),
        ("temperature", 1.0, None),
        ("temperature", 0.2, 0.2),
        ("top_p", 1, None),
        ("top_p", 0.5, 0.5),
        ("top_k", -1, None),
        ("top_k", 0, None),
        ("top_k", 3, 3),
        ("min_p", 0, None),
        ("min_p", 0.5, 0.5),
        ("repetition_penalty", 1, None),
        ("repetition_penalty", 1.5, 1.5),
        ("presence_penalty", 0, None),
        ("frequency_penalty", 0, None),
    ],
)
def test_what_a_client_writes_counts_even_where_it_means_off(
    name: str, field: str, value: float, meant: float | None
) -> None:
    parsed = parse(name, silent(name) | {field: value})
    # The API has no such field
    if parsed.ignored:
        assert (name, parsed.ignored) == ("anthropic", (f"'{field}': unknown",))
        assert parsed.request.sampling == OF_MAKER
    else:
        assert getattr(parsed.request.sampling, field) == meant
        assert field not in parsed.request.defaulted


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_a_written_zero_is_greedy(name: str, field: str) -> None:
    sampling = parse(name, silent(name) | {field: 0}).request.sampling
    assert sampling.temperature == 0 and sampling.is_greedy
    assert (sampling.top_k, sampling.top_p, sampling.min_p) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("openai_chat", "max_tokens"),
        ("openai_chat", "max_completion_tokens"),
        ("openai_completions", "max_tokens"),
        ("responses", "max_output_tokens"),
        ("anthropic", "max_tokens"),
    ],
)
def test_a_written_number_of_tokens_counts(name: str, field: str) -> None:
    assert parse(name, silent(name) | {field: 500}).request.max_new_tokens == 500


def test_a_model_that_is_greedy_or_draws_freely_says_so() -> None:
    greedy = replace(MODEL, generation_defaults=GenerationDefaults(temperature=0.0, top_k=5))
    assert parse("openai_chat", {"messages": [USER]}, greedy).request.sampling == SamplingConfig(
        temperature=0.0
    )
    assert parse(
        "openai_chat", {"messages": [USER], "temperature": 1}, greedy
    ).request.sampling == SamplingConfig(top_k=5)

    free = replace(
        MODEL,
        generation_defaults=GenerationDefaults(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0),
    )
    for name in NAMES:
        assert parse(name, silent(name), free).requests == parse(name, silent(name), PLAIN).requests


def test_a_search_has_no_defaults_and_nothing_is_told() -> None:
    body = {"prompt": "hi", "use_beam_search": True, "n": 2}
    parsed = parse("openai_completions", body)
    assert parsed.requests == parse("openai_completions", body, PLAIN).requests
    assert parsed.ignored == ()

    one_beam = parse(
        "openai_completions", {"prompt": "hi", "use_beam_search": True}
    ).request.sampling
    assert one_beam.temperature == 0


def test_a_response_repeats_the_values_that_counted() -> None:
    def settings(**fields: object) -> dict[str, Any]:
        state = parse("responses", {"input": "hi", **fields}).format.state
        response: dict[str, Any] = state.response("completed")
        return response

    shown_settings = settings()
    assert (
        shown_settings["temperature"],
        shown_settings["top_p"],
        shown_settings["presence_penalty"],
    ) == (0.6, 0.95, 0.3)
    assert (shown_settings["frequency_penalty"], shown_settings["max_output_tokens"]) == (0.2, 77)
    repeated = settings(temperature=1, max_output_tokens=5)
    assert (repeated["temperature"], repeated["top_p"], repeated["max_output_tokens"]) == (
        1,
        0.95,
        5,
    )


FOLLOWERS = {*NAMES, "embeddings"}
OTHERS = [
    *((name, body) for name, body in OF_OTHER_APIS if name not in FOLLOWERS),
    ("lmi", {"inputs": "hi"}),
    ("lmi", {"inputs": "hi", "parameters": {"do_sample": True}}),
    ("dynamic_batch", {"inputs": ["hi"]}),
    ("embeddings", {"input": "hi"}),
]


@pytest.mark.parametrize(("name", "body"), OTHERS)
def test_the_other_apis_keep_the_defaults_of_their_documents(
    name: str, body: dict[str, Any]
) -> None:
    with_defaults, without = (parse(name, body, model) for model in (MODEL, PLAIN))
    assert with_defaults.requests == without.requests


def test_no_api_is_left_out_of_these_tests() -> None:
    assert FOLLOWERS | {name for name, _ in OTHERS} == set(APIS)
