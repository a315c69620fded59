"""What a parameter means, whatever an API calls it: the field that it fills, what leaves it out,
what is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from lmi.apis.anthropic.api import ANTHROPIC
from lmi.apis.anthropic.schema import MESSAGES
from lmi.apis.base import parameters
from lmi.apis.base.body import Parsed
from lmi.apis.base.parameters import ParameterTable
from lmi.apis.embeddings import schema as embeddings
from lmi.apis.embeddings.api import EMBEDDINGS
from lmi.apis.lmi import schema as lmi
from lmi.apis.openai import chat_schema as openai_chat, schema as openai
from lmi.apis.responses import schema as responses
from lmi.apis.responses.api import RESPONSES
from lmi.apis.tgi import schema as tgi
from lmi.apis.triton import inputs, schema as triton
from lmi.errors import InvalidRequest
from lmi.executor import SamplingConfig
from lmi.settings.config import ModelConfig
from lmi.types import GenerationRequest, OutputFormat

MODEL = ModelConfig(path="demo", name="demo")
BIG = 2**63
LONG = "x" * 129
# By the field of the request or of its sampling: a value with an effect, and values that every API
# refuses. Names at the end are read into another field.
MEANINGS: dict[str, tuple[Any, list[Any]]] = {
    "seed": (2**64 - 1, ["x", 1.5, True, -2, 2**64]),
    "temperature": (0.5, ["hot", True, -0.1, 100.1, 1e308, []]),
    "top_k": (5, ["x", 5.5, True, -2]),
    "top_p": (0.9, ["x", True, -0.1, 1.1]),
    "min_p": (0.1, ["x", True, -0.1, 1.1]),
    "typical_p": (0.9, ["x", True, 0, 1.1]),
    "repetition_penalty": (1.2, ["x", True, 0, -1, 1e-300, 0.009, 100.1]),
    "presence_penalty": (-0.5, ["x", True, 2.1, -1e308, {}]),
    "frequency_penalty": (0.5, ["x", True, 2.1, -1e308, {}]),
    "no_repeat_ngram_size": (3, ["x", True, -1, 1.5]),
    "min_tokens": (5, ["x", 1.5, True, -1]),
    "num_return_sequences": (2, ["x", True, 0, 17, 1.5]),
    "max_new_tokens": (7, ["many", 30.5, True, -1, BIG, 1e30, [], {}]),
    "stop_sequences": (["a", "b"], [5, [5], ["a"] * 65, ["a" * 1025], {}]),
    "stop_token_ids": ([3, 4], ["x", [True], ["1"], [-1], [BIG], [1] * 1025, 5]),
    "bad_sequences": (["x"], [5, [5], ["a"] * 1025, {}]),
    "ignore_eos": (True, ["x", 1]),
    "truncate": (5, ["x", 1.5, True, 0]),
    "truncation_side": ("right", ["up", "", 5, ["left"]]),
    "include_stop_str_in_output": (True, ["x", 1]),
    "skip_special_tokens": (False, ["x", 1]),
    "spaces_between_special_tokens": (False, ["x", 1]),
    "return_full_text": (True, ["x", 1]),
    "num_top_log_probs": (3, ["x", -1, 1.5]),
    "num_prompt_log_probs": (3, ["x", True, -1, 1.5]),
    "adapter": ("fr", [5, True, ["a", "b"], {}]),
    "cache_salt": ("u-1", ["", 5, True, ["a", "b"], {}, "a@b", "a/b", "a\\b", "a\0", LONG]),
    "prompt_cache_key": ("conversation-7", [5, True, ["a", "b"], {}]),
    "logits_post_processor_name": ("shout", [5, True, ["a", "b"], {}]),
    "priority": (None, ["x", 0.5, True, 2**19 + 1]),
    "do_sample": (None, ["true", 1, [], {}]),
    "num_beams": (None, ["x", True, 0, 257]),
    "beam_width": (None, ["x", True, 0, 257]),
    "use_beam_search": (None, ["x", 1]),
    "length_penalty": (None, ["x", True, -0.1]),
    "early_stopping": (None, ["never", 1]),
    "guided_json": (None, ["{", 5, [], {"$ref": "http://127.0.0.1/x"}]),
    "guided_regex": (None, [5, ["a"]]),
    "guided_grammar": (None, [5, {}]),
    "guided_choice": (None, ["a", [], [5]]),
    "response_format": (None, ["json", {"type": "xml"}, {"type": "json_schema"}, []]),
}
VALUES = {name: value for name, (value, _) in MEANINGS.items() if value is not None}
WRONG = {name: wrong for name, (_, wrong) in MEANINGS.items()}
FIELDS = {
    "n": "num_return_sequences",
    "best_of": "num_return_sequences",
    "min_length": "min_tokens",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "stop": "stop_sequences",
    "stop_words": "stop_sequences",
    "bad_words": "bad_sequences",
    "ignore_eos_token": "ignore_eos",
    "truncate_prompt_tokens": "truncate",
    "echo": "return_full_text",
    "logprobs": "num_top_log_probs",
    "top_n_tokens": "num_top_log_probs",
    "top_logprobs": "num_top_log_probs",
    "prompt_logprobs": "num_prompt_log_probs",
    "adapter_id": "adapter",
    "lora_name": "adapter",
}
"""The fields of names that differ from them."""


def field_of(name: str) -> str:
    return FIELDS.get(name, name)


@dataclass(frozen=True)
class Asking:
    """How an API is asked: its names, a body around fields, and what stands beside them so that
    they have an effect.
    """

    table: ParameterTable | dict[str, Any]
    parse: Callable[[dict[str, Any]], Parsed[Any]]
    beside: dict[str, Any]
    names: str

    def request(self, given: dict[str, Any]) -> GenerationRequest:
        return self.parse(self.beside | given).request


def _lmi(given: dict[str, Any]) -> Parsed[Any]:
    return lmi.parse(
        lmi.read(json.dumps({"inputs": "hi", "parameters": given}).encode(), None, MODEL)
    )


def _tgi(given: dict[str, Any]) -> Parsed[Any]:
    """The request without a seed that was drawn, which differs each time."""
    parsed = tgi.parse(
        tgi.read(json.dumps({"inputs": "hi", "parameters": given}).encode(), None, MODEL)
    )
    if given.get("seed", -1) != -1:
        return parsed

    sampling = replace(parsed.request.sampling, seed=None)
    request = replace(parsed.request, sampling=sampling)
    return replace(parsed, requests=(request,))


def _openai(schema: Any, body: dict[str, Any], given: dict[str, Any]) -> Parsed[Any]:
    return schema.parse(schema.read(json.dumps(body | given).encode(), None, MODEL))  # type: ignore[no-any-return]


def _triton(given: dict[str, Any]) -> Parsed[Any]:
    read_body = partial(triton.read, output_format=OutputFormat.JSON)
    return triton.parse(read_body(json.dumps({"text_input": "hi"} | given).encode(), None, MODEL))


SHARED = """
    n seed temperature top_p presence_penalty frequency_penalty stop stop_token_ids
    include_stop_str_in_output top_k min_p repetition_penalty ignore_eos min_tokens
    skip_special_tokens spaces_between_special_tokens logits_post_processor_name cache_salt
    max_tokens bad_words
