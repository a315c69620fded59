"""Measures lmi against vLLM's own servers and reports it: tables with goals, a plot, then one line
of JSON.

    scripts/bench vllm [--quick] [--write]

A figure is the median over the rounds that count. A ratio is that of two medians. `--write` puts
ratios and plot into docs/performance.md between their marks, and all tables on the page beside the
plot.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable

from lmi.client.bench.figures import quantile
from scripts.benchmarks import vllm_model, vllm_servers
from scripts.benchmarks.drawing import Panel, Point, draw
from scripts.benchmarks.load import Round, realtime
from scripts.benchmarks.table import FIGURES, ROOT, Goal, machine, markdown, publish, table
from scripts.benchmarks.vllm_servers import (
    ASKS,
    BARE,
    CORE,
    FRONT,
    LMI,
    LOG_PROBS,
    MOST,
    OWN_API,
    REST,
    RUST,
    STREAMED,
    VLLM,
    WHOLE,
    WORKER,
    Record,
)

PLOT = ROOT / FIGURES / "vllm.png"

GOALS: list[Goal] = [
    Goal("tokens_ratio_1", "output tokens/s, 1 stream / `vllm serve`", ">=", 1.0),
    Goal("tokens_ratio_8", "same, 8 streams", ">=", 1.0),
    Goal("tokens_ratio_32", "same, 32 streams", ">=", 1.0),
    Goal("tokens_ratio_64", "same, 64 streams", ">=", 1.15),
    Goal("tokens_log_probs_ratio", "same, 64 streams, both with log-probs", ">=", 1.0),
    Goal("tokens_rust_ratio_64", "same, 64 streams / vLLM's Rust front end", ">=", 1.05),
    Goal(
        "bare_share", "same, 64 streams / the bare engine in one process on one thread", ">=", 0.85
    ),
    Goal(
        "own_api_share",
        "same, 64 streams, lmi at `/invocations` / lmi at `/v1/completions`",
        ">=",
        0.9,
    ),
    Goal("first_p50_ratio_64", "time to first token, 64 streams, p50 / `vllm serve`", "<=", 0.7),
    Goal("first_p99_ratio_64", "same, p99", "<=", 1.0),
    Goal(
        "front_cpu_ratio",
        "front-end CPU a streamed token, 64 streams / API process of `vllm serve`",
        "<=",
        0.33,
    ),
    Goal("front_cpu_log_probs_ratio", "same, with log-probs", "<=", 0.5),
    Goal(
        "all_cpu_ratio",
        "CPU of all processes a streamed token, 64 streams / `vllm serve`",
        "<=",
        1.0,
    ),
    Goal(
        "front_memory_ratio", "front-end worker's memory / API process of `vllm serve`", "<=", 0.25
    ),
    Goal("first_start_ratio", "first start of a model, to ready / `vllm serve`", "<=", 1.0),
    Goal("start_ratio", "its later starts, to ready / `vllm serve`", "<=", 0.5),
]


def tokens_per_s(done: Round) -> float:
    return done.tokens_per_s


def first_ms(share: float) -> Callable[[Round], float]:
    return lambda done: percentile_ms(done.first_s, share)


def gap_ms(share: float) -> Callable[[Round], float]:
    return lambda done: percentile_ms(done.gaps_s, share)


def percentile_ms(values_s: tuple[float, ...], share: float) -> float:
    # Whole answers have no gaps
    return quantile(values_s, share) * 1000 if values_s else 0.0


def us_per_token(role: str) -> Callable[[Round], float]:
    return lambda done: done.us_per_token(role)


def all_us_per_token(done: Round) -> float:
    return sum(map(done.us_per_token, done.cpu_s))


COLUMNS: dict[str, Callable[[Round], float]] = {
    "tokens_per_s": tokens_per_s,
    "first_p50_ms": first_ms(0.5),
    "first_p99_ms": first_ms(0.99),
    "gap_p50_ms": gap_ms(0.5),
    "gap_p99_ms": gap_ms(0.99),
    "front_us": us_per_token(FRONT),
    "core_us": us_per_token(CORE),
    "worker_us": us_per_token(WORKER),
    "rest_us": us_per_token(REST),
}


def ratios(records: dict[str, Record]) -> dict[str, float]:
    """The ratios of which both sides were measured."""
    our_record = records[LMI]
    theirs = records[VLLM]
    front = us_per_token(FRONT)
    most = (STREAMED, MOST)
    with_log_probs = (LOG_PROBS, MOST)
    compared: dict[str, tuple[tuple[str, int], Callable[[Round], float]]] = {
        "front_cpu_ratio": (most, front),
        "front_cpu_log_probs_ratio": (with_log_probs, front),
        "all_cpu_ratio": (most, all_us_per_token),
        "tokens_log_probs_ratio": (with_log_probs, tokens_per_s),
    }
    for num_streams in ASKS:
        for kind, stem in ((STREAMED, "tokens_ratio"), (WHOLE, "whole_ratio")):
            compared[f"{stem}_{num_streams}"] = (kind, num_streams), tokens_per_s

        for column in ("first_p50", "first_p99", "gap_p50", "gap_p99"):
            compared[f"{column}_ratio_{num_streams}"] = (
                (STREAMED, num_streams),
                COLUMNS[f"{column}_ms"],
            )

    pairs = {
        name: (our_record.median(*sides), theirs.median(*sides)) for name, sides in compared.items()
    }
    pairs["bare_share"] = (
        our_record.median(most, tokens_per_s),
        records[BARE].median(most, tokens_per_s),
    )
    pairs["own_api_share"] = (
        our_record.median((OWN_API, MOST), tokens_per_s),
        our_record.median(most, tokens_per_s),
    )
    pairs["first_start_ratio"] = our_record.starts_s[0], theirs.starts_s[0]
    pairs["start_ratio"] = middle(our_record.starts_s[1:]), middle(theirs.starts_s[1:])
    pairs["front_memory_ratio"] = our_record.memory(FRONT), theirs.memory(FRONT)
    if RUST in records:
        pairs["tokens_rust_ratio_64"] = (
            our_record.median(most, tokens_per_s),
            records[RUST].median(most, tokens_per_s),
        )
        pairs["front_cpu_rust_ratio"] = (
            our_record.median(most, front),
            records[RUST].median(most, front),
        )

    return {
        name: our_figure / their_figure
        for name, (our_figure, their_figure) in pairs.items()
        if our_figure is not None and their_figure
    }


def middle(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def streams_table(records: dict[str, Record]) -> str:
    """Return a row for each server and API at each number of streams."""
    heads = [
        "streams",
        "server",
        "tokens/s",
        "first token, ms p50 / p99",
        "between tokens, ms p50 / p99",
        "CPU µs a token: front end / engine core / worker",
        "not streamed, tokens/s",
    ]
    rows = []
    for num_streams in ASKS:
        for key, record in records.items():
            for kind, where in ((STREAMED, ""), (OWN_API, " at `/invocations`")):
                if (kind, num_streams) in record.rounds:
                    cells = stream_cells(record, (kind, num_streams), has_times=key != BARE)
                    rows.append([str(num_streams), f"{record.name}{where}", *cells])

    return markdown(heads, rows)


def stream_cells(record: Record, case: tuple[str, int], *, has_times: bool) -> list[str]:
    """Return the cells after a server's name in the table of streams."""
    figures_of_case = {name: record.median(case, figure) for name, figure in COLUMNS.items()}
    kind, num_streams = case
    whole = None
    if kind == STREAMED:
        whole = record.median((WHOLE, num_streams), tokens_per_s)

    times = ["", ""]
    if has_times:
        times = []
        for name in ("first", "gap"):
            p50_ms = figures_of_case[f"{name}_p50_ms"]
            p99_ms = figures_of_case[f"{name}_p99_ms"]
            times.append(f"{p50_ms:.1f} / {p99_ms:.1f}")

    cpu = []
    for name in ("front_us", "core_us", "worker_us"):
        microseconds = figures_of_case[name]
        cpu.append(f"{microseconds:.0f}" if microseconds else "–")

    return [
        f"{figures_of_case['tokens_per_s']:.0f}",
        *times,
        " / ".join(cpu),
        f"{whole:.0f}" if whole else "",
    ]


