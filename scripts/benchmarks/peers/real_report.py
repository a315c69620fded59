"""Measures a real model in each precision beside the peers: ratios, and what the machine allows.

All contestants are loaded once and take turns. A time becomes tokens/s by the tokens that a request
makes, so that every ratio is ours over theirs and one below 1 says that lmi is slower.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.benchmarks.peers import contestants, limits, real
from scripts.benchmarks.peers.contest import Figure, Worker, play, say, workers
from scripts.benchmarks.peers.real import (
    LLAMA_FEW,
    LLAMA_SERVER,
    LMI_BF16,
    LMI_GGUF,
    LMI_INT4,
    LMI_INT8,
    LMI_SERVER,
    OV_BF16,
    OV_INT4,
    OV_INT8,
    VLLM_BF16,
    Entrant,
)
from scripts.benchmarks.peers.results import Results, add, load
from scripts.benchmarks.peers.worker import SAMPLED, Burst
from scripts.benchmarks.table import Goal, machine, markdown, publish, table
from tests.real_model import smollm2

NAME = "smollm2"
STORED = contestants.MODELS / "results.json"
LIMIT_S = 1140.0
NUM_ROUNDS = 2
# Of short bursts, which disagree more.
NUM_SHORT_ROUNDS = 4
DECODED = "decode of one stream, share of what the memory allows"


@dataclass(frozen=True)
class Cell:
    """What all contestants are asked for, under the keys that `Results.speeds` has."""

    group: str
    num_streams: int
    num_prompt: int
    num_new: int = 32
    num_shared: int = 0
    is_quick: bool = True

    @property
    def key(self) -> tuple[str, int, int]:
        return self.group, self.num_streams, self.num_prompt

    @property
    def title(self) -> str:
        if self.group == "first":
            return f"first of {self.num_prompt}"

        streams = f"{self.num_streams} × {self.num_prompt}"
        return streams if self.group == "greedy" else f"{streams} {self.group}"

    def burst(self, seed: int) -> Burst:
        return Burst(
            self.num_streams,
            self.num_prompt,
            self.num_new,
            real.VOCAB_SIZE,
            seed,
            num_shared=self.num_shared,
            is_warm=self.group == "warm",
            is_sampled=self.group == "sampled",
        )


ONE = Cell("greedy", 1, 32)
FIRST = Cell("first", 1, 900, num_new=1)
FIRST_OF_3000 = Cell("first", 1, 3000, num_new=1)
CELLS = (
    ONE,
    Cell("greedy", 8, 32),
    Cell("greedy", 32, 32),
    FIRST,
    FIRST_OF_3000,
    Cell("sampled", 1, 32),
    Cell("sampled", 32, 32),
    Cell("greedy", 64, 32, is_quick=False),
    Cell("greedy", 8, 512, is_quick=False),
    Cell("sampled", 8, 32, is_quick=False),
    Cell("sampled", 64, 32, is_quick=False),
    Cell("cold", 32, 416, num_new=16, num_shared=400, is_quick=False),
    Cell("warm", 32, 416, num_new=16, num_shared=400, is_quick=False),
)


@dataclass(frozen=True)
class Duel:
    """What is compared: two that have the same weights in the same precision, and both a server or
    neither.
    """

    title: str
    own: str
    peer: str

    def ratio(self, results: Results, cell: Cell) -> float | None:
        return results.ratio(cell.key[0], cell.key[1:], self.own, (self.peer,))


DUELS = (
    Duel("OpenVINO GenAI, bf16", LMI_BF16, OV_BF16),
    Duel("vLLM, bf16", LMI_BF16, VLLM_BF16),
    Duel("OpenVINO GenAI, int8", LMI_INT8, OV_INT8),
    Duel("OpenVINO GenAI, int4", LMI_INT4, OV_INT4),
    Duel("llama-server, the GGUF file", LMI_SERVER, LLAMA_SERVER),
)


def measure(is_quick: bool) -> None:
    """Measure the real model, and store what was found."""
    peers = contestants.installed()
    real.make_models(peers)
    results = Results(limits=limits.measure(real.HOME))
    entrants = [entrant.contestant for entrant in real.entrants(peers)]
    with workers(entrants, real.HOME / "engines.log") as ready:
        deadline_s = time.monotonic() + LIMIT_S
        for worker in ready:
            if worker.start is not None and worker.contestant.name != LLAMA_FEW:
                results.starts[worker.contestant.name] = worker.start

        play(who_plays(ready, ONE), Cell("greedy", 8, 32, num_new=8).burst(0), 1, deadline_s)
        for number, cell in enumerate(CELLS):
            if is_quick and not cell.is_quick:
                continue

            say(f"{NAME}: {cell.title}")
            is_short = cell.num_streams == 1 and cell.num_prompt == ONE.num_prompt
            num_rounds = NUM_SHORT_ROUNDS if is_short else NUM_ROUNDS
            burst = cell.burst(100 * (number + 1))
            figures = play(who_plays(ready, cell), burst, 1 if is_quick else num_rounds, deadline_s)
            results.speeds[cell.key] = under_one_name(figures)

    results.limits = limits.highest(results.limits, limits.measure(real.HOME))
    add(STORED, NAME, results)


def who_plays(ready: Sequence[Worker], cell: Cell) -> list[Worker]:
    """Return who can do it: prompts that share tokens are for libraries, and of two llama-servers
    the one with few places has room for a long prompt.
    """
    is_long = cell.num_prompt > real.TOKENS_OF_PLACE
    left_out = LLAMA_SERVER if is_long else LLAMA_FEW
    players: list[Worker] = []
    for worker in ready:
        is_server = worker.contestant.engine == "server"
        if worker.contestant.name != left_out and not (is_server and cell.num_shared):
            players.append(worker)

    return players


def under_one_name(figures: dict[str, Figure]) -> dict[str, Figure]:
    """Return the figures, those of both llama-servers under the name of one."""
    return {LLAMA_SERVER if name == LLAMA_FEW else name: figure for name, figure in figures.items()}


def report(is_written: bool) -> None:
    """Print what is stored, and put it into docs/performance.md."""
    results = load(STORED).get(NAME)
    if results is None:
        raise SystemExit(f"{STORED} has no results of {NAME} yet")

    entrants = list(real.entrants(contestants.installed()))
    figures = figures_of(results, entrants)
    summary = f"{ratios_table(results)}\n\n{table(figures, goals_of(figures))}"
    details = [
        speeds_table(results),
        shares_table(results, entrants),
        conditions(results),
    ]
    print("\n\n".join([summary, *details]))
    if is_written:
        publish(NAME, summary, details, command=f"peers --shapes {NAME}")

    print(json.dumps({title: round(value, 3) for title, value in figures.items()}))


def ratios_table(results: Results) -> str:
    """lmi's tokens/s over those of each peer, as many as were measured."""
    cells = [cell for cell in CELLS if cell.key in results.speeds]
    rows: list[list[str]] = []
    for duel in DUELS:
        ratios = [duel.ratio(results, cell) for cell in cells]
        if any(ratios):
            texts = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
            rows.append([duel.title, *texts])

    return markdown(["lmi over", *(cell.title for cell in cells)], rows)


