"""Beam search, from each API's words for it to the answer with whole beams, over real sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmi.apis.lmi import schema as lmi
from lmi.errors import GenerationFailed, Unsupported
from lmi.executor import (
    Capabilities,
    FinishReason,
    GuideType,
    Request,
    Response,
    Result,
    SamplingConfig,
)
from lmi.sequences import beams_of
from lmi.settings.config import ModelConfig
from lmi.user_code.formatter import OutputFormatter
from tests.scripted import CAPABILITIES, END_ID, Host, beams, host

BEAMS = Capabilities(
    max_beam_width=4,
    num_return_sequences=True,
    perf_metrics=True,
    guided_decoding=tuple(GuideType),
    no_repeat_ngram_size=True,
    logits_post_processors=("shout",),
)
LMI = "/invocations"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TRITON = "/v2/models/scripted/generate"


@pytest.fixture(scope="module")
def searching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("searching"), capabilities=BEAMS) as served:
        yield served


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("plain"), capabilities=CAPABILITIES) as served:
        yield served


def asked(served: Host) -> Request:
    """The last request that the engine accepted."""
    return served.executor.requests[-1]


def post(served: Host, path: str, fields: dict[str, Any]) -> tuple[int, Any]:
    response, body = served.post(fields, path)
    return response.status, json.loads(body)


def in_lmi(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "say ab", "parameters": parameters}


def test_the_first_beam_is_the_answer_and_the_others_are_in_its_details(searching: Host) -> None:
    status, answer = post(
        searching, LMI, in_lmi(num_beams=3, details=True, length_penalty=0.5, early_stopping=True)
    )
    assert (status, answer["generated_text"]) == (200, "ab")

    other_sequences = answer["details"]["best_of_sequences"]
    assert [sequence["generated_text"] for sequence in other_sequences] == ["ab1", "ab2"]
    assert [sequence["generated_tokens"] for sequence in other_sequences] == [4, 4]

    log_probs = [
        sum(token["log_prob"] for token in sequence_details["tokens"])
        for sequence_details in (answer["details"], *other_sequences)
    ]
    assert log_probs[0] == min(log_probs), "the search ranks its beams"

    config = SamplingConfig(3, num_return_sequences=3, length_penalty=0.5, early_stopping=1)
    assert (asked(searching).sampling_config, asked(searching).streaming) == (config, False)


def test_a_search_is_timed_to_its_first_token(searching: Host) -> None:
    view = searching.block.frontends[0].time_to_first_token_s
    before = sum(view.counts)
    assert post(searching, LMI, in_lmi(num_beams=3, n=3))[0] == 200
    assert sum(view.counts) == before + 1


def test_fewer_beams_are_returned_than_searched(searching: Host) -> None:
    _, answer = post(searching, LMI, in_lmi(num_beams=4, n=2, best_of=4, details=True))
    assert [sequence["generated_text"] for sequence in answer["details"]["best_of_sequences"]] == [
        "ab1"
    ]
    assert asked(searching).sampling_config.num_return_sequences == 2


def test_a_stop_string_ends_each_beam_at_its_own_place(searching: Host) -> None:
    parameters = {"num_beams": 2, "details": True, "stop_sequences": ["1"]}
    _, answer = post(searching, LMI, in_lmi(**parameters))
    [second_sequence] = answer["details"]["best_of_sequences"]
    assert (answer["generated_text"], answer["details"]["finish_reason"]) == ("ab", "eos_token")
    assert (second_sequence["generated_text"], second_sequence["finish_reason"]) == (
        "ab",
        "stop_sequence",
    )
    assert not asked(searching).streaming, "a search tells its beams once"


def test_details_of_the_prompt_come_with_beams_too(searching: Host) -> None:
    parameters = {"num_beams": 2, "details": True, "decoder_input_details": True}
    details = post(searching, LMI, in_lmi(**parameters))[1]["details"]
    assert len(details["prefill"]) == len("say ab") and len(details["best_of_sequences"]) == 1


def test_vllms_flag_gives_as_many_choices_as_n(searching: Host) -> None:
    search = {"use_beam_search": True, "n": 2, "best_of": 3}
    _, answer = post(
        searching, COMPLETIONS, {"prompt": ["say ab", "say c"], "max_tokens": 9, **search}
    )
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "ab1", "c", "c1"]
    assert answer["usage"]["completion_tokens"] == 3 + 4 + 2 + 3
    assert asked(searching).sampling_config.beam_width == 3


def test_a_chat_is_searched_too(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with host(tmp_path, model={"chat_template": template}, capabilities=BEAMS) as served:
        fields = {
            "messages": [{"role": "user", "content": "say ab"}],
            "use_beam_search": True,
            "n": 2,
        }
        _, answer = post(served, CHAT, fields)

    assert [choice["message"]["content"] for choice in answer["choices"]] == ["ab", "ab1"]


def test_tritons_answer_is_an_array_of_beams(searching: Host) -> None:
    for search in ({"beam_width": 2}, {"use_beam_search": True, "n": 2}):
        _, answer = post(
            searching, TRITON, {"text_input": "say ab", "return_num_output_tokens": True, **search}
        )
        assert (answer["text_output"], answer["num_output_tokens"]) == (["ab", "ab1"], [3, 4])

    _, answer = post(searching, TRITON, {"text_input": "say ab", "beam_width": 2, "stream": False})
    assert asked(searching).sampling_config == SamplingConfig(
        2, num_return_sequences=2, length_penalty=1.0, early_stopping=0
    )


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        LMI,
        in_lmi(num_beams=2),
        "parameters.num_beams is not supported here: scripted has no beam search",
    ),
    (
        TRITON,
        {"text_input": "a", "beam_width": 2},
        "input 'beam_width' is not supported here: scripted has no beam",
    ),
    (
        TRITON,
        {"text_input": "a", "use_beam_search": True, "n": 2},
        "input 'use_beam_search' is not supported here",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "use_beam_search": True, "n": 2},
        "use_beam_search is not supported here: scripted",
    ),
    (LMI, in_lmi(no_repeat_ngram_size=2), "parameters.no_repeat_ngram_size is not supported here"),
    (
        LMI,
        in_lmi(logits_post_processor_name="a"),
        "parameters.logits_post_processor_name is not supported here",
    ),
    (
        TRITON,
        {"text_input": "a", "logits_post_processor_name": "a"},
        "input 'logits_post_processor_name' is not",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "logits_post_processor_name": "a"},
        "logits_post_processor_name is not supported",
    ),
]


@pytest.mark.parametrize(("path", "fields", "words"), REFUSED, ids=str)
def test_what_the_engine_lacks_is_refused_in_the_words_of_the_route(
    plain: Host, path: str, fields: dict[str, Any], words: str
) -> None:
    status, body = post(plain, path, fields)
    error = body["error"]
    assert (error["message"] if isinstance(error, dict) else error).startswith(words)
    assert status == (424 if path == LMI else 400)


def test_a_width_over_the_engines_bound_is_refused_with_both_numbers(searching: Host) -> None:
    status, body = post(searching, LMI, in_lmi(num_beams=16))
    bound = "parameters.num_beams must be at most 4 (option.max_beam_width), given 16"
    assert (status, body["error"]) == (424, bound)
    _, body = post(searching, TRITON, {"text_input": "a", "beam_width": 16})
    assert body["error"] == "input 'beam_width' must be at most 4 (option.max_beam_width), given 16"


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (LMI, in_lmi(num_beams=2, guided_regex="a"), "parameters.guided_regex"),
        (
            COMPLETIONS,
            {"prompt": "a", "n": 2, "use_beam_search": True, "guided_regex": "a"},
            "guided_regex",
        ),
        (
            TRITON,
            {"text_input": "a", "beam_width": 2, "guided_decoding_guide_type": "json"},
            "input 'guided_decoding_guide_type'",
        ),
    ],
)
def test_a_structure_is_refused_in_a_search(
    searching: Host, path: str, fields: dict[str, Any], name: str
) -> None:
    _, body = post(searching, path, fields)
    error = body["error"]
    words = f"{name} is not supported here: a beam search follows no structure"
    assert (error["message"] if isinstance(error, dict) else error) == words


def test_a_search_takes_a_place_for_each_beam(tmp_path: Path) -> None:
    with host(tmp_path, server={"max_request_sequences": 4}, capabilities=BEAMS) as served:
        status, body = post(served, LMI, in_lmi(num_beams=5, n=2))
        assert (status, body["error"].partition(",")[0]) == (
            424,
            "parameters.num_beams must be at most 4",
        )


def test_a_processor_of_logits_reaches_the_engine_by_its_name(searching: Host) -> None:
    name = {"logits_post_processor_name": "shout"}
    for path, fields in (
        (LMI, in_lmi(**name)),
        (COMPLETIONS, {"prompt": "say ab", **name}),
        (TRITON, {"text_input": "say ab", "parameters": name}),
    ):
        assert post(searching, path, fields)[0] == 200
        assert asked(searching).logits_post_processor_name == "shout"

    status, body = post(searching, LMI, in_lmi(logits_post_processor_name="whisper"))
    assert (status, body["error"]) == (
        424,
        "parameters.logits_post_processor_name is not supported here: scripted has ['shout']",
    )


def test_restated_beams_are_read_only_at_the_end() -> None:
    restated = Result([[1], [2]], finish_reasons=[FinishReason.NOT_FINISHED] * 2)
    assert beams_of(restated) == []

    ended = Result(
        [[1, 3], [2]], True, True, finish_reasons=[FinishReason.LENGTH, FinishReason.END_ID]
    )
    ended.log_probs = [[-1.0, -2.0], [-3.0]]
    ended.num_cached_tokens = 5
    first, second = beams_of(ended)

    assert (first.output_token_ids, first.log_probs, first.sequence_index) == (
        [[1, 3]],
        [[-1.0, -2.0]],
        0,
    )
    assert (second.output_token_ids, second.log_probs, second.sequence_index) == (
        [[2]],
        [[-3.0]],
        1,
    )
    assert (first.finish_reasons, second.finish_reasons) == (
        [FinishReason.LENGTH],
        [FinishReason.END_ID],
    )


def test_a_search_that_ends_with_too_few_beams_fails_and_leaves_nobody_waiting(
    searching: Host,
) -> None:
    status, body = post(
        searching, LMI, {"inputs": "run a", "parameters": {"num_beams": 2, "max_new_tokens": 3}}
    )
    assert (status, body["generated_text"]) == (200, "aaa")

    status, body = post(
        searching, LMI, {"inputs": "lack a", "parameters": {"num_beams": 2, "max_new_tokens": 3}}
    )

    assert (status, body["error"]) == (
        GenerationFailed.status,
        "the engine found only 1 of 2 beams",
    )


def test_the_script_gives_as_many_beams_as_asked() -> None:
    request = Request((1,), 9, sampling_config=SamplingConfig(4, num_return_sequences=2))
    response = beams(
        Response(1, Result([[97, END_ID]], True, True, finish_reasons=[FinishReason.END_ID])),
        request,
    )
    assert response.result is not None and response.result.output_token_ids == [
        [97, END_ID],
        [97, 49, END_ID],
    ]


@pytest.mark.parametrize("name", ["num_beams", "n", "best_of"])
def test_a_formatter_of_user_code_writes_one_sequence(name: str) -> None:
    body = json.dumps(in_lmi(do_sample=True, **{name: 2})).encode()
    message = lmi.read(body, None, ModelConfig(path="scripted", name="scripted"))
    with pytest.raises(
        Unsupported, match=rf"^parameters\.{name} is not supported here: the model's own output"
    ):
        OutputFormatter(None, message, lmi.parse(message))
