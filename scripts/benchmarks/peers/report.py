"""Measures lmi beside OpenVINO GenAI, vLLM and llama.cpp: ratios with goals, tables, a plot, then
one line of JSON.

    scripts/bench peers [--quick] [--write] [--shapes 5M,135M,0.5B] [--stored]
    scripts/bench peers [--quick] [--write] [--stored] --shapes smollm2

Contestants take turns in short bursts. A burst counts only if its engine waited for a core less
than a twenty-fifth of its time; where none was so quiet the figure has a `~`. A contestant that
fails leaves its group of the contest. Each finished shape goes to build/peers/results.json; tables
are of all shapes that are there, and `--stored` only makes tables. `--write` puts ratios and plot
into docs/performance.md between marks, and all tables on the page beside the plot. The shape
smollm2 is a real model in each precision, and a report of its own.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

from scripts.benchmarks.drawing import Panel, draw
from scripts.benchmarks.peers import contestants
from scripts.benchmarks.peers.contest import Contestant, Figure, play, play_starts, say, workers
from scripts.benchmarks.peers.contestants import (
    LLAMA_Q8,
    LLAMA_SERVER,
    LMI,
    LMI_INT8,
    LMI_SERVER,
    OV,
    OV_INT8,
    VLLM,
    VLLM_BF16,
    VLLM_SERVER,
)
from scripts.benchmarks.peers.results import Results, add, load
from scripts.benchmarks.peers.shapes import SHAPES, Shape
from scripts.benchmarks.peers.worker import SAMPLED, Burst
from scripts.benchmarks.table import FIGURES, ROOT, Goal, machine, markdown, publish, table

PLOT = ROOT / FIGURES / "peers.png"
STORED = contestants.MODELS / "results.json"
# The shape that is a real model.
REAL = "smollm2"
STREAMS = (1, 8, 32, 64)
# Tokens of a prompt.
SHORT = 32
LONG = 512
LONGEST = 900
# Tokens that the prompts of a burst share.
NUM_SHARED = 400
# By shape: the most tokens of a burst's prompts together.
MAX_PREFILL = {"5M": 64 * LONG, "135M": 64 * LONG, "0.5B": 8 * LONG}
LIMIT_S = 1400.0
QUICK_LIMIT_S = 200.0
PREFIX_KINDS = {"cold": False, "warm": True}


def cases(name: str, is_quick: bool) -> Iterator[tuple[int, int]]:
    """Streams and tokens of a prompt."""
    for num_prompt in (SHORT, LONG):
        for num_streams in (1, 8) if is_quick and num_prompt == LONG else STREAMS:
            if num_streams * num_prompt <= MAX_PREFILL[name]:
                yield num_streams, num_prompt


def measure_group(
    group: str,
    name: str,
    entrants: list[Contestant],
    results: Results,
    deadline_s: float,
    is_quick: bool,
) -> None:
    """Measure what these contestants can do; servers only answer short prompts."""
    shape = SHAPES[name]
    rounds = 1 if is_quick else 2
    log = contestants.MODELS / name / "engines.log"

    def burst(num_streams: int, num_prompt: int, num_new: int, **more: int | bool) -> Burst:
        seed = 1000 * len(results.speeds) + 100 * len(results.prefix)
        return Burst(num_streams, num_prompt, num_new, shape.vocab_size, seed, **more)  # type: ignore[arg-type]

    say(f"{name}, {group}: {', '.join(contestant.name for contestant in entrants)}")
    with workers(entrants, log) as ready:
        play(ready, burst(8, SHORT, 8), 1, deadline_s)  # warm-up
        for case in cases(name, is_quick):
            if group == "servers" and case[1] != SHORT:
                continue

            results.speeds[(group, *case)] = play(
                ready, burst(*case, shape.num_new), rounds, deadline_s
            )

        if group != "float32":
            return

        for num_streams in STREAMS:
            next_burst = burst(num_streams, SHORT, shape.num_new, is_sampled=True)
            results.speeds[("sampled", num_streams, SHORT)] = play(
                ready, next_burst, rounds, deadline_s
            )

        results.first = play(ready, burst(1, LONGEST, 1), rounds, deadline_s)
        engines = [worker for worker in ready if worker.contestant.engine != "server"]
        if name != "0.5B":
            for kind, is_warm in PREFIX_KINDS.items():
                next_burst = burst(32, NUM_SHARED + 16, 16, num_shared=NUM_SHARED, is_warm=is_warm)
                results.prefix[kind] = play(engines, next_burst, rounds, deadline_s)


def measure(names: list[str], is_quick: bool) -> None:
    """Measure these shapes one after another, and store each when it is whole."""
    peers = contestants.installed()
    deadline_s = time.monotonic() + (QUICK_LIMIT_S if is_quick else LIMIT_S)
    for name in names:
        folder = contestants.make_models(name, SHAPES[name], peers)
        results = Results()
        measure_group(
            "float32",
            name,
            list(contestants.libraries(folder, peers)),
            results,
            deadline_s,
            is_quick,
        )
        if not is_quick:
            measure_group(
                "reduced",
                name,
                list(contestants.reduced(folder, peers)),
                results,
                deadline_s,
                is_quick,
            )

        if not is_quick and name != "0.5B":
            serving = list(contestants.serving(folder, peers))
            measure_group("servers", name, serving, results, deadline_s, is_quick)
            results.starts = play_starts(serving)

        add(STORED, name, results)


@dataclass(frozen=True)
class Duel:
    """What is compared: lmi's contestant of a group with the fastest of these peers, and the goals
    of the ratio.
    """

    group: str
    over: str
    own: str
    peers: tuple[str, ...]
    # By number of streams
    short: tuple[float, ...]
    long: tuple[float, ...] = ()

    def bounds(self) -> dict[tuple[int, int], float]:
        """Return the goals by number of streams and tokens of a prompt."""
        bounds: dict[tuple[int, int], float] = {}
        for num_prompt, goals in ((SHORT, self.short), (LONG, self.long)):
            for num_streams, goal in zip(STREAMS, goals, strict=False):
                bounds[num_streams, num_prompt] = goal

        return bounds


LIBRARIES = (("OpenVINO GenAI", OV), ("llama-server", LLAMA_SERVER), ("vLLM", VLLM))
DUELS = (
    Duel("float32", "OpenVINO GenAI", LMI, (OV,), (1.2, 1.2, 1.1, 1.1), (1.0,) * 4),
    Duel(
        "float32", "llama-server", LMI, (LLAMA_SERVER,), (1.0, 1.5, 1.5, 1.5), (1.0, 1.5, 1.5, 1.5)
    ),
    Duel("float32", "vLLM", LMI, (VLLM,), (1.3,) * 4, (1.3,) * 4),
    *(Duel("sampled", name, LMI, (peer,), (1.0,) * 4) for name, peer in LIBRARIES),
    Duel(
        "reduced",
        "the fastest peer",
        LMI_INT8,
        (OV_INT8, VLLM_BF16, LLAMA_Q8),
        (1.2, 1.2, 1.0, 1.0),
        (1.0,) * 4,
    ),
    Duel("servers", "vllm serve", LMI_SERVER, (VLLM_SERVER,), (1.0,) * 4),
    Duel("servers", "llama-server", LMI_SERVER, (LLAMA_SERVER,), (1.0,) * 4),
)


def ratios(results_of: dict[str, Results]) -> dict[str, float]:
    """Return every ratio of tokens/s of which both sides were measured, by shape, group, peer,
    streams and prompt.
    """
    values: dict[str, float] = {}
    for name, results in results_of.items():
        for duel in DUELS:
            for case in duel.bounds():
                value = results.ratio(duel.group, case, duel.own, duel.peers)
                if value is not None:
                    num_streams, num_prompt = case
                    values[f"{name} {duel.group} / {duel.over} {num_streams}x{num_prompt}"] = value

    return values


def ratios_table(results_of: dict[str, Results]) -> str:
    """lmi's tokens/s over each peer's; a value that misses its goal stands beside it."""
    every = [(n, prompt) for prompt in (SHORT, LONG) for n in STREAMS]
    rows = []
    for name, results in results_of.items():
        for duel in DUELS:
            cells = [ratio_cell(results, duel, case) for case in every]
            if any(cells):
                variant = "int8" if duel.own == LMI_INT8 else duel.group
                rows.append([f"{duel.over}, {name}, {variant}", *cells])

    return markdown(["tokens/s of lmi over", *(f"{n} × {prompt}" for n, prompt in every)], rows)


def ratio_cell(results: Results, duel: Duel, case: tuple[int, int]) -> str:
    value = results.ratio(duel.group, case, duel.own, duel.peers)
    goal = duel.bounds().get(case)
    if value is None or goal is None:
        return ""

    return f"{value:.2f}" if value >= goal else f"{value:.2f} (≥ {goal:g})"


def time_ratios(results_of: dict[str, Results]) -> tuple[dict[str, float], list[Goal]]:
    """lmi's times over those of its peers, and their goals."""
    figures: dict[str, float] = {}
    goals: list[Goal] = []
    for name, results in results_of.items():
        if LMI in results.first and OV in results.first:
            text = f"{name}: first token of a prompt of {LONGEST}, time over OpenVINO GenAI's"
            figures[text] = results.first[LMI].first_ms / results.first[OV].first_ms
            goals.append(Goal(text, text, "<=", 1.0))

        for kind, bound in (("cold", 0.8), ("warm", 1.0)):
            figures_of = results.prefix.get(kind, {})
            peer_times_s = [figure.seconds for peer, figure in figures_of.items() if peer != LMI]
            if LMI in figures_of and peer_times_s:
                text = (
                    f"{name}: 32 requests that share {NUM_SHARED} tokens, {kind}, time over the "
                    "fastest peer's"
                )
                figures[text] = figures_of[LMI].seconds / min(peer_times_s)
                goals.append(Goal(text, text, "<=", bound))

        for text, ratio in start_ratios(name, results).items():
            figures[text] = ratio
            goals.append(Goal(text, text, "<=", 1.0))

    return figures, goals


