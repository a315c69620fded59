"""An answer depends only on its request: 64 clients at once get, to the bit, the answers that each
gets alone.

The requests are mixed: whole or streamed, in each of the four forms, greedy or sampled with a seed,
with prompts of one or several chunks, with stop strings or penalties, and some clients leave in the
middle. With a cache too small for all of them, sequences are preempted and recomputed: then the ids
stay and log-probs change only by rounding.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.served import Server
from tests.system.container import wait_until

NUM_CLIENTS = 64
# On a busy machine the requests may arrive so slowly that few run together
MAX_ROUNDS = 5
WORDS = "the quick brown fox jumps over a lazy dog she sells sea shells by the shore 0123 Ünïcode 狐 \n".split(  # noqa: E501
    " "
)
FORMATS = ("json", "jsonlines", "sse")
# Of a log-prob after a recomputation
ROUNDING = 1e-4

Body = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """An answer without its framing. Log-probs are the text of the numbers in the JSON."""

    text: str
    ids: list[int]
    log_probs: list[str]
    top: list[Any]
    finish_reason: str


def make_requests() -> list[Body]:
    """Requests of each kind and length, the same list in every run."""
    draw = random.Random(7)
    return [make_request(draw, number) for number in range(NUM_CLIENTS)]


def make_request(draw: random.Random, number: int) -> Body:
    num_words = draw.choice((1, 3, 10, 40, 120))
    parameters: Body = {
        "max_new_tokens": draw.randint(30, 90),
        "output_formatter": FORMATS[number % 3],
        "details": True,
        "ignore_eos_token": number % 4 == 0,
    }
    kind = number % 5
    if kind in (1, 3):
        parameters |= {
            "do_sample": True,
            "seed": number,
            "temperature": draw.choice((0.7, 1.3)),
            "top_p": 0.95,
        }

    if kind == 2:
        parameters |= {"logprobs": 3}

    if kind == 3:
        parameters |= {"top_k": 20, "repetition_penalty": 1.2}

    if kind == 4:
        parameters |= {"stop_sequences": ["e", "ox "], "frequency_penalty": 0.1}

    return {"inputs": " ".join(draw.choices(WORDS, k=num_words)) or "a", "parameters": parameters}


def make_growing(prompt: str) -> Body:
    """A request that begins with one block of the cache, and needs six at its end."""
    parameters = {
        "max_new_tokens": 330,
        "output_formatter": "json",
        "details": True,
        "ignore_eos_token": True,
    }
    return {"inputs": prompt, "parameters": parameters}


def records(response: bytes, output_format: str) -> list[Any]:
    """The JSON objects of a body. Numbers with a point stay as text."""
    head = b"data: " if output_format == "sse" else b""
    lines = (
        [line for line in response.split(b"\n") if line] if output_format != "json" else [response]
    )
    assert all(line.startswith(head) for line in lines)
    return [json.loads(line.removeprefix(head), parse_float=str) for line in lines]


def said(response: bytes, output_format: str) -> Said:
    """Read an answer of either server. With tgi_compat a whole answer is a list and log-probs have
    another name.
    """
    answer_records = records(response, output_format)
    last = answer_records[-1][0] if isinstance(answer_records[-1], list) else answer_records[-1]

    assert "error" not in last, last

    details = last["details"]
    tokens = (
        details["tokens"]
        if output_format == "json"
        else [record["token"] for record in answer_records]
    )

    top = (
        details.get("top_tokens")
        if output_format == "json"
        else [record.get("top_tokens") for record in answer_records]
    )

    assert details["generated_tokens"] == len(tokens)

    return Said(
        last["generated_text"],
        [token["id"] for token in tokens],
        [log_prob(token) for token in tokens],
        [[(token["id"], log_prob(token)) for token in step] for step in top or [] if step],
        details["finish_reason"],
    )


def log_prob(token: Body) -> str:
    return str(token["log_prob"] if "log_prob" in token else token["logprob"])


def ask(server: Server, body: Body) -> Said:
    answer = server.post(body)
    assert answer.status == 200, answer.body
    return said(answer.body, body["parameters"]["output_formatter"])


def leave(server: Server, body: Body, num_records: int) -> None:
    """A client that leaves, before its answer begins or in the middle of its stream."""
    parameters = {
        **body["parameters"],
        "max_new_tokens": 400,
        "ignore_eos_token": True,
        "stop_sequences": [],
    }
    if num_records == 0:
        server.connect({**body, "parameters": parameters}).close()
        return

    with server.open(
        {**body, "parameters": {**parameters, "output_formatter": "jsonlines"}}
    ) as response:
        for _ in range(num_records):
            assert response.readline()


def crowd(
    server: Server, requests: list[Body], leavers: frozenset[int] = frozenset()
) -> list[Said | None]:
    """Send all at the same moment; None for clients that left."""
    together = threading.Barrier(len(requests))

    def client(number: int) -> Said | None:
        together.wait()
        if number in leavers:
            leave(server, requests[number], number % 4)
            return None

        return ask(server, requests[number])

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(client, range(len(requests))))


def most_running(server: Server, work: Callable[[], Any]) -> tuple[int, Any]:
    """The most requests that ran at once during `work`, and the result of `work`."""
    nums_running = [0]
    done = threading.Event()
    engine = server.engines()[0]

    def look() -> None:
        while not done.wait(0.002):
            nums_running.append(engine.num_running)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        result = work()
    finally:
        done.set()
        watcher.join()

    return max(nums_running), result


REQUESTS = make_requests()
LEAVERS = frozenset(range(5, NUM_CLIENTS, 7))


@pytest.fixture(scope="module")
def alone(tiny: Server) -> list[Said]:
    """The answer to each request when no other is running."""
    return [ask(tiny, body) for body in REQUESTS]


def test_the_requests_are_mixed(alone: list[Said]) -> None:
    assert {answer.finish_reason for answer in alone} == {"length", "eos_token", "stop_sequence"}
    assert len({tuple(answer.ids) for answer in alone}) == NUM_CLIENTS
    assert any(answer.top for answer in alone)
    assert max(len(answer.ids) for answer in alone) > 60


def test_each_of_64_requests_at_once_is_answered_as_if_it_were_alone(
    tiny: Server, alone: list[Said]
) -> None:
    for _ in range(MAX_ROUNDS):
        num_running, answers = most_running(tiny, lambda: crowd(tiny, REQUESTS, LEAVERS))
        for number, answer in enumerate(answers):
            assert answer in (alone[number], None), (
                f"request {number} was answered otherwise in company"
            )

        assert [number for number, answer in enumerate(answers) if answer is None] == sorted(
            LEAVERS
        )

        wait_until(tiny.is_idle, "what the leavers held is free")
        if num_running >= 16:
            break

    assert num_running >= 16, "this was no crowd"


def test_the_form_of_tgi_says_the_same_to_the_bit(tight: Server, alone: list[Said]) -> None:
    num_before = tight.metrics()["lmi_preemptions_total"]
    short = [
        number
        for number, answer in enumerate(alone)
        if len(REQUESTS[number]["inputs"]) + len(answer.ids) < 160
    ]
    few = short[:5]
    assert {REQUESTS[number]["parameters"]["output_formatter"] for number in few} == set(FORMATS)
    assert crowd(tight, [REQUESTS[number] for number in few]) == [alone[number] for number in few]
    assert tight.metrics()["lmi_preemptions_total"] == num_before


def test_a_preempted_request_says_the_same_words(
    tiny: Server, tight: Server, alone: list[Said]
) -> None:
    growing = [make_growing(word) for word in WORDS[:6]]
    expected = alone + [ask(tiny, body) for body in growing]
    num_before = tight.metrics()["lmi_preemptions_total"]
    for _ in range(MAX_ROUNDS):
        for number, answer in enumerate(crowd(tight, REQUESTS + growing, LEAVERS)):
            if answer is not None:
                assert_same_words(answer, expected[number])

        wait_until(tight.is_idle, "what the leavers held is free")
        if tight.metrics()["lmi_preemptions_total"] > num_before:
            break

    assert tight.metrics()["lmi_preemptions_total"] > num_before, "nobody was preempted"


def assert_same_words(answer: Said, expected: Said) -> None:
    assert (answer.ids, answer.text, answer.finish_reason) == (
        expected.ids,
        expected.text,
        expected.finish_reason,
    )
    for got, expected_log_prob in zip(answer.log_probs, expected.log_probs, strict=True):
        assert abs(float(got) - float(expected_log_prob)) < ROUNDING