def figures_of(results: Results, entrants: Sequence[Entrant]) -> dict[str, float]:
    """What the issue asks of all cells together, and lmi's shares of what the memory allows."""
    ratios: list[float] = []
    for duel in DUELS:
        for cell in CELLS:
            ratio = duel.ratio(results, cell)
            if ratio is not None:
                ratios.append(ratio)

    figures: dict[str, float] = {}
    if ratios:
        figures["least ratio of all cells"] = min(ratios)
        num_high = sum(ratio >= 1.2 for ratio in ratios)
        figures["cells with a ratio of 1.2 or more, share"] = num_high / len(ratios)

    for entrant in entrants:
        share = share_of_memory(results, entrant)
        if share is not None and entrant.name in (LMI_BF16, LMI_INT8, LMI_INT4, LMI_GGUF):
            figures[f"{entrant.name}: {DECODED}"] = share

    return figures


def goals_of(figures: dict[str, float]) -> list[Goal]:
    bounds = {
        "least ratio of all cells": 1.0,
        "cells with a ratio of 1.2 or more, share": 0.5,
    }
    return [Goal(title, title, ">=", bounds.get(title, 0.8)) for title in figures]


def share_of_memory(results: Results, entrant: Entrant) -> float | None:
    """How much of the bandwidth one stream uses that reads all weights for each token."""
    figure = results.speeds.get(ONE.key, {}).get(entrant.name)
    limit = results.limits.get("read")
    if figure is None or limit is None:
        return None

    return figure.decoded_per_s * entrant.weight_bytes / (limit * 1e9)