def start_ratios(name: str, results: Results) -> dict[str, float]:
    """Return the time and memory of lmi's server over those of each peer."""
    start = results.starts.get(LMI_SERVER)
    if start is None:
        return {}

    values: dict[str, float] = {}
    for peer, start_of_peer in results.starts.items():
        if peer != LMI_SERVER:
            seconds = start.seconds / start_of_peer.seconds
            idle_mb = start.idle_mb / start_of_peer.idle_mb
            values[f"{name}: start, from exec to 200, over {peer}'s"] = seconds
            values[f"{name}: idle memory over {peer}'s"] = idle_mb

    return values


def shape_table(name: str, shape: Shape, results: Results) -> str:
    parts = [f"**{name}** ({shape.kind}, {shape.num_layers} layers of {shape.hidden}), tokens/s:"]
    for group in ("float32", "sampled", "reduced", "servers"):
        rows = {case[1:]: figures for case, figures in results.speeds.items() if case[0] == group}
        if rows:
            parts.append(figures_table(group, rows))

    if results.first:
        names = list(results.first)
        lines = [row(f"first token of a prompt of {LONGEST}, ms", names, results.first, "first_ms")]
        for kind, figures in results.prefix.items():
            lines.append(
                row(f"32 that share {NUM_SHARED} tokens, {kind}, s", names, figures, "seconds")
            )

        parts.append(markdown(["times", *names], lines))

    if results.starts:
        seconds = [f"{start.seconds:.2f}" for start in results.starts.values()]
        memory = [f"{start.idle_mb:.0f}" for start in results.starts.values()]
        lines = [["from exec to 200, s", *seconds], ["idle, PSS of all processes, MB", *memory]]
        parts.append(markdown(["start", *results.starts], lines))

    return "\n\n".join(parts)