def servers_table(records: dict[str, Record]) -> str:
    """Return a row for each server that was started."""
    heads = [
        "server",
        "ready after, s: first start / later",
        "memory, MB: front end / engine core / worker / rest",
        f"front-end CPU µs a token, 64 streams with {vllm_servers.NUM_LOG_PROBS} log-probs",
        "tokens/s with them",
    ]
    rows = []
    for record in records.values():
        if not record.starts_s:
            continue

        starts_s = [record.starts_s[0], middle(record.starts_s[1:])]
        starts = " / ".join(f"{start_s:.1f}" for start_s in starts_s if start_s)
        sizes_mb = [record.memory(role) or 0 for role in (FRONT, CORE, WORKER, REST)]
        memory = " / ".join(f"{size_mb:.0f}" for size_mb in sizes_mb)

        with_log_probs = (LOG_PROBS, MOST)
        front_us = record.median(with_log_probs, us_per_token(FRONT))
        speed = record.median(with_log_probs, tokens_per_s)
        cells = ["", ""]
        if front_us and speed:
            cells = [f"{front_us:.0f}", f"{speed:.0f}"]

        rows.append([record.name, starts, memory, *cells])

    return markdown(heads, rows)


REALTIME = (
    "The client runs at real-time priority: beside an engine that spins while it waits, an "
    "ordinary one gets its turn so late that the times would be its own."
)
NO_REALTIME = (
    "This system did not allow the client real-time priority, so the times are partly the client's "
    "own."
)
NO_RUST = " vLLM's Rust front end is not in this build of vLLM, so it was not measured."


