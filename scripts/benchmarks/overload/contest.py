"""Loads lmi and `vllm serve`, one after another, with more than each can carry, and puts the
figures side by side.

    scripts/overload contest [--quick] [--write] [--only NAME,…] [--caps FLAGS]

Each server has one model, its default settings and its own capacity, to which its figures relate.
vLLM stands twice: at its defaults, and with the caps of its queue as an operator who knows the load
would set them. `--write` puts the table into docs/performance.md between its marks. `--only`
measures some servers anew; the others keep what was measured last.
"""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from scripts.benchmarks.overload.door import Door, started
from scripts.benchmarks.overload.parts import Figures, Plan, Run, Tenant
from scripts.benchmarks.overload.report import (
    CLIENT,
    GOALS,
    PARTS,
    clean,
    closing,
    headlines,
    loads_table,
    measure,
)
from scripts.benchmarks.table import PAGE, ROOT, machine, markdown, write

MARKS = "<!-- overload figures -->", "<!-- end of overload figures -->"
RESULTS = ROOT / "build" / "overload" / "contest.json"
LOADS = 1.0, 2.0, 4.0
# Ten keys of equal weight, of which one asks ten times as often and for answers three times as
# long.
KEYS = (
    Tenant("key-0", 1, 160, 48),
    *(Tenant(f"key-{number}", 1, 16, 16) for number in range(1, 10)),
)
WHOLE = Plan(seconds=60.0, tenants=KEYS)
QUICK = replace(WHOLE, seconds=10.0, capacity_s=4.0, burst_s=5.0)
CAPS = "--max-num-seqs 64 --max-num-queued-reqs 96 --max-num-queued-tokens 2048"
# Figures without a goal.
MORE = {
    "gap_s": "what one tenant with a backlog got more than another, s of capacity",
}


@dataclass(frozen=True)
class Contestant:
    title: str
    # One of `door.py: KINDS`.
    kind: str
    flags: tuple[str, ...] = ()


def contestants(caps: str) -> dict[str, Contestant]:
    return {
        "lmi": Contestant("lmi", "35M"),
        "lmi-vllm": Contestant(
            "lmi, vLLM as engine", "35M", ("--set", "option.rolling_batch=vllm")
        ),
        "vllm": Contestant("`vllm serve`", "vllm"),
        "vllm-caps": Contestant("`vllm serve`, capped", "vllm", tuple(shlex.split(caps))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        "scripts/overload contest", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="10 s of each load in place of 60")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE}")
    parser.add_argument("--only", help="names, with commas between: lmi, lmi-vllm, vllm, vllm-caps")
    parser.add_argument("--caps", default=CAPS, help=f"flags of vllm-caps; {CAPS}")
    arguments = parser.parse_args()
    servers = contestants(arguments.caps)
    names = arguments.only.split(",") if arguments.only else list(servers)
    unknown = set(names) - set(servers)
    if unknown:
        parser.error(f"no such server: {', '.join(sorted(unknown))}")

    plan = QUICK if arguments.quick else WHOLE
    notes = []
    results = {}
    if arguments.only and RESULTS.exists():
        results = json.loads(RESULTS.read_text())

    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        parts, note = measured(servers[name], plan)
        results[name] = clean(parts) | {"figures": figures(parts)}
        notes.append(f"{servers[name].title}: {note}")
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(results) + "\n")
        print(f"{name}\n\n{loads_table(parts['load'])}\n", flush=True)

    columns = {}
    for name, server in servers.items():
        if name in results:
            columns[server.title] = results[name]["figures"]

    text = table(columns)
    how = (
        f"Loads of {plan.seconds:g} s, clients leave after {plan.patience_s:g} s. The caps: "
        f"`{arguments.caps}`. On {machine()}."
    )
    print("\n\n".join([text, how, *notes]))
    if arguments.write:
        write(f"{text}\n\n{how}", MARKS, ROOT / PAGE)


def measured(contestant: Contestant, plan: Plan) -> tuple[Figures, str]:
    """Return the figures of a server's parts, and what else happened meanwhile."""
    with started(contestant.kind, contestant.flags) as target:
        door = Door("openai", target.model, dict(CLIENT))
        run = Run(target, door, plan)
        measurements = measure(run, PARTS, LOADS)

    return measurements, closing(run, measurements)


def figures(results: Figures) -> dict[str, float]:
    """Return the figures of the table."""
    values = headlines(results)
    if "tenants" in results:
        values["gap_s"] = results["tenants"]["gap_s"]

    return values


def table(columns: Mapping[str, Mapping[str, float]]) -> str:
    """Return a row for each figure, with its goal, and a column for each server."""
    goals: dict[str, str] = {}
    texts: dict[str, str] = {}
    for goal in GOALS:
        goals[goal.figure] = f"{goal.sign} {goal.bound:g}"
        texts[goal.figure] = goal.text

    rows = []
    for name, text in (texts | MORE).items():
        cells = [cell(column.get(name, math.nan)) for column in columns.values()]
        rows.append([text, *cells, goals.get(name, "")])

    return markdown(["figure", *columns, "goal"], rows)


def cell(value: float) -> str:
    if math.isnan(value):
        return ""

    if math.isinf(value):
        return "never"

    return f"{value:.2f}"


if __name__ == "__main__":
    main()