def row(text: str, names: list[str], figures: dict[str, Figure], attribute: str) -> list[str]:
    """Return a cell for each name; it is empty where that contestant was not measured."""
    cells = [text]
    for name in names:
        if name not in figures:
            cells.append("")
            continue

        value = getattr(figures[name], attribute)
        num_decimals = 0 if value >= 20 else 2
        mark = "" if figures[name].is_quiet else "~"
        cells.append(f"{mark}{value:.{num_decimals}f}")

    return cells


def figures_table(group: str, rows: dict[tuple[int, int], dict[str, Figure]]) -> str:
    names = list(next(iter(rows.values())))
    lines = [
        row(f"{n} at once, prompts of {prompt}", names, figures, "tokens_per_s")
        for (n, prompt), figures in rows.items()
    ]
    return markdown([group, *names], lines)


def conditions(results_of: dict[str, Results]) -> str:
    """Return how all was measured, in words."""
    all_figures: list[Figure] = []
    for results in results_of.values():
        for figures in results.speeds.values():
            all_figures += figures.values()

    num_loud = sum(not figure.is_quiet for figure in all_figures)
    num_new = ", ".join(f"{shape.num_new} ({name})" for name, shape in SHAPES.items())
    return (
        f"On {machine()}. Random weights, greedy (in tables called sampled: {SAMPLED}), prompts of "
        f"random tokens, new tokens of each request: {num_new}. Times are from the requests to "
        "their last token, with prefill. Engines are libraries, each in a process, in turns; "
        "llama.cpp as its server, whose KV cache is in half precision. Each has its own defaults, "
        "but: a thread for each core for engines without a server, steps of 2048 tokens for "
        "OpenVINO, 64 places for llama-server, a size for vLLM's cache. "
        f"{num_loud} of {len(all_figures)} figures had no quiet burst (`~`)."
    )