def conditions(records: dict[str, Record], has_realtime: bool) -> str:
    """Return how all was measured, in words."""
    num_rounds = 0
    num_left_out = 0
    for record in records.values():
        num_rounds += sum(map(len, record.rounds.values()))
        num_left_out += record.num_left_out

    client = REALTIME if has_realtime else NO_REALTIME
    rust = "" if RUST in records else NO_RUST
    return (
        f"On {machine()}. A random Llama of 5 million parameters in bfloat16, prompts of "
        f"{vllm_model.WORDS_EACH} words, {vllm_servers.NUM_TOKENS} new tokens, greedy, the same "
        "requests to `/v1/completions` of each server. Every server as it is by default; only the "
        "KV cache of vLLM's own has a size (VLLM_CPU_KVCACHE_SPACE), since by default it takes "
        "nine tenths of memory. The row of `/invocations` is lmi at its own API, where each line "
        "of a stream carries a log-prob. The bare engine has the one thread that lmi's engine "
        "chooses here for a small model. One server at a time, in turns. "
        f"{client} Medians of {num_rounds} rounds; {num_left_out} more were left out, because "
        f"others used more than {vllm_servers.MAX_FOREIGN:g} of a core meanwhile.{rust}"
    )


def plot(records: dict[str, Record]) -> None:
    """Draw tokens a second and times to the first token over streams."""
    panels = []
    for title, figure in (
        ("Output tokens per second", tokens_per_s),
        ("Time to first token, p50, ms", first_ms(0.5)),
    ):
        lines: dict[str, dict[int, float]] = {}
        for key, record in records.items():
            if key != BARE:
                lines[record.name] = line_of(record, figure)

        panels.append(Panel(title, lines))

    bare = records[BARE].median((STREAMED, MOST), tokens_per_s)
    if bare is not None:
        panels[0].points["bare engine"] = Point(MOST, bare)

    PLOT.parent.mkdir(exist_ok=True)
    draw(panels, "streams at once", PLOT)


def line_of(record: Record, figure: Callable[[Round], float]) -> dict[int, float]:
    """Return a figure of a server by the number of streams, where it was measured."""
    line: dict[int, float] = {}
    for num_streams in ASKS:
        value = record.median((STREAMED, num_streams), figure)
        if value is not None:
            line[num_streams] = value

    return line


def figures(records: dict[str, Record], own_ratios: dict[str, float]) -> dict[str, object]:
    """Return all figures, for the last line."""
    servers = {}
    for key, record in records.items():
        columns = ["tokens_per_s", "core_us"] if key == BARE else list(COLUMNS)
        cases: dict[str, dict[str, float]] = {}
        for (kind, num_streams), rounds in record.rounds.items():
            values: dict[str, float] = {}
            for name in columns:
                median = record.median((kind, num_streams), COLUMNS[name])
                values[name] = round(median or 0, 2)

            first = rounds[0]
            values["rounds"] = len(rounds)
            values["tokens_per_record"] = round(first.num_tokens / first.num_records, 3)
            cases[f"{kind} {num_streams}"] = values

        memory = {role: round(record.memory(role) or 0) for role in (FRONT, CORE, WORKER, REST)}
        servers[key] = {
            "start_s": middle(record.starts_s),
            "memory_mb": memory,
            "cases": cases,
            "rounds_left_out": record.num_left_out,
        }

    return {
        "ratios": {name: round(value, 3) for name, value in own_ratios.items()},
        "servers": servers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/bench vllm", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one turn, under three minutes")
    parser.add_argument(
        "--write",
        action="store_true",
        help="put ratios and plot into docs/performance.md, tables on a page",
    )
    arguments = parser.parse_args()
    if arguments.quick:
        records = vllm_servers.measure(turns=1, repeats=1, limit_s=60.0)
    else:
        records = vllm_servers.measure(turns=4, repeats=2, limit_s=660.0)

    own_ratios = ratios(records)
    with realtime() as has_realtime:
        conditions_text = conditions(records, has_realtime)

    summary = table(own_ratios, GOALS, "not measured")
    details = [streams_table(records), servers_table(records), conditions_text]
    print("\n\n".join([summary, *details]))
    plot(records)
    if arguments.write:
        publish("vllm", summary, details, plotted="tokens per second and time to first token")

    print(json.dumps(figures(records, own_ratios) | {"cores": len(os.sched_getaffinity(0))}))


if __name__ == "__main__":
    main()