"""
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
APIS = {
    "lmi": Asking(
        lmi.PARAMETERS,
        _lmi,
        {"do_sample": True, "details": True},
        """
        n best_of seed temperature top_k top_p min_p typical_p repetition_penalty presence_penalty
        frequency_penalty no_repeat_ngram_size min_length min_tokens max_new_tokens stop_sequences
        stop stop_token_ids bad_sequences ignore_eos_token truncate truncation_side
        include_stop_str_in_output skip_special_tokens spaces_between_special_tokens
        return_full_text logprobs top_n_tokens prompt_logprobs cache_salt logits_post_processor_name
        """,
    ),
    "tgi": Asking(
        tgi.PARAMETERS,
        _tgi,
        {"do_sample": True, "details": True},
        """
        best_of seed temperature top_k top_p typical_p repetition_penalty frequency_penalty
        max_new_tokens stop truncate truncation_side return_full_text top_n_tokens adapter_id
        """,
    ),
    "completion": Asking(
        openai.COMPLETION,
        partial(_openai, openai, {"prompt": "hi"}),
        {"logprobs": 0, "max_tokens": 9},
        SHARED
        + "best_of truncate_prompt_tokens truncation_side logprobs prompt_logprobs prompt_cache_key",  # noqa: E501
    ),
    "chat": Asking(
        openai_chat.CHAT,
        partial(_openai, openai_chat, CHAT),
        {"logprobs": True},
        SHARED + "truncate_prompt_tokens truncation_side top_logprobs max_completion_tokens "
        "prompt_logprobs prompt_cache_key",
    ),
    "responses": Asking(
        responses.RESPONSES,
        partial(_openai, RESPONSES, {"input": "hi"}),
        {},
        """
        seed temperature top_p presence_penalty frequency_penalty stop stop_token_ids
        include_stop_str_in_output top_k min_p repetition_penalty ignore_eos min_tokens
        skip_special_tokens spaces_between_special_tokens logits_post_processor_name cache_salt
        max_output_tokens bad_words truncate_prompt_tokens
        """,
    ),
    "embeddings": Asking(
        embeddings.PARAMETERS, partial(_openai, EMBEDDINGS, {"input": "hi"}), {}, "cache_salt"
    ),
    "anthropic": Asking(
        MESSAGES,
        partial(_openai, ANTHROPIC, CHAT | {"max_tokens": 9}),
        {},
        "temperature top_p top_k stop_sequences cache_salt max_tokens",
    ),
    "triton": Asking(
        inputs.MEANINGS,
        _triton,
        {"temperature": 0.7, "return_logprobs": True},
        SHARED + "stop_words best_of logprobs lora_name",
    ),
}
ROWS = [(api, name) for api, asking in APIS.items() for name in asking.names.split()]


def flat(request: GenerationRequest) -> dict[str, Any]:
    """The fields of a request and of its sampling."""
    of_request = asdict(request)
    return of_request | asdict(of_request.pop("sampling"))


@pytest.mark.parametrize(("api", "name"), ROWS)
def test_a_parameter_fills_its_field_and_no_other(api: str, name: str) -> None:
    field = field_of(name)
    asking = APIS[api]
    value = VALUES[field]
    before = flat(asking.request({}))
    after = flat(asking.request({name: value}))
    expected = tuple(value) if isinstance(value, list) else value
    beside = {"needs_full_room": True} if (api, name) == ("tgi", "max_new_tokens") else {}

    assert {key: after[key] for key in after if after[key] != before[key]} == {
        field: expected,
        **beside,
    }


@pytest.mark.parametrize(
    ("api", "name"), [(api, name) for api, asking in APIS.items() for name in asking.table]
)
def test_a_wrong_type_or_range_is_refused_with_the_name_even_where_it_has_no_effect(
    api: str, name: str
) -> None:
    spelled = {
        "lmi": f"parameters.{name}",
        "tgi": f"parameters.{name}",
        "triton": f"input '{name}'",
    }.get(api, name)
    for value in WRONG.get(field_of(name), []):
        with pytest.raises(InvalidRequest) as caught:
            APIS[api].parse({name: value})

        assert spelled in str(caught.value), value


@pytest.mark.parametrize(
    ("api", "name"), [row for row in ROWS if type(VALUES[field_of(row[1])]) is int]
)
def test_a_whole_float_is_an_integer(api: str, name: str) -> None:
    # A float holds it exactly
    value = VALUES[field_of(name)] % 1000
    assert APIS[api].request({name: float(value)}) == APIS[api].request({name: value})


@pytest.mark.parametrize("api", [api for api, name in ROWS if name == "seed"])
def test_a_seed_of_minus_one_is_as_if_left_out(api: str) -> None:
    assert APIS[api].request({"seed": -1}) == APIS[api].request({})


@pytest.mark.parametrize(
    ("api", "name"), [row for row in ROWS if field_of(row[1]) == "stop_sequences"]
)
def test_forty_stop_strings_end_an_answer(api: str, name: str) -> None:
    stops = [f"stop {n}" for n in range(40)]
    assert APIS[api].request({name: stops}).stop_sequences == tuple(stops)


@pytest.mark.parametrize("table", [parameters.ROWS, *(asking.table for asking in APIS.values())])
def test_every_row_has_a_sentence_for_descriptions(table: ParameterTable) -> None:
    assert [name for name, row in table.items() if not row.help.endswith(".")] == []


def test_every_field_of_the_contract_s_sampling_has_a_value_here() -> None:
    of_a_search = {"beam_width", "length_penalty", "early_stopping"}
    assert set(SamplingConfig.__struct_fields__) - of_a_search <= set(VALUES)
