"""The documented parameters of LMI with vLLM, one by one, over HTTP: defaults, effects, refusals,
wrong types.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.served import Server
from tests.system.container import Answer
from tests.tiny_models import END_ID

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PROMPT = "The quick"
SAMPLED = {"do_sample": True, "seed": 7}
DETAILS = {"details": True}

# LMI's lists: the parameters of every rolling batch, and the additional ones of vLLM, with their
# defaults.
COMMON: dict[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "repetition_penalty": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "max_new_tokens": 30,
    "details": False,
    "return_full_text": False,
    "stop_sequences": None,
    "decoder_input_details": False,
}
OF_VLLM: dict[str, Any] = {
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "n": 1,
    "best_of": 1,
    "num_beams": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
    "stop_token_ids": None,
    "include_stop_str_in_output": False,
    "ignore_eos_token": False,
    "logprobs": None,
    "prompt_logprobs": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
NAMES = {"seed", *COMMON, *OF_VLLM}


def post(wide: Server, parameters: dict[str, Any], **fields: Any) -> Answer:
    return wide.post({"inputs": PROMPT, "parameters": parameters, **fields})


def ask(wide: Server, **parameters: Any) -> dict[str, Any]:
    answer = post(wide, parameters)
    assert answer.status == 200, answer.body
    decoded: dict[str, Any] = json.loads(answer.body)
    return decoded


def refusal(wide: Server, parameters: dict[str, Any]) -> str:
    answer = post(wide, parameters)
    body = json.loads(answer.body)
    assert (answer.status, body["code"], body["generated_text"]) == (424, 424, ""), answer.body
    return str(body["error"])


def text(wide: Server, **parameters: Any) -> str:
    return str(ask(wide, **parameters)["generated_text"])


def ids(answer: dict[str, Any]) -> list[int]:
    return [token["id"] for token in answer["details"]["tokens"]]


# Defaults.


@pytest.mark.parametrize(("name", "value"), [*COMMON.items(), *OF_VLLM.items()], ids=str)
@pytest.mark.parametrize(
    "others", [{}, SAMPLED, DETAILS], ids=["greedy", "sampled", "with details"]
)
def test_a_documented_default_means_as_if_left_out(
    wide: Server, name: str, value: Any, others: dict[str, Any]
) -> None:
    if name not in others:
        assert post(wide, {**others, name: value}).body == post(wide, others).body


# Effects. Each checks what a value changes, compared with the same request without it.


def samples(wide: Server) -> None:
    greedy = text(wide)
    assert len({greedy, *(text(wide, do_sample=True, seed=seed) for seed in range(3))}) == 4


def repeats(wide: Server) -> None:
    assert text(wide, **SAMPLED) == text(wide, **SAMPLED) != text(wide, **SAMPLED | {"seed": 8})


def cools(wide: Server) -> None:
    assert text(wide, **SAMPLED, temperature=0) == text(wide) != text(wide, **SAMPLED)
    assert text(wide, **SAMPLED, temperature=2) != text(wide, **SAMPLED)


def leaves_the_best(**choice: Any) -> Callable[[Server], None]:
    def check(wide: Server) -> None:
        assert text(wide, **SAMPLED, **choice) == text(wide) != text(wide, **SAMPLED)

    return check


def avoids_what_was_said(name: str, value: float) -> Callable[[Server], None]:
    def check(wide: Server) -> None:
        plain, changed = (
            ask(wide, max_new_tokens=60, **DETAILS, **parameters)
            for parameters in ({}, {name: value})
        )
        assert len(set(ids(changed))) > len(set(ids(plain)))

    return check


def shortens(wide: Server) -> None:
    whole = ask(wide, **DETAILS)
    short = ask(wide, **DETAILS, max_new_tokens=5)
    assert short["details"]["generated_tokens"] == 5 and ids(short) == ids(whole)[:5]
    assert short["details"]["finish_reason"] == "length"


def tells_details(wide: Server) -> None:
    assert "details" not in ask(wide)
    details = ask(wide, **DETAILS)["details"]
    assert details["generated_tokens"] == len(details["tokens"]) == 30
    assert all(token["log_prob"] <= 0 for token in details["tokens"])


def repeats_the_prompt(wide: Server) -> None:
    assert text(wide, return_full_text=True) == PROMPT + text(wide)


def stop_string(wide: Server) -> str:
    """Two characters that occur for the first time in the middle of the greedy answer."""
    answer_text = text(wide)
    return next(
        answer_text[at : at + 2]
        for at in range(len(answer_text) // 3, len(answer_text))
        if answer_text.index(answer_text[at : at + 2]) == at
    )


def stops(wide: Server) -> None:
    stop = stop_string(wide)
    stopped = ask(wide, **DETAILS, stop_sequences=[stop])
    assert stopped["generated_text"] == text(wide).partition(stop)[0]
    assert stopped["details"]["finish_reason"] == "stop_sequence"


def shows_the_stop(wide: Server) -> None:
    stop = stop_string(wide)
    before = text(wide).partition(stop)[0]
    assert text(wide, stop_sequences=[stop], include_stop_str_in_output=True) == before + stop


def stops_at_a_token(wide: Server) -> None:
    whole = ids(ask(wide, **DETAILS))
    at = next(at for at in range(8, 30) if whole.index(whole[at]) == at)
    stopped = ask(wide, **DETAILS, stop_token_ids=[whole[at], 5])
    assert (
        ids(stopped) == whole[: at + 1] and stopped["details"]["finish_reason"] == "stop_sequence"
    )


def tells_of_the_prompt(wide: Server) -> None:
    assert "prefill" not in ask(wide, **DETAILS)["details"]
    first, *later_tokens = ask(wide, **DETAILS, decoder_input_details=True)["details"]["prefill"]
    assert (
        first["log_prob"] is None
        and later_tokens
        and all(token["log_prob"] <= 0 for token in later_tokens)
    )


def tells_alternatives_of_the_prompt(wide: Server) -> None:
    prefill = ask(wide, **DETAILS, prompt_logprobs=2)["details"]["prefill"]
    assert [len(token["top_tokens"]) for token in prefill[1:]] == [2] * (len(prefill) - 1)


def tells_alternatives(wide: Server) -> None:
    details = ask(wide, **DETAILS, logprobs=3)["details"]
    for token, top in zip(details["tokens"], details["top_tokens"], strict=True):
        assert len(top) == 3 and (top[0]["id"], top[0]["log_prob"]) == (
            token["id"],
            token["log_prob"],
        )


LONG = {"do_sample": True, "temperature": 2, "max_new_tokens": 400, "details": True}


def seed_that_ends(wide: Server) -> int:
    """A random model draws its end token by chance at a high temperature."""
    for seed in range(40):
        if ask(wide, **LONG, seed=seed)["details"]["finish_reason"] == "eos_token":
            return seed

    raise AssertionError("it never ends")


def goes_on(wide: Server) -> None:
    seed = seed_that_ends(wide)
    ended = ask(wide, **LONG, seed=seed)
    longer = ask(wide, **LONG, seed=seed, ignore_eos_token=True)
    num = len(ids(ended))

    assert ids(ended)[-1] == END_ID and ids(longer)[:num] == ids(ended)
    assert len(ids(longer)) == 400 > num and longer["details"]["finish_reason"] == "length"


def shows_special_tokens(wide: Server) -> None:
    sampling_fields = {**LONG, "seed": seed_that_ends(wide), "ignore_eos_token": True}
    assert "<|end|>" in text(wide, **sampling_fields, skip_special_tokens=False)
    assert "<|end|>" not in text(wide, **sampling_fields)


def gives_several(**given: int) -> Callable[[Server], None]:
    def check(wide: Server) -> None:
        answer = ask(wide, **SAMPLED, **DETAILS, **given)
        other_sequences = answer["details"]["best_of_sequences"]
        texts = {
            answer["generated_text"],
            *(sequence["generated_text"] for sequence in other_sequences),
        }
        assert len(other_sequences) == 2 and len(texts) == 3 and text(wide, **SAMPLED) in texts

    return check


def test_a_rule_that_vllm_lacks_beside_beams_is_refused_by_its_name(wide: Server) -> None:
    message = "is not supported here: vllm has no penalties in a beam search"
    assert (
        refusal(wide, {"num_beams": 2, "repetition_penalty": 1.5})
        == f"parameters.repetition_penalty {message}"
    )


def searches(wide: Server) -> None:
    answer = ask(wide, **DETAILS, num_beams=3)
    other_sequences = answer["details"]["best_of_sequences"]

    assert (
        len(
            {
                answer["generated_text"],
                *(sequence["generated_text"] for sequence in other_sequences),
            }
        )
        == 3
    )

    assert (
        ask(wide, **DETAILS, num_beams=3, n=2)["details"]["best_of_sequences"]
        == other_sequences[:1]
    )


def changes_nothing(name: str, value: object) -> Callable[[Server], None]:
    def check(wide: Server) -> None:
        for fields in ({}, SAMPLED):
            assert post(wide, {**fields, name: value}).body == post(wide, fields).body

    return check


EFFECTS: dict[str, Callable[[Server], None]] = {
    "do_sample": samples,
    "seed": repeats,
    "temperature": cools,
    "repetition_penalty": avoids_what_was_said("repetition_penalty", 2.0),
    "top_k": leaves_the_best(top_k=1),
    "top_p": leaves_the_best(top_p=1e-6),
    "max_new_tokens": shortens,
    "details": tells_details,
    "return_full_text": repeats_the_prompt,
    "stop_sequences": stops,
    "decoder_input_details": tells_of_the_prompt,
    "min_p": leaves_the_best(min_p=1.0),
    "presence_penalty": avoids_what_was_said("presence_penalty", 2.0),
    "frequency_penalty": avoids_what_was_said("frequency_penalty", 2.0),
    "n": gives_several(n=3),
    "best_of": gives_several(best_of=3),
    "num_beams": searches,
    "length_penalty": changes_nothing("length_penalty", 2.0),  # without beams
    "early_stopping": changes_nothing("early_stopping", True),  # without beams
    "stop_token_ids": stops_at_a_token,
    "include_stop_str_in_output": shows_the_stop,
    "ignore_eos_token": goes_on,
    "logprobs": tells_alternatives,
    "prompt_logprobs": tells_alternatives_of_the_prompt,
    "skip_special_tokens": shows_special_tokens,
    "spaces_between_special_tokens": changes_nothing(
        "spaces_between_special_tokens", False
    ),  # they are skipped
}
REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 9},  # over option.max_beam_width
    # Documented only for lmi-dist
    "typical_p": {"typical_p": 0.5, **SAMPLED},
    "temperature": {"temperature": 2.5, **SAMPLED},  # over vLLM's maximum
    "logprobs": {"logprobs": 21, **DETAILS},
    "prompt_logprobs": {"prompt_logprobs": 21, **DETAILS},
    "stop_token_ids": {"stop_token_ids": [320]},
}


def test_no_documented_parameter_is_forgotten() -> None:
    assert NAMES == {*EFFECTS} == {*WRONG}


@pytest.mark.parametrize("name", EFFECTS)
def test_a_value_that_means_something_shows_its_effect(wide: Server, name: str) -> None:
    EFFECTS[name](wide)


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_cannot_do_is_refused_by_name_and_the_next_one_works(
    wide: Server, name: str
) -> None:
    assert refusal(wide, REFUSED[name]).startswith(f"parameters.{name} ")
    assert text(wide, max_new_tokens=2)


# Values of a wrong type or out of any range. Some would end vLLM's engine or make it hang.

NO_BOOL: tuple[Any, ...] = ("yes", 1, 0.0, [])
NO_NUMBER: tuple[Any, ...] = ("1", True, [1], {})
NO_INT: tuple[Any, ...] = ("5", 2.5, True, [1], 2**70)
WRONG: dict[str, tuple[Any, ...]] = {
    "do_sample": NO_BOOL,
    "seed": (*NO_INT, -2),  # -1 draws one
    "temperature": (*NO_NUMBER, -1),
    "repetition_penalty": (*NO_NUMBER, 0, -1),
    "top_k": (*NO_INT, -2),
    "top_p": (*NO_NUMBER, -0.1, 1.1),
    "max_new_tokens": (*NO_INT, 0, -5),
    "details": NO_BOOL,
    "return_full_text": NO_BOOL,
    "stop_sequences": ("stop", [1], [""], {}, True),
    "decoder_input_details": NO_BOOL,
    "min_p": (*NO_NUMBER, -0.1, 1.1),
    "presence_penalty": (*NO_NUMBER, 2.1),
    "frequency_penalty": (*NO_NUMBER, -2.1),
    "n": (*NO_INT, 0, 1000),
    "best_of": (*NO_INT, 0, 1000),
    "num_beams": (*NO_INT, 0),
    "length_penalty": (*NO_NUMBER, -0.5),
    "early_stopping": NO_BOOL,
    "stop_token_ids": ("5", 5, [True], [1.5], ["5"], [-1], [2**70], [None]),
    "include_stop_str_in_output": NO_BOOL,
    "ignore_eos_token": NO_BOOL,
    "logprobs": (*NO_INT, -1),
    "prompt_logprobs": (*NO_INT, -1),
    "skip_special_tokens": NO_BOOL,
    "spaces_between_special_tokens": NO_BOOL,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_type_is_refused_by_name_and_the_next_one_works(wide: Server, name: str) -> None:
    for value in WRONG[name]:
        assert refusal(wide, {**SAMPLED, **DETAILS, name: value}).startswith(
            f"parameters.{name}"
        ), value

    assert text(wide, max_new_tokens=2)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_no_json(wide: Server, number: str) -> None:
    answer = wide.post(b'{"inputs": "a", "parameters": {"temperature": %s}}' % number.encode())
    assert (
        answer.status == 424
        and "NaN and Infinity are no JSON numbers" in json.loads(answer.body)["error"]
    )
    assert text(wide, max_new_tokens=2)


def test_an_adapter_that_is_nowhere_is_refused_and_the_next_one_works(wide: Server) -> None:
    for adapter in ("/no/such/folder", "../../etc", 5):
        answer = post(wide, {}, adapters=adapter)
        assert answer.status == 424 and json.loads(answer.body)["error"].startswith("adapters ")

    assert text(wide, max_new_tokens=2)


def test_a_prompt_longer_than_the_context_is_refused_and_the_next_one_works(wide: Server) -> None:
    answer = wide.post({"inputs": "qzx" * 1000})
    assert answer.status == 424 and "context of 1024 tokens" in json.loads(answer.body)["error"]
    assert text(wide, max_new_tokens=2)
