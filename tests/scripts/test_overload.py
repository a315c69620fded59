"""`scripts/overload`: figures computed from records, and short runs against servers without a
model.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lmi.client.bench.figures import quantile
from scripts.benchmarks import servers
from scripts.benchmarks.load import Answer
from scripts.benchmarks.overload import ablation, contest, records, report
from scripts.benchmarks.overload.door import Asked, Door, Target, poisson
from scripts.benchmarks.overload.parts import Plan, Run
from scripts.benchmarks.overload.records import Outcome, Record
from tests.scripts.kernels import ROOT

QUICK = [
    "--seconds",
    "2",
    "--patience",
    "1",
    "--capacity-seconds",
    "2",
    "--burst",
    "1",
    "--users",
    "8",
    "--tokens",
    "4",
]


def whole(start_s: float, end_s: float, tenant: str = "load", num_tokens: int = 10) -> Record:
    """An answer whose tokens came evenly."""
    step_s = (end_s - start_s) / num_tokens
    times_s = tuple(start_s + step_s * (number + 0.5) for number in range(num_tokens))
    return Record(tenant, start_s, end_s, Outcome.WHOLE, num_tokens, times_s, num_tokens)


def left(start_s: float, end_s: float, tenant: str = "load", num_tokens: int = 10) -> Record:
    answer = whole(start_s, end_s, tenant, num_tokens)
    return Record(tenant, start_s, end_s, Outcome.LEFT, 2 * num_tokens, answer.times_s, num_tokens)


def refused(start_s: float, num_wanted: int = 10, tenant: str = "load") -> Record:
    return Record(tenant, start_s, start_s + 0.01, Outcome.REFUSED, num_wanted)


def test_arrivals_of_a_seed_are_the_same_and_come_at_their_rate() -> None:
    times_s = poisson(100, 50, "seed")
    assert times_s == sorted(times_s) == poisson(100, 50, "seed") != poisson(100, 50, "other")
    assert len(times_s) == pytest.approx(5000, rel=0.05) and times_s[-1] < 50

    gaps_s = [after - before for before, after in zip(times_s, times_s[1:], strict=False)]
    assert quantile(gaps_s, 0.5) == pytest.approx(math.log(2) / 100, rel=0.1)
    assert poisson(0, 50, "seed") == []


def test_goodput_is_of_whole_answers_and_counts_each_token_when_it_came() -> None:
    kept_records = [whole(0, 2), left(0, 2), refused(0), whole(1, 3)]
    assert records.goodput(kept_records, 0, 2) == (10 + 5) / 2
    assert records.delivered(kept_records, 0, 2) == (10 + 10 + 5) / 2
    assert records.goodput(kept_records, 5, 6) == 0


def test_pieces_of_several_tokens_count_by_the_tokens_of_their_answer() -> None:
    record = Record("load", 0, 4, Outcome.WHOLE, 40, times_s=(0.5, 1.5, 2.5, 3.5), num_tokens=40)
    assert records.goodput([record], 0, 2) == 10


def test_what_idle_seconds_could_have_served_is_counted_once() -> None:
    busy = [whole(0, 4, num_tokens=400)]
    assert records.servable([*busy, refused(0, 50)], capacity=100, seconds=4, patience_s=4) == 0

    # Of each second 40 tokens are idle: 100 * 0.9 - 50
    half = [whole(0, 4, num_tokens=200)]
    assert (
        records.servable([*half, *[refused(0, 50)] * 9], capacity=100, seconds=4, patience_s=4) == 3
    )
    assert records.servable([*half, refused(0, 50)], capacity=100, seconds=4, patience_s=1) == 0
    assert records.servable([*half, refused(3.5, 10)], capacity=100, seconds=4, patience_s=4) == 0


def test_goodput_is_back_where_all_that_arrives_from_then_on_is_answered() -> None:
    # Due until 7.75 s
    lost = [left(5 + number / 4, 9, num_tokens=5) for number in range(12)]
    served = [whole(8 + number / 4, 8.5 + number / 4) for number in range(16)]

    assert records.recovery_s([*lost, *served], burst_s=5, seconds=12) == 3
    # 2 of 82 tokens
    assert (
        records.recovery_s([*lost, *served, left(8, 9, num_tokens=1)], burst_s=5, seconds=12) == 3
    )
    assert (
        records.recovery_s([whole(5.1, 6), *lost, *served, left(5, 9)], burst_s=5, seconds=12) == 3
    )
    assert records.recovery_s([*served, *lost, left(9.1, 9.2)], burst_s=5, seconds=12) == 4.25
    assert records.recovery_s([*lost, *served], burst_s=5, seconds=9) is None
    assert records.recovery_s(lost, burst_s=5, seconds=12) is None
    assert (
        records.recovery_s([*lost, *[refused(record.start_s) for record in served]], 5, 12) is None
    )


def test_the_service_gap_is_the_most_of_any_interval() -> None:
    first = [whole(0, 1, "a"), whole(1, 2, "b")]
    assert records.service_gap(first, {"a": 1, "b": 1}, 0, 2) == 10
    assert records.services(first, {"a": 1, "b": 1}, 0, 2) == {"a": 10, "b": 10}

    twice = [whole(0, 2, "a", 20), whole(2, 4, "b", 20)]
    assert records.service_gap(twice, {"a": 1, "b": 1}, 0, 4) == 20
    assert records.service_gap(twice, {"a": 1, "b": 1}, 0, 1) == 10

    weighed = [whole(0, 2, "a", 20), whole(0, 2, "b", 10)]
    assert records.service_gap(weighed, {"a": 2, "b": 1}, 0, 2) <= 1
    assert records.services(weighed, {"a": 2, "b": 1}, 0, 2) == {"a": 10, "b": 10}
    assert records.service_gap([*twice, whole(0, 4, "c", 20)], {"a": 1, "b": 1}, 0, 4) == 20


def test_a_light_client_waits_from_its_first_refusal_to_its_answer() -> None:
    light = [
        refused(0, tenant="light"),
        refused(2, tenant="light"),
        whole(3, 5, "light"),
        whole(6, 7, "light"),
    ]
    assert records.waits_s([*light, whole(0, 9, "hog")], "light") == ([5, 1], False)
    assert records.waits_s([*light, left(8, 10, "light")], "light") == ([5, 1, 2], True)
    assert records.waits_s([], "light") == ([], False)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
PIECE = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens": 5}}\n\n'
LINE = b'{"token": {"id": 1, "text": "a"}}\n'
LAST = b'{"token": {"id": 1, "text": "a"}, "generated_text": "aa"}\n'
BROKEN = LAST[:-2] + b', "details": {"finish_reason": "error"}}\n'


@pytest.mark.parametrize(
    ("api", "reads", "outcome", "num_tokens"),
    [
        ("openai", [HEAD + PIECE, PIECE, USAGE + b"data: [DONE]\n\n"], Outcome.WHOLE, 5),
        ("openai", [HEAD + PIECE, PIECE], Outcome.FAILED, 2),
        (
            "openai",
            [HEAD + PIECE, b'data: {"error":{}}\n\n' + b"data: [DONE]\n\n"],
            Outcome.FAILED,
            1,
        ),
        ("openai", [b"HTTP/1.1 503 x\r\nRetry-After: 7\r\n\r\n{}"], Outcome.REFUSED, 0),
        ("openai", [b"HTTP/1.1 400 x\r\n\r\n{}"], Outcome.FAILED, 0),
        ("openai", [], Outcome.FAILED, 0),
        ("lmi", [HEAD + LINE, LAST], Outcome.WHOLE, 2),
        ("lmi", [HEAD + LINE, BROKEN], Outcome.FAILED, 2),
    ],
)
def test_what_a_client_read_becomes_a_record(
    api: str, reads: list[bytes], outcome: Outcome, num_tokens: int
) -> None:
    door = Door(api, "bench", {"Authorization": "Bearer {tenant}"})
    sent = Asked(door.ask("one", 5, random.Random(0)), due_s=100, sent_s=100.1, end_s=103)
    sent.answer = Answer(100.1, reads, [101.0 + number for number in range(len(reads))])
    assert b"\r\nAuthorization: Bearer one\r\n" in sent.ask.payload

    record = door.record(sent, 100)
    assert (record.start_s, record.end_s, record.outcome, record.num_tokens) == (
        0,
        3,
        outcome,
        num_tokens,
    )
    assert record.times_s[:1] == ((1.0,) if num_tokens else ())
    assert record.retry_after_s == (7 if outcome == Outcome.REFUSED else None)

    sent.has_left = True
    assert door.record(sent, 100).outcome == Outcome.LEFT


def overload(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "scripts.benchmarks.overload.report", *QUICK, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("| load |") and "The driver took" in done.stdout

    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def test_every_part_runs_against_a_server_with_three_places(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = [
        "--loads",
        "1,4",
        "--hog",
        "3,1,20",
        "--tenants",
        "big:2:32:20,small:1:16:10",
        "--json",
        str(file),
    ]
    places = [
        "--set",
        "option.echo_step_ms=10",
        "--set",
        "option.echo_max_num_sequences=2",
        "--set",
        "job_queue_size=1",
    ]
    results = overload("--server", "echo", *words, "--", *places)

    assert json.loads(file.read_text()) == results
    assert [row["load"] for row in results["load"]] == [1, 4] and results["burst"][
        "num_at_once"
    ] > 0

    for row in [*results["load"], results["burst"]]:
        assert sum(row["outcomes"].values()) > 0 and not row["reasons"]
        assert (
            (row["retry_after_s"] == [1, 1, 1])
            == (row["refusal_p50_ms"] is not None)
            == bool(row["outcomes"]["refused"])
        )

    assert results["tenants"]["outcomes"]["refused"] > 0 and set(
        results["tenants"]["services"]
    ) == {
        "big",
        "small",
    }

    hogs = results["hogs"]
    assert (
        hogs["hogs"]["refused"] > 0
        and hogs["hog_tokens"] > 0
        and hogs["light_alone_s"] > 0
        and not hogs["reasons"]
    )


def test_a_server_that_runs_is_loaded_by_its_url_at_the_api_of_lmi() -> None:
    with servers.lmi({"option.rolling_batch": "echo"}, "demo") as server:
        url = f"http://127.0.0.1:{server.port}"
        results = overload(
            "load", "--url", url, "--api", "lmi", "--loads", "0.5", "--patience", "30"
        )

    [row] = results["load"]
    assert row["outcomes"]["whole"] > 0 and row["outcomes"]["failed"] == 0
    assert (
        0 < row["first_p50_s"] <= row["first_p99_s"]
        and row["ping_p50_ms"] > 0
        and row["driver_cores"] > 0
    )


def test_figures_beside_goals_are_of_the_worst_load_and_infinite_without_recovery() -> None:
    row = {
        "load": 1.0,
        "goodput_ratio": 1.0,
        "refusal_p99_ms": 5.0,
        "servable_share": math.nan,
        "ping_p99_ms": 3.0,
    }
    results = {
        "load": [row, row | {"load": 2.0, "goodput_ratio": 0.5, "ping_p99_ms": 9.0}],
        "burst": {"recovery_s": None},
        "hogs": {"light_ratio": 8.0},
    }

    assert report.headlines(results) == {
        "goodput 1": 1.0,
        "goodput 2": 0.5,
        "refusal_p99_ms": 5.0,
        "ping_p99_ms": 9.0,
        "recovery_s": math.inf,
        "light_ratio": 8.0,
    }
    assert report.clean({"a": [math.nan, 1.23456], "b": math.inf}) == {
        "a": [None, 1.2346],
        "b": None,
    }


def test_a_server_that_stops_answering_costs_only_the_figures_that_need_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    port = servers.free_port()  # nobody listens
    plan = Plan(seconds=0.2, capacity_s=0.2, num_users=2, hog=(2, 1, 4), settle_s=0.1)
    run = Run(Target("127.0.0.1", port, "/ping", "bench"), Door("openai", "bench"), plan)
    results = report.measure(run, ["load", "hogs"], [1.0])
    assert (
        results["load"] == []
        and results["hogs"]["hogs"]["failed"] > 0
        and math.isnan(results["hogs"]["light_ratio"])
    )
    assert "left out: no tokens came" in capfd.readouterr().err


def test_a_contest_has_a_column_for_each_server_and_says_what_never_came_back() -> None:
    columns = {
        "ours": {"goodput 2": 0.93, "recovery_s": 1.5, "gap_s": 0.2},
        "theirs": {"recovery_s": math.inf},
    }
    rows = contest.table(columns).splitlines()

    assert rows[0] == "| figure | ours | theirs | goal |"
    assert "| same, load 2 | 0.93 |  | ≥ 0.8 |" in rows
    assert "| seconds from a burst until goodput is back | 1.50 | never | ≤ 5 |" in rows
    assert (
        rows[-1]
        == "| what one tenant with a backlog got more than another, s of capacity | 0.20 |  |  |"
    )


def test_an_unknown_contestant_is_refused_by_name() -> None:
    command = [sys.executable, "-m", "scripts.benchmarks.overload.contest", "--only", "loud"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no such server: loud" in done.stderr


def test_what_a_missing_part_moves_is_told_with_both_means() -> None:
    whole = ablation.measured(ablation.VARIANTS["whole"], 2, [ablation.beside_hogs])
    without = ablation.measured(ablation.VARIANTS["express"], 2, [ablation.beside_hogs])

    assert list(ablation.moves(whole, whole)) == []
    [told] = ablation.moves(whole, without)
    assert told.startswith("a light client's wait, s 0.1")

    rows = ablation.table({"whole": whole, "express": without, "wait": whole}).splitlines()
    assert rows[2:] == [
        "| … of one that would wait for over `max_queue_wait` | nothing |",
        f"| express places | {told} |",
    ]


def test_each_part_that_is_taken_away_is_there_again_afterwards() -> None:
    for variant in ablation.VARIANTS.values():
        before = values_of(variant.names)
        with ablation.replaced(variant.names):
            assert variant.queue(1, 1.0).num_waiting == 0
            assert values_of(variant.names) == variant.names

        assert values_of(variant.names) == before


def values_of(names: Iterable[str]) -> dict[str, object]:
    return {name: getattr(ablation.module_of(name), name) for name in names}


def test_unknown_parts_are_refused_by_name() -> None:
    command = [sys.executable, "-m", "scripts.benchmarks.overload.report", "loud"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no such part: loud" in done.stderr
