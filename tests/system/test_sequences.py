"""n and best_of of the LMI API, on a whole server with the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from handlers import lmi_dist
from tests.served import Server, serve
from tests.system.container import wait_until

PROMPT = "Tell me a story about a fox."
NUM_TOKENS = 12
# Sequences of a request
NUM_MOST = 16
NUM_ROWS = 24


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    """A server with fewer rows than two of the widest requests need."""
    folder = Path(lmi_dist.__file__).parent / "demo"
    with serve(folder, "frontend_workers=1", f"option.max_rolling_batch_size={NUM_ROWS}") as server:
        yield server


def body(**parameters: object) -> dict[str, object]:
    """A request with a high temperature, so that sequences differ."""
    sampled = {"do_sample": True, "temperature": 2.0, "seed": 7}
    return {
        "inputs": PROMPT,
        "parameters": {"max_new_tokens": NUM_TOKENS, "details": True, **sampled, **parameters},
    }


def ask(server: Server, **parameters: object) -> dict[str, Any]:
    answer = server.post(body(**parameters))
    assert answer.status == 200, answer.body
    return dict(json.loads(answer.body))


def sequences(answer: dict[str, Any]) -> list[tuple[str, float]]:
    """Text and cumulative log-prob of each sequence, the main one first."""
    details = answer["details"]
    ranked = [
        {**details, "generated_text": answer["generated_text"]},
        *details["best_of_sequences"],
    ]
    for ranked_answer in ranked:
        assert ranked_answer["generated_tokens"] == len(ranked_answer["tokens"]) and ranked_answer[
            "finish_reason"
        ] in (
            "length",
            "eos_token",
        )
        assert (
            "".join(token["text"] for token in ranked_answer["tokens"])
            == ranked_answer["generated_text"]
        )

    return [
        (
            ranked_answer["generated_text"],
            sum(token["log_prob"] for token in ranked_answer["tokens"]),
        )
        for ranked_answer in ranked
    ]


@pytest.mark.parametrize(
    ("given", "num"),
    [({"n": 3}, 3), ({"best_of": 3}, 3), ({"n": 2, "best_of": 4}, 4), ({"n": NUM_MOST}, NUM_MOST)],
    ids=["n", "best_of", "both", "most"],
)
def test_each_sequence_is_what_its_own_seed_gives_and_the_most_probable_comes_first(
    demo: Server, given: dict[str, int], num: int
) -> None:
    together = sequences(ask(demo, **given))
    log_probs = [log_prob for _, log_prob in together]
    assert log_probs == sorted(log_probs, reverse=True)
    alone = [ask(demo, seed=7 + index) for index in range(num)]
    assert all("best_of_sequences" not in sequence_answer["details"] for sequence_answer in alone)
    assert {text for text, _ in together} == {
        sequence_answer["generated_text"] for sequence_answer in alone
    }
    assert len(together) == num and len(set(together)) == num
    assert sequences(ask(demo, **given)) == together


def test_without_details_the_best_is_answered_alone(demo: Server) -> None:
    best = ask(demo, best_of=4)["generated_text"]
    assert ask(demo, best_of=4, details=False) == {"generated_text": best}
    assert best != ask(demo, details=False)["generated_text"], (
        "of four the first is not the best here"
    )


def test_without_a_seed_sequences_and_requests_differ(demo: Server) -> None:
    texts = [text for _ in range(2) for text, _ in sequences(ask(demo, n=3, seed=None))]
    assert len(set(texts)) == 6


def test_greedy_sequences_are_equal_copies(demo: Server) -> None:
    copies = sequences(ask(demo, n=3, do_sample=False))
    alone = ask(demo, do_sample=False)
    assert [text for text, _ in copies] == [alone["generated_text"]] * 3 and len(set(copies)) == 1


def test_prefill_stands_once_and_stop_strings_end_each_sequence_for_itself(demo: Server) -> None:
    plain = [text for text, _ in sequences(ask(demo, n=3))]
    stop = next(char for char in plain[0].strip() if any(char not in text for text in plain[1:]))
    answer = ask(demo, n=3, stop_sequences=[stop], decoder_input_details=True)
    cut = [answer, *answer["details"]["best_of_sequences"]]

    assert sorted(cut_answer["generated_text"] for cut_answer in cut) == sorted(
        text.split(stop)[0] for text in plain
    )
    assert len(answer["details"]["prefill"]) > 1
    assert all("prefill" not in cut_answer for cut_answer in answer["details"]["best_of_sequences"])


@pytest.mark.parametrize("name", ["n", "best_of"])
@pytest.mark.parametrize("stream", [{"output_formatter": "jsonlines"}, {"output_formatter": "sse"}])
def test_a_stream_refuses_several_sequences(
    demo: Server, name: str, stream: dict[str, str]
) -> None:
    answer = demo.post(body(**{name: 2}, **stream))
    assert answer.status == 424
    message = (
        f"parameters.{name} is not supported here: several sequences come only in an answer "
        f"that is not streamed"
    )
    assert message in answer.body.decode()


@pytest.mark.parametrize("given", [{"n": NUM_MOST + 1}, {"best_of": 0}, {"n": 3, "best_of": 2}])
def test_a_number_out_of_range_is_refused(demo: Server, given: dict[str, int]) -> None:
    answer = demo.post(body(**given))
    assert answer.status == 424 and b"parameters." in answer.body


def test_many_wide_requests_at_once_are_answered_as_alone(demo: Server) -> None:
    seeds = [100 * (index % 4) for index in range(12)]
    with ThreadPoolExecutor(len(seeds)) as pool:
        answers = list(pool.map(lambda seed: sequences(ask(demo, n=NUM_MOST, seed=seed)), seeds))

    alone = {seed: sequences(ask(demo, n=NUM_MOST, seed=seed)) for seed in set(seeds)}
    assert [[text for text, _ in answer] for answer in answers] == [
        [text for text, _ in alone[seed]] for seed in seeds
    ]

    wait_until(demo.is_idle, "every sequence is over")


def test_a_client_that_leaves_frees_all_its_sequences(demo: Server) -> None:
    wait_until(demo.is_idle, "nothing runs")
    connection = demo.connect(body(n=NUM_MOST, max_new_tokens=900, ignore_eos_token=True))
    # The cache holds the whole context for each row
    share_of_one = 1 / NUM_ROWS
    wait_until(
        lambda: demo.metrics()["lmi_kv_cache_usage_ratio"] > share_of_one,
        "more than one sequence runs",
    )
    connection.close()
    wait_until(demo.is_idle, "rows and blocks are free")
    assert len(sequences(ask(demo, n=3))) == 3