def plot(results_of: dict[str, Results]) -> None:
    """The 135M shape, or the first there is: tokens/s over streams."""
    name = "135M" if "135M" in results_of else next(iter(results_of))
    panels = []
    for num_prompt in (SHORT, LONG):
        lines: dict[str, dict[int, float]] = {}
        for (group, num_streams, prompt), figures in results_of[name].speeds.items():
            if (group, prompt) == ("float32", num_prompt):
                for contestant, figure in figures.items():
                    lines.setdefault(contestant, {})[num_streams] = figure.tokens_per_s

        if lines:
            panels.append(Panel(f"{name}, float32, prompts of {num_prompt}: tokens/s", lines))

    PLOT.parent.mkdir(exist_ok=True)
    draw(panels, "streams at once", PLOT)


def as_json(results_of: dict[str, Results], own_ratios: dict[str, float]) -> str:
    """Return all figures on one line: ratios, and tokens/s by shape, case and contestant."""
    speeds: dict[str, dict[str, dict[str, float]]] = {}
    for name, results in results_of.items():
        speeds[name] = {}
        for case, figures in results.speeds.items():
            title = " ".join(map(str, case))
            speeds[name][title] = {
                peer: round(figure.tokens_per_s, 2) for peer, figure in figures.items()
            }

    ratios_of_case = {case: round(value, 3) for case, value in own_ratios.items()}
    return json.dumps({"ratios": ratios_of_case, "tokens_per_s": speeds})


def stored_results() -> dict[str, Results]:
    """What is stored of each shape, the smallest first."""
    stored = load(STORED)
    return {name: stored[name] for name in SHAPES if name in stored}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/bench peers", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one round of float32 of 5M and 135M, or of half the cells of smollm2: four minutes",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="put ratios and plot into docs/performance.md, tables on a page",
    )
    parser.add_argument("--shapes", help=f"of {','.join(SHAPES)}, or {REAL} alone")
    parser.add_argument(
        "--stored", action="store_true", help=f"measure nothing, report what is in {STORED}"
    )
    arguments = parser.parse_args()
    if arguments.shapes == REAL:
        from scripts.benchmarks.peers import real_report

        if not arguments.stored:
            real_report.measure(arguments.quick)

        real_report.report(arguments.write)
        return

    names = list(SHAPES)
    if arguments.shapes:
        names = arguments.shapes.split(",")
    elif arguments.quick:
        names = names[:2]

    unknown = set(names) - SHAPES.keys()
    if unknown:
        parser.error(f"--shapes must be of {', '.join(SHAPES)}, given {', '.join(sorted(unknown))}")

    if not arguments.stored:
        measure(names, arguments.quick)

    results_of = stored_results()
    if not results_of:
        parser.error(f"{STORED} has no results yet")

    own_ratios = ratios(results_of)
    times, goals = time_ratios(results_of)
    shapes = [shape_table(name, SHAPES[name], results) for name, results in results_of.items()]
    summary = f"{ratios_table(results_of)}\n\n{table(times, goals)}"
    details = [*shapes, conditions(results_of)]
    print("\n\n".join([summary, *details]))
    if arguments.write:
        plot(results_of)
        publish("peers", summary, details, plotted="tokens per second")

    print(as_json(results_of, own_ratios | times))


if __name__ == "__main__":
    main()