def share_of_products(results: Results, entrant: Entrant) -> float | None:
    """How much of the time to the first token the linears of the layers would take by themselves,
    were all products as fast as the cores' own.
    """
    figure = results.speeds.get(FIRST.key, {}).get(entrant.name)
    limit = results.limits.get(entrant.products)
    if figure is None or limit is None:
        return None

    num_products = real.sizes_of(smollm2()).layers * FIRST.num_prompt
    return 2 * num_products / (limit * 1e9) / (figure.first_ms / 1000)


def speeds_table(results: Results) -> str:
    """Tokens/s, and for a first token milliseconds."""
    cells = [cell for cell in CELLS if cell.key in results.speeds]
    names: dict[str, None] = {}
    for figures in results.speeds.values():
        names.update(dict.fromkeys(figures))

    rows: list[list[str]] = []
    for name in names:
        row = [name]
        for cell in cells:
            row.append(text_of(cell, results.speeds[cell.key].get(name)))

        rows.append(row)

    titles = [f"{cell.title}, ms" if cell.group == "first" else cell.title for cell in cells]
    return markdown(["tokens/s", *titles], rows)


def text_of(cell: Cell, figure: Figure | None) -> str:
    if figure is None:
        return ""

    value = figure.first_ms if cell.group == "first" else figure.tokens_per_s
    return f"{'' if figure.is_quiet else '~'}{value:.0f}"


def shares_table(results: Results, entrants: Sequence[Entrant]) -> str:
    """By contestant: its weights, its shares of what the machine allows, its start, its memory."""
    rows: list[list[str]] = []
    for entrant in entrants:
        start = results.starts.get(entrant.name)
        if start is None:
            continue

        figure = results.speeds.get(ONE.key, {}).get(entrant.name)
        of_memory = share_of_memory(results, entrant)
        of_products = share_of_products(results, entrant)
        rows.append(
            [
                entrant.name,
                f"{entrant.weight_bytes / 1e6:.0f}",
                "" if figure is None else f"{figure.decoded_per_s:.0f}",
                "" if of_memory is None else f"{of_memory:.2f}",
                "" if of_products is None else f"{of_products:.2f} of {entrant.products}",
                f"{start.seconds:.2f}",
                f"{start.idle_mb:.0f}",
            ]
        )

    heads = [
        "contestant",
        "weights, MB",
        "decode of one stream, tokens/s",
        "share of what the memory allows",
        f"share of peak products, first of {FIRST.num_prompt}",
        "start, s",
        "idle, MB",
    ]
    return markdown(heads, rows)


def conditions(results: Results) -> str:
    """Return how all was measured, in words."""
    figures: list[Figure] = []
    for figures_of_cell in results.speeds.values():
        figures += figures_of_cell.values()

    num_loud = sum(not figure.is_quiet for figure in figures)
    allowed = ", ".join(f"{name} {value:.0f}" for name, value in results.limits.items())
    return (
        f"On {machine()}. SmolLM2-135M-Instruct: lmi (GGUF) and llama-server have the package's "
        "file of Q4_1, all others its numbers in bf16, which lmi and OpenVINO quantise. Prompts "
        "of random tokens, all different; streams × tokens of a prompt, 32 new tokens of each; "
        f"greedy, or sampled with {SAMPLED}; cold and warm: 400 tokens of each prompt are shared, "
        "16 are new. Times are from the requests to their last token, with prefill. Each "
        "contestant is loaded once, and all take turns. Each has its own defaults, but: steps of "
        "2048 tokens for OpenVINO, and groups of 64 for its four bits; 64 places for llama-server "
        "where prompts have no more than 1,024 tokens; a size for vLLM's cache. Start: a server "
        "from its exec to 200, a library from its import until it is loaded, once each. Weights "
        "are what one token reads. The machine allows (GB/s of reads, GFLOP/s of products): "
        f"{allowed}. "
        f"{num_loud} of {len(figures)} figures had no quiet burst (`~`)."
    )
