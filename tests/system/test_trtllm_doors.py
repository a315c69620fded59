"""Every API over TensorRT-LLM's handler, on whole servers with the strict double of its package.

The double chooses tokens by a small function of the last ones, so texts, log-probs, beams and
structures are real, and some failed requests end its engine. One server has main of August 2026.
The other one has main of October 2025 and runs every request as a beam search, since TensorRT-LLM
runs all at one width. None of this has run on the real package.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.handlers.trtllm.double import encoded, write_double
from tests.handlers.trtllm.double.knobs import VARIABLE
from tests.handlers.vllm.small_adapters import write_adapter
from tests.served import Server, serve
from tests.system.container import ENGINES, ROOT, wait_until
from tests.system.test_apis import CASES
from tests.tiny_models import CONTEXT_LENGTH, VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.timeout(300)

SETTINGS = (
    "option.rolling_batch=trtllm",
    "option.model_name=tiny",
    "option.max_rolling_batch_size=16",
    "frontend_workers=1",
)
# Failed requests, after which the engine ends itself
ERROR_BUDGET = 1
# Xgrammar is the default
ABLE = (
    "option.enable_lora=true",
    "option.disable_overlap_scheduler=true",
)
# Of the server that searches beams
WIDTH = 3
PROMPT = "The quick"
SAMPLED = {"do_sample": True, "seed": 7}
LMI = "/invocations"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TRITON = "/v2/models/tiny/generate"
TRITON_STREAM = "/v2/models/tiny/generate_stream"
TGI = "/generate"
TGI_STREAM = "/generate_stream"
USER = {"role": "user", "content": "What is the weather?"}
CITY = {"enum": ["Paris", "Oslo"]}
SCHEMA = {
    "type": "object",
    "properties": {"city": CITY},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@contextmanager
def on_double(folder: Path, profile: str, *settings: str) -> Iterator[Server]:
    write_double(folder / "package", profile)
    model = shutil.copytree(tiny_model("llama"), folder / "tiny")
    write_adapter(model / "adapters" / "formal", seed=1)
    environ = {
        "PYTHONPATH": ":".join(map(str, (folder / "package", ENGINES, ROOT))),
        VARIABLE: encoded(error_budget=ERROR_BUDGET),
    }
    with serve(model, *SETTINGS, *settings, environ=environ) as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with on_double(tmp_path_factory.mktemp("main"), "main-2026-08", *ABLE) as server:
        yield server


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with on_double(
        tmp_path_factory.mktemp("search"), "main-2025-10", f"option.max_beam_width={WIDTH}"
    ) as server:
        yield server


def ask(server: Server, path: str, body: Mapping[str, Any]) -> Any:
    answer = server.post(body, path)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def lmi(server: Server, **parameters: Any) -> dict[str, Any]:
    answer: dict[str, Any] = ask(server, LMI, {"inputs": PROMPT, "parameters": parameters})
    return answer


def text(server: Server, **parameters: Any) -> str:
    return str(lmi(server, **parameters)["generated_text"])


def tgi(server: Server, **parameters: Any) -> dict[str, Any]:
    answer: dict[str, Any] = ask(
        server, TGI, {"inputs": PROMPT, "parameters": {"max_new_tokens": 30, **parameters}}
    )
    return answer


def triton(server: Server, **inputs: Any) -> dict[str, Any]:
    answer: dict[str, Any] = ask(server, TRITON, {"text_input": PROMPT, **inputs})
    return answer


def completion(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, **fields}
    answer: dict[str, Any] = ask(server, COMPLETIONS, body)
    return answer


def chat(server: Server, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = ask(server, CHAT, {"messages": [USER], "max_tokens": 30, **fields})
    choice: dict[str, Any] = answer["choices"][0]
    return choice


# Texts and streams.


@pytest.mark.parametrize("name", CASES)
def test_a_greedy_prompt_has_the_same_text_at_every_api_and_a_stream_joins_to_it(
    server: Server, name: str
) -> None:
    for prompt in (PROMPT, "Straße 狐\n\t"):
        expected = CASES["lmi"].answer(server, prompt, 25)
        assert expected and CASES[name].answer(server, prompt, 25) == expected


def test_a_chat_streams_the_text_that_it_answers_whole_at_both_of_its_paths(server: Server) -> None:
    body = {"messages": [USER], "max_tokens": 25, "temperature": 0}
    whole = ask(server, CHAT, body)["choices"][0]["message"]["content"]

    assert whole and ask(server, LMI, body)["choices"][0]["message"]["content"] == whole

    for path, beginning in ((CHAT, "data: "), (LMI, "")):
        lines = server.post({**body, "stream": True}, path).body.decode().splitlines()
        records = [json.loads(line.removeprefix(beginning)) for line in lines if line.endswith("}")]

        assert (
            "".join(record["choices"][0]["delta"].get("content") or "" for record in records)
            == whole
        )


def test_requests_at_once_have_the_texts_that_each_has_alone(server: Server) -> None:
    prompts = [f"She sells {number}" for number in range(24)]
    alone = [CASES["lmi"].answer(server, prompt, 25) for prompt in prompts]
    names = islice(
        cycle(("lmi", "lmi sse", "triton stream", "tgi", "completions stream")), len(prompts)
    )
    with ThreadPoolExecutor(len(prompts)) as pool:
        at_once = pool.map(
            lambda name, prompt: CASES[name].answer(server, prompt, 25), names, prompts
        )
        assert list(at_once) == alone


def test_a_client_that_leaves_frees_its_place(server: Server) -> None:
    body = {
        "inputs": PROMPT,
        "parameters": {"max_new_tokens": 900, "ignore_eos_token": True},
        "stream": True,
    }
    with server.open(body) as response:
        assert response.readline()

    wait_until(server.is_idle, "the request of a client that left is over")
    assert text(server, max_new_tokens=2)


# Why an answer ended.


def test_each_api_says_that_the_limit_ended_an_answer(server: Server) -> None:
    details = lmi(server, max_new_tokens=4, details=True)["details"]
    assert (details["finish_reason"], details["generated_tokens"], len(details["tokens"])) == (
        "length",
        4,
        4,
    )
    assert tgi(server, max_new_tokens=4, details=True)["details"]["finish_reason"] == "length"
    assert triton(server, max_tokens=4, return_finish_reason=True)["finish_reason"] == "length"
    assert completion(server, max_tokens=4)["choices"][0]["finish_reason"] == "length"
    assert chat(server, max_tokens=4, temperature=0)["finish_reason"] == "length"


def test_each_api_says_that_the_model_ended_an_answer(server: Server) -> None:
    """After the last letter of a structure only the end token is allowed."""
    answer = lmi(server, guided_regex="yes", details=True)

    assert (answer["generated_text"], answer["details"]["finish_reason"]) == ("yes", "eos_token")

    answer = tgi(server, grammar={"type": "regex", "value": "yes"}, details=True)
    assert (answer["generated_text"], answer["details"]["finish_reason"]) == ("yes", "eos_token")

    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "yes"}
    answer = triton(server, return_finish_reason=True, **guide)

    assert (answer["text_output"], answer["finish_reason"]) == ("yes", "stop")
    assert completion(server, guided_regex="yes")["choices"][0]["finish_reason"] == "stop"
    assert chat(server, guided_regex="yes")["finish_reason"] == "stop"


def test_each_api_ends_an_answer_at_a_stop_string(server: Server) -> None:
    answer_text = text(server)
    stop = next(
        answer_text[at : at + 2]
        for at in range(len(answer_text) // 3, len(answer_text))
        if answer_text.index(answer_text[at : at + 2]) == at
    )
    before = answer_text.partition(stop)[0]
    answer = lmi(server, stop_sequences=[stop], details=True)

    assert (answer["generated_text"], answer["details"]["finish_reason"]) == (
        before,
        "stop_sequence",
    )
    assert text(server, stop=[stop]) == before
    assert text(server, stop=[stop], include_stop_str_in_output=True) == before + stop

    answer = tgi(server, stop=[stop], details=True)
    assert (answer["generated_text"], answer["details"]["finish_reason"]) == (
        before + stop,
        "stop_sequence",
    )

    answer = triton(server, stop_words=[stop], return_finish_reason=True)
    assert (answer["text_output"], answer["finish_reason"]) == (before, "stop")

    choice = completion(server, stop=[stop])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (before, "stop")


def test_a_stop_token_ends_an_answer_and_is_its_last_token(server: Server) -> None:
    ids = [token["id"] for token in lmi(server, details=True)["details"]["tokens"]]
    at = next(at for at in range(5, len(ids)) if ids.index(ids[at]) == at)
    details = lmi(server, details=True, stop_token_ids=[ids[at]])["details"]

    assert [token["id"] for token in details["tokens"]] == ids[: at + 1]
    assert details["finish_reason"] == "stop_sequence"


def test_words_that_are_forbidden_are_not_in_the_text(server: Server) -> None:
    letter = text(server)[3]
    assert letter not in text(server, bad_sequences=[letter])
    assert letter not in triton(server, bad_words=[letter])["text_output"]


# Log-probs.


def test_log_probs_are_the_same_at_every_api(server: Server) -> None:
    details = lmi(server, details=True, logprobs=2)["details"]
    log_probs = [token["log_prob"] for token in details["tokens"]]

    assert (
        len(log_probs) == 30
        and all(log_prob <= 0 for log_prob in log_probs)
        and len({*log_probs}) > 5
    )

    for token, top in zip(details["tokens"], details["top_tokens"], strict=True):
        assert len(top) == 2 and (top[0]["id"], top[0]["log_prob"]) == (
            token["id"],
            token["log_prob"],
        )

    choice = completion(server, logprobs=2)["choices"][0]["logprobs"]
    assert choice["token_logprobs"] == pytest.approx(log_probs, abs=1e-5)

    tokens = tgi(server, details=True, top_n_tokens=2)["details"]["tokens"]
    assert [token["logprob"] for token in tokens] == pytest.approx(log_probs, abs=1e-5)
    assert triton(server, return_log_probs=True)["output_log_probs"] == pytest.approx(
        log_probs, abs=1e-5
    )

    lines = server.post({"inputs": PROMPT, "stream": True}).lines
    assert sum(line["token"]["log_prob"] for line in lines) == pytest.approx(
        sum(log_probs), abs=1e-4
    )

    content = chat(server, temperature=0, logprobs=True, top_logprobs=2)["logprobs"]["content"]
    assert all(len(token["top_logprobs"]) == 2 and token["logprob"] <= 0 for token in content)


def test_the_prompt_has_log_probs_but_for_its_first_token(server: Server) -> None:
    for details in (
        lmi(server, details=True, decoder_input_details=True)["details"],
        lmi(server, details=True, prompt_logprobs=2)["details"],
    ):
        first, *later_tokens = details["prefill"]
        assert (
            first["log_prob"] is None
            and later_tokens
            and all(token["log_prob"] <= 0 for token in later_tokens)
        )

    assert [len(token["top_tokens"]) for token in later_tokens] == [2] * len(later_tokens)


# Sampling, several sequences, beams.


def test_a_seed_repeats_an_answer_and_lmi_s_defaults_for_this_engine_hold(server: Server) -> None:
    greedy = text(server)
    drawn = {text(server, do_sample=True, seed=seed) for seed in range(3)}

    assert len({greedy, *drawn}) == 4
    assert text(server, **SAMPLED) == text(server, **SAMPLED, temperature=1.0, top_k=5, top_p=0.85)
    assert text(server, **SAMPLED) != text(server, **SAMPLED, top_k=0, top_p=1)
    assert (
        text(server, seed=7, top_k=50)
        == text(server, seed=7, top_k=50, temperature=0.8, top_p=0)
        != greedy
    )

    for means_greedy in (
        {"temperature": 0.8, "top_k": 0, "top_p": 0},
        {**SAMPLED, "top_k": 1},
        {"top_k": 1},
    ):
        assert text(server, **means_greedy) == greedy


def test_penalties_avoid_what_was_said(server: Server) -> None:
    plain = len({*text(server, max_new_tokens=100)})
    assert (
        len(
            {
                *text(
                    server,
                    max_new_tokens=100,
                    repetition_penalty=2.0,
                    presence_penalty=2,
                    frequency_penalty=2,
                )
            }
        )
        > plain
    )


def test_several_sequences_have_the_texts_of_their_seeds(server: Server) -> None:
    alone = [text(server, do_sample=True, seed=seed) for seed in (7, 8, 9)]
    answer = lmi(server, **SAMPLED, n=3, details=True)
    other_texts = [
        sequence_answer["generated_text"]
        for sequence_answer in answer["details"]["best_of_sequences"]
    ]

    assert sorted([answer["generated_text"], *other_texts]) == sorted(alone) and len({*alone}) == 3

    choices = completion(server, n=3, seed=7, temperature=1)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2] and len(
        {choice["text"] for choice in choices}
    ) == 3

    answer = tgi(server, do_sample=True, best_of=2, details=True)
    assert len(answer["details"]["best_of_sequences"]) == 1


def test_a_beam_search_answers_its_beams_at_every_api_that_has_one(search: Server) -> None:
    answer = lmi(search, num_beams=WIDTH, details=True)
    beams = [
        answer["generated_text"],
        *(
            sequence_answer["generated_text"]
            for sequence_answer in answer["details"]["best_of_sequences"]
        ),
    ]

    assert len({*beams}) == WIDTH and text(search, num_beams=WIDTH, n=2) == beams[0]

    choices = completion(search, use_beam_search=True, n=2, best_of=WIDTH)["choices"]
    assert [choice["text"] for choice in choices] == beams[:2]
    assert triton(search, beam_width=WIDTH)["text_output"] == beams


def test_another_width_than_the_engine_s_is_refused_and_a_search_is_not_streamed(
    search: Server,
) -> None:
    rule = (
        f"must be {WIDTH} (option.max_beam_width): TensorRT-LLM runs all requests at one beam width"
    )
    for parameters in ({}, {"num_beams": 2}):
        message = refusal(search, LMI, {"inputs": PROMPT, "parameters": parameters})
        assert message.startswith(f"parameters.num_beams {rule}")

    for path, body in (
        (LMI, {"inputs": PROMPT, "parameters": {"num_beams": WIDTH}, "stream": True}),
        (COMPLETIONS, {"prompt": PROMPT, "use_beam_search": True, "n": WIDTH, "stream": True}),
        (TRITON_STREAM, {"text_input": PROMPT, "beam_width": WIDTH, "stream": True}),
    ):
        assert search.post(body, path).status == (424 if path == LMI else 400)


# Structures.


@pytest.mark.parametrize(
    ("name", "value", "form"),
    [
        ("guided_regex", "[ab]{3}", "[ab]{3}"),
        ("guided_choice", ["so (a+b)", "no.t"], r"so \(a\+b\)|no\.t"),
        ("guided_grammar", 'root ::= "yes" | "no"', "yes|no"),
        ("guided_json", SCHEMA, r'\{\s*"city"\s*:\s*"(Paris|Oslo)"\s*\}'),
    ],
)
def test_lmi_and_openai_apply_a_form(server: Server, name: str, value: object, form: str) -> None:
    sampling_fields = {name: value}
    assert re.fullmatch(form, text(server, max_new_tokens=200, do_sample=True, **sampling_fields))
    assert re.fullmatch(form, chat(server, max_tokens=200, **sampling_fields)["message"]["content"])
    assert re.fullmatch(
        form,
        completion(server, max_tokens=200, temperature=1, **sampling_fields)["choices"][0]["text"],
    )


def test_a_response_format_and_a_forced_call_have_the_form_of_their_schema(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    jsonschema.validate(json.loads(text(server, max_new_tokens=200, response_format=form)), SCHEMA)
    jsonschema.validate(
        json.loads(chat(server, max_tokens=200, response_format=form)["message"]["content"]), SCHEMA
    )
    choice = chat(
        server,
        max_tokens=200,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    [call] = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "weather")

    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_triton_and_tgi_apply_a_schema_and_a_structure_streams(server: Server) -> None:
    schema = {
        "guided_decoding_guide_type": "json_schema",
        "guided_decoding_guide": json.dumps(SCHEMA),
    }
    jsonschema.validate(json.loads(triton(server, max_tokens=200, **schema)["text_output"]), SCHEMA)
    answer = tgi(server, max_new_tokens=200, grammar={"type": "json", "value": SCHEMA})
    jsonschema.validate(json.loads(answer["generated_text"]), SCHEMA)
    lines = server.post(
        {"inputs": PROMPT, "parameters": {"guided_regex": "[ab]{20}"}, "stream": True}
    ).lines

    assert len(lines) > 3 and re.fullmatch(
        "[ab]{20}", "".join(line["token"]["text"] for line in lines)
    )


# Adapters.


def test_an_adapter_is_used_by_its_name_at_every_api(server: Server) -> None:
    formal = ask(server, LMI, {"inputs": PROMPT, "adapters": "formal"})["generated_text"]
    assert formal != text(server)
    assert tgi(server, adapter_id="formal")["generated_text"] == formal
    assert triton(server, lora_name="formal")["text_output"] == formal
    assert completion(server, model="formal")["choices"][0]["text"] == formal
    assert CASES["lmi"].answer(server, PROMPT, 30) == text(server)


# Bad requests. None of them may reach the engine, whose budget of errors they would use up.

TOO_LONG = "qzx" * CONTEXT_LENGTH
BAD: list[tuple[str, dict[str, Any], str]] = [
    (
        LMI,
        {"inputs": "a", "parameters": {"stop_token_ids": [VOCAB_SIZE]}},
        "parameters.stop_token_ids",
    ),
    (LMI, {"inputs": "a", "parameters": {"max_new_tokens": 0}}, "parameters.max_new_tokens"),
    (LMI, {"inputs": "a", "parameters": {"guided_regex": "(a"}}, "parameters.guided_regex"),
    (
        LMI,
        {"inputs": "a", "parameters": {"guided_grammar": "root ::= ("}},
        "parameters.guided_grammar",
    ),
    (
        LMI,
        {"inputs": "a", "parameters": {"typical_p": 0.5, "do_sample": True}},
        "parameters.typical_p",
    ),
    (LMI, {"inputs": "a", "parameters": {"num_beams": 2}}, "parameters.num_beams"),
    (LMI, {"inputs": "a", "parameters": {"stop": "x"}}, "parameters.stop"),
    (
        LMI,
        {"inputs": "a", "parameters": {"logits_post_processor_name": "x"}},
        "parameters.logits_post_processor_name",
    ),
    (LMI, {"inputs": "a", "adapters": "nobody"}, "nobody is not registered"),
    (LMI, {"inputs": TOO_LONG}, "inputs"),
    (COMPLETIONS, {"prompt": [1, 2, VOCAB_SIZE]}, "prompt"),
    (COMPLETIONS, {"prompt": TOO_LONG}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
    (CHAT, {"messages": [USER], "guided_regex": "(a"}, "guided_regex"),
    (CHAT, {"messages": [USER], "response_format": {"type": "xml"}}, "response_format"),
    (TRITON, {"text_input": "a", "max_tokens": 0}, "max_tokens"),
    (
        TRITON,
        {"text_input": "a", "guided_decoding_guide_type": "regex", "guided_decoding_guide": "(a"},
        "guided",
    ),
    (TRITON, {"text_input": "a", "beam_width": 2}, "beam_width"),
    (
        TGI,
        {"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": "(a"}}},
        "parameters.grammar",
    ),
    (TGI, {"inputs": TOO_LONG}, "inputs"),
    (TGI, {"inputs": "a", "parameters": {"adapter_id": "nobody"}}, "nobody is not registered"),
]
STATUSES = {LMI: 424, COMPLETIONS: 400, CHAT: 400, TRITON: 400, TGI: 422}


def refusal(server: Server, path: str, body: Mapping[str, Any]) -> str:
    """The message of an error, which has the form and the status of its API."""
    answer = server.post(body, path)
    answer_body = json.loads(answer.body)
    assert answer.status == STATUSES[path], answer.body
    if path in (COMPLETIONS, CHAT):
        assert answer_body["error"]["type"] == "invalid_request_error"
        return str(answer_body["error"]["message"])

    if path == TGI:
        assert answer_body["error_type"] == "validation"

    if path == LMI:
        assert (
            answer_body["generated_text"],
            answer_body["details"]["finish_reason"],
            answer_body["code"],
        ) == (
            "",
            "error",
            answer.status,
        )

    return str(answer_body["error"])


def test_a_bad_request_is_refused_in_its_api_s_form_and_the_good_one_beside_it_is_unhurt(
    server: Server,
) -> None:
    parameters = {"max_new_tokens": 400, "ignore_eos_token": True}
    whole = text(server, **parameters)
    with server.open({"inputs": PROMPT, "parameters": parameters, "stream": True}) as response:
        lines = [response.readline()]
        for path, body, message in BAD:
            assert message in refusal(server, path, body), (path, body)

        lines += response.readlines()

    assert "".join(json.loads(line)["token"]["text"] for line in lines) == whole


@pytest.mark.parametrize(
    ("name", "good"),
    [("server", {}), ("search", {"num_beams": WIDTH})],
    ids=["main-2026-08", "main-2025-10"],
)
def test_a_burst_of_bad_requests_does_not_reach_the_engine(
    request: pytest.FixtureRequest, name: str, good: dict[str, int]
) -> None:
    server: Server = request.getfixturevalue(name)
    pids = server.pids("lmi-engine")
    with ThreadPoolExecutor(10) as pool:
        bad = list(islice(cycle(BAD), 50))
        answers = pool.map(lambda one: server.post(one[1], one[0]).status, bad)
        assert list(answers) == [STATUSES[path] for path, *_ in bad]

    assert text(server, max_new_tokens=2, **good)
    assert server.metric("lmi_engine_restarts_total") == 0
    assert pids and server.pids("lmi-engine") == pids
