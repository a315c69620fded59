"""Guided decoding through every API, on the embedded engine with the demo model."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event
from typing import Any

import jsonschema
import pytest

from lmi.settings.served_folder import demo_folder
from tests.served import Server, serve
from tests.system import weather
from tests.system.container import wait_until
from tests.system.weather import CALL_IT, CITY, FORM, PARAMETERS, USER, WEATHER, check_call_of_it

CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}
TOOLS = [WEATHER, CLOCK]
chat = partial(weather.chat, temperature=1.2)
# White space of JSON may be long
SAMPLED = {"max_new_tokens": 200, "do_sample": True, "seed": 3}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    settings = ("option.model_name=demo", "option.tool_call_parser=json", "frontend_workers=1")
    with serve(demo_folder(), *settings) as server:
        yield server


@pytest.fixture(scope="module")
def tgi() -> Iterator[Server]:
    with serve(demo_folder(), "option.tgi_compat=true", "frontend_workers=1") as server:
        yield server


def lmi(server: Server, **parameters: Any) -> str:
    answer = server.post({"inputs": "Say", "parameters": {**SAMPLED, **parameters}})
    assert answer.status == 200, answer.body
    return str(json.loads(answer.body)["generated_text"])


def triton(server: Server, **inputs: Any) -> str:
    answer = server.post(
        {"text_input": "Say", "max_tokens": 150, **inputs}, "/v2/models/demo/generate"
    )
    assert answer.status == 200, answer.body
    return str(json.loads(answer.body)["text_output"])


@pytest.mark.parametrize(
    ("name", "value", "form"),
    [
        ("guided_regex", "[ab]{3}", "[ab]{3}"),
        ("guided_choice", ["so (a+b)", "no.t"], r"so \(a\+b\)|no\.t"),
        ("guided_grammar", 'root ::= "yes" | "no"', "yes|no"),
    ],
)
def test_lmi_and_openai_apply_a_form(server: Server, name: str, value: object, form: str) -> None:
    assert re.fullmatch(form, lmi(server, **{name: value}))
    assert re.fullmatch(form, chat(server, **{name: value})["message"]["content"])


def test_lmi_and_openai_apply_a_schema(server: Server) -> None:
    # As huggingface_hub's client sends it
    of_tgi = {"type": "json_object", "value": PARAMETERS}
    for fields in (
        {"guided_json": PARAMETERS},
        {"response_format": FORM},
        {"response_format": of_tgi},
    ):
        jsonschema.validate(json.loads(lmi(server, **fields)), PARAMETERS)
        jsonschema.validate(json.loads(chat(server, **fields)["message"]["content"]), PARAMETERS)

    assert isinstance(json.loads(lmi(server, response_format={"type": "json_object"})), dict)
    assert isinstance(
        json.loads(chat(server, response_format={"type": "json_object"})["message"]["content"]),
        dict,
    )


def test_a_forced_call_has_the_form_of_its_function_s_parameters(server: Server) -> None:
    check_call_of_it(chat(server, tools=TOOLS, tool_choice=CALL_IT))


def test_a_required_call_is_one_of_the_functions(server: Server) -> None:
    names = set()
    for seed in range(6):
        choice = chat(
            server, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed
        )
        [call] = choice["message"]["tool_calls"]
        names.add(call["function"]["name"])
        parameters_schema = (
            PARAMETERS
            if call["function"]["name"] == "weather"
            else {"type": "object", "maxProperties": 0}
        )
        jsonschema.validate(json.loads(call["function"]["arguments"]), parameters_schema)

    assert names <= {"weather", "clock"}


def test_a_free_call_needs_no_guide(server: Server) -> None:
    choice = chat(server, tools=TOOLS, max_tokens=10)
    assert choice["finish_reason"] in ("stop", "length", "tool_calls")


def test_triton_applies_the_four_kinds(server: Server) -> None:
    assert re.fullmatch(
        "[ab]{3}",
        triton(server, guided_decoding_guide_type="regex", guided_decoding_guide="[ab]{3}"),
    )

    grammar = {
        "guided_decoding_guide_type": "ebnf_grammar",
        "guided_decoding_guide": 'root ::= "yes" | "no"',
    }
    assert triton(server, **grammar) in ("yes", "no")

    schema = {
        "guided_decoding_guide_type": "json_schema",
        "guided_decoding_guide": json.dumps(PARAMETERS),
    }
    jsonschema.validate(json.loads(triton(server, **schema)), PARAMETERS)

    assert isinstance(json.loads(triton(server, guided_decoding_guide_type="json")), dict)


def test_tgi_applies_a_grammar(tgi: Server) -> None:
    for kind, value in (("regex", "[ab]{3}"), ("json", PARAMETERS)):
        parameters = {**SAMPLED, "grammar": {"type": kind, "value": value}}
        answer = tgi.post({"inputs": "Say", "parameters": parameters}, "/generate")
        assert answer.status == 200, answer.body

        text = json.loads(answer.body)["generated_text"]
        assert (
            re.fullmatch("[ab]{3}", text)
            if kind == "regex"
            else json.loads(text)["city"] in CITY["enum"]
        )

    parameters = {"grammar": {"type": "regex", "value": "(a"}}
    answer = tgi.post({"inputs": "Say", "parameters": parameters}, "/generate")

    assert answer.status == 422, answer.body
    assert json.loads(answer.body)["error"].startswith(
        "parameters.grammar must be a structure that lmi can follow"
    )


def test_a_stop_string_ends_a_guided_answer(server: Server) -> None:
    assert lmi(server, guided_regex="(ab)+c(d|e){40}", stop=["c"]).startswith("ab")
    choice = chat(server, guided_regex="a{20}b{3}", stop=["aab"])
    assert (choice["message"]["content"], choice["finish_reason"]) == ("a" * 18, "stop")


def test_a_guide_streams(server: Server) -> None:
    body = {
        "messages": [USER],
        "max_tokens": 200,
        "seed": 3,
        "stream": True,
        "response_format": FORM,
    }
    answer = server.post(body, "/v1/chat/completions")
    lines = [line[6:] for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    texts = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
    assert sum(map(bool, texts)) > 3

    jsonschema.validate(json.loads("".join(texts)), PARAMETERS)


def test_a_structure_that_cannot_be_followed_is_the_client_s_fault(server: Server) -> None:
    answer = server.post({"messages": [USER], "guided_regex": "(a"}, "/v1/chat/completions")
    error = json.loads(answer.body)["error"]

    assert (answer.status, error["type"], error["param"]) == (
        400,
        "invalid_request_error",
        "guided_regex",
    )
    assert error["message"].startswith("guided_regex must be a structure that lmi can follow: ")

    answer = server.post(
        {"inputs": "Say", "parameters": {"guided_json": {"not": {"multipleOf": 2}}}}
    )

    assert answer.status == 424, answer.body
    assert (
        "parameters.guided_json must be a structure that lmi can follow: not"
        in answer.body.decode()
    )


# With a short limit of a step. A wait for a guide is no step, and never ends the engine.


@pytest.fixture(scope="module")
def hasty() -> Iterator[Server]:
    settings = ("step_timeout=4", "first_step_timeout=4", "frontend_workers=1")
    with serve(demo_folder(), "option.model_name=demo", *settings) as server:
        yield server


def ask(server: Server, regex: str) -> int:
    body = {"messages": [USER], "max_tokens": 8, "guided_regex": regex}
    return server.post(body, "/v1/chat/completions").status


def ask_until_it_is_answered(server: Server, regex: str) -> None:
    """A guide that is late on a busy machine gets 400, one whose compiler is not there 503."""
    statuses: list[int] = []
    wait_until(
        lambda: statuses.append(ask(server, regex)) or statuses[-1] == 200,
        "a guide is followed",
        120.0,
    )
    assert set(statuses) <= {200, 400, 503}


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """Let a process and those that it starts run an eighth of the time, as on a machine that is
    slow or crowded.
    """
    group = os.getpgid(pid)
    over = Event()

    def hold() -> None:
        # The process has ended, which the test will see
        with suppress(ProcessLookupError):
            while not over.wait(0.01):
                os.killpg(group, signal.SIGSTOP)
                over.wait(0.07)
                os.killpg(group, signal.SIGCONT)

    with ThreadPoolExecutor(1) as pool:
        holder = pool.submit(hold)
        try:
            yield
        finally:
            over.set()

    holder.result()


def test_the_first_guide_of_an_engine_on_a_slow_machine_does_not_end_it(hasty: Server) -> None:
    before = hasty.pid("lmi-engine")
    with slowed(before):
        ask_until_it_is_answered(hasty, "[ab]{3}")

    assert hasty.pid("lmi-engine") == before


def test_many_guides_that_explode_end_their_requests_and_not_the_engine(hasty: Server) -> None:
    before = hasty.pid("lmi-engine")
    words = [
        "|".join(f"{bomb}{word:x}{'ab' * 30}{word}" for word in range(20_000)) for bomb in range(8)
    ]
    with ThreadPoolExecutor(8) as pool:
        statuses = set(pool.map(partial(ask, hasty), words))

    assert statuses <= {400, 503} and hasty.pid("lmi-engine") == before
    ask_until_it_is_answered(hasty, "[ab]{4}")


def test_a_compiler_that_hangs_is_started_again_and_the_engine_is_not(hasty: Server) -> None:
    before = hasty.pid("lmi-engine")
    ask_until_it_is_answered(hasty, "[ab]{5}")
    os.kill(hasty.pid("lmi-guides"), signal.SIGSTOP)
    assert ask(hasty, "[ab]{6}") == 503
    ask_until_it_is_answered(hasty, "[ab]{6}")
    assert hasty.pid("lmi-engine") == before
