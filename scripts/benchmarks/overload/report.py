"""Loads a server with more than it can carry, and reports goodput, refusals, recovery and fairness.

Every figure is a ratio to the capacity measured beside it. Prints two tables, then one line of
JSON. Words after -- are flags of the server that is started.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from lmi.client.bench.figures import quantile
from scripts.benchmarks.overload.door import APIS, KINDS, Door, Target, running, started
from scripts.benchmarks.overload.parts import Figures, NoAnswer, Plan, Run, Tenant
from scripts.benchmarks.table import Goal, machine, markdown, table

PARTS = ("load", "burst", "hogs", "tenants")
# By API. Only OpenAI's streams several prompts.
PARTS_OF = {
    "openai": PARTS,
    "lmi": ("load", "burst", "tenants"),
}
# By which servers tell clients apart: one with keys, and lmi or a gateway where it trusts the
# latter.
CLIENT = [("Authorization", "Bearer {tenant}"), ("x-llm-d-inference-fairness-id", "{tenant}")]
GOALS: list[Goal] = [
    Goal(
        "goodput 1",
        "goodput over capacity (over what was asked for, if less), load 1 of capacity",
        ">=",
        0.9,
    ),
    Goal("goodput 2", "same, load 2", ">=", 0.8),
    Goal("goodput 4", "same, load 4", ">=", 0.8),
    Goal("refusal_p99_ms", "a refusal, p99 of the worst load, ms", "<=", 100),
    Goal(
        "servable_share",
        "refusals that idle capacity could have served, share, worst load",
        "<=",
        0.05,
    ),
    Goal("ping_p99_ms", "health check, p99 of the worst load, ms", "<=", 50),
    Goal("recovery_s", "seconds from a burst until goodput is back", "<=", 5),
    Goal(
        "light_ratio", "a light client's wait beside two hogs, less one step, over alone", "<=", 3
    ),
    Goal("least_share", "least service of a tenant with a backlog over an equal one", ">=", 0.8),
]


def main() -> None:
    words = sys.argv[1:]
    flags_of_server: list[str] = []
    if "--" in words:
        end = words.index("--")
        flags_of_server = words[end + 1 :]
        words = words[:end]

    arguments = parser().parse_args(words)
    unknown = set(arguments.parts) - set(PARTS_OF[arguments.api])
    if unknown:
        parser().error(f"no such part: {', '.join(sorted(unknown))}")

    with server_of(arguments, flags_of_server) as target:
        door = Door(arguments.api, target.model, dict(arguments.header))
        run = Run(target, door, plan_of(arguments))
        results = measure(run, arguments.parts or PARTS_OF[arguments.api], arguments.loads)

    results["server"] = [arguments.url or arguments.server, *flags_of_server]
    loads = loads_table(results["load"])
    figures = table(headlines(results), GOALS, "not measured")
    print("\n\n".join([loads, figures, closing(run, results)]))

    text = json.dumps(clean(results))
    if arguments.json:
        arguments.json.write_text(text + "\n")

    print(text)


def server_of(arguments: argparse.Namespace, flags: list[str]) -> AbstractContextManager[Target]:
    """Return the server that runs, or one that is started with these flags."""
    if arguments.url:
        return nullcontext(running(arguments.url, arguments.model))

    return started(arguments.server, flags)


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return the plan that the arguments say; what they do not say has its default."""
    settings = vars(arguments)
    names = [field.name for field in fields(Plan) if field.name in settings]
    return Plan(**{name: settings[name] for name in names})


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "scripts/overload",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "parts",
        nargs="*",
        help=f"any of {', '.join(PARTS)}, where the API has it; all by default",
        default=[],
    )
    server = parser.add_mutually_exclusive_group()
    server.add_argument("--url", help="a server that runs: http://HOST:PORT")
    server.add_argument(
        "--server",
        choices=KINDS,
        default="35M",
        help="the server to start; echo has no model, and its capacity hardly depends on the "
        "machine",
    )
    add("--api", choices=APIS, default="openai")
    add("--model", default="", help="what requests name; else the first that the server lists")
    add(
        "--header",
        type=header,
        action="append",
        default=CLIENT,
        help="NAME:VALUE, where {tenant} is the client's name",
    )
    add("--loads", type=numbers, default=(1.0, 2.0, 4.0), help="of capacity, with commas between")
    add("--seconds", type=float, default=Plan.seconds, help="of each load")
    add(
        "--patience",
        type=float,
        default=Plan.patience_s,
        dest="patience_s",
        help="seconds until a client leaves",
    )
    add("--tokens", type=int, default=Plan.num_tokens, dest="num_tokens", help="of an answer")
    add(
        "--capacity-seconds",
        type=float,
        default=Plan.capacity_s,
        dest="capacity_s",
        help="of measuring capacity",
    )
    add(
        "--users",
        type=int,
        default=Plan.num_users,
        dest="num_users",
        help="of the closed loop that measures capacity",
    )
    add(
        "--burst",
        type=float,
        default=Plan.burst_s,
        dest="burst_s",
        help="seconds of work that come at once",
    )
    add(
        "--hog",
        type=hog,
        default=Plan.hog,
        help="its prompts, answers to each and tokens, with commas between",
    )
    add(
        "--tenants",
        type=tenants,
        default=Plan.tenants,
        help="NAME:WEIGHT:STREAMS:TOKENS, with commas between",
    )
    add("--seed", default=Plan.seed, help="of arrivals and prompts")
    add("--json", type=Path, help="a file for the figures")
    return parser


# How the values of flags are read.


def header(text: str) -> tuple[str, str]:
    name, _, value = text.partition(":")
    return name, value.strip()


def numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def hog(text: str) -> tuple[int, int, int]:
    num_prompts, num_choices, num_tokens = map(int, text.split(","))
    return num_prompts, num_choices, num_tokens


def tenants(text: str) -> tuple[Tenant, ...]:
    all_tenants: list[Tenant] = []
    for row in text.split(","):
        name, weight, num_streams, num_tokens = row.split(":")
        all_tenants.append(Tenant(name, float(weight), int(num_streams), int(num_tokens)))

    return tuple(all_tenants)


def measure(run: Run, parts: Iterable[str], loads: Iterable[float]) -> Figures:
    """Return the figures of each part. If the server stops answering in one, the parts before keep
    theirs.
    """
    results: Figures = {"load": []}
    for part in parts:
        print(f"{part} ...", file=sys.stderr, flush=True)
        try:
            if part == "load":
                for factor in loads:
                    results["load"].append(run.load(factor))
            else:
                results[part] = getattr(run, part)()
        except NoAnswer as error:
            print(f"  left out: {error}", file=sys.stderr, flush=True)

    return results


def headlines(results: Figures) -> dict[str, float]:
    """Return the figures that have a goal. Of several loads it is the worst."""
    figures: dict[str, float] = {}
    for row in results["load"]:
        figures[f"goodput {row['load']:g}"] = row["goodput_ratio"]

    for name in ("refusal_p99_ms", "servable_share", "ping_p99_ms"):
        values = [row[name] for row in results["load"] if not math.isnan(row[name])]
        figures[name] = max(values, default=math.nan)

    if "burst" in results:
        back_s = results["burst"]["recovery_s"]
        figures["recovery_s"] = math.inf if back_s is None else back_s

    if "hogs" in results:
        figures["light_ratio"] = results["hogs"]["light_ratio"]

    if "tenants" in results:
        figures["least_share"] = results["tenants"]["least_share"]

    return {name: value for name, value in figures.items() if not math.isnan(value)}


def loads_table(rows: list[Figures]) -> str:
    """Return a row for each load."""
    titles = [
        "load",
        "goodput",
        "delivered",
        "whole",
        "refused",
        "left",
        "failed",
        "refusal p50, p99 ms",
        "Retry-After s",
        "none",
        "servable",
        "first token p50, p99 s",
        "ping p50, p99 ms",
        "driver cores",
    ]
    return markdown(titles, [load_cells(row) for row in rows])


def load_cells(row: Figures) -> list[str]:
    """Return the cells of a load; what was not measured is left out of them."""
    retries = ", ".join(f"{seconds:g}" for seconds in row["retry_after_s"])
    cells = [
        f"{row['load']:g}",
        f"{row['goodput_ratio']:.2f}",
        f"{row['delivered_ratio']:.2f}",
        *map(str, row["outcomes"].values()),
        f"{row['refusal_p50_ms']:.0f}, {row['refusal_p99_ms']:.0f}",
        retries,
        str(row["num_without_retry_after"]),
        f"{row['servable_share']:.2f}",
        f"{row['first_p50_s']:.2f}, {row['first_p99_s']:.2f}",
        f"{row['ping_p50_ms']:.0f}, {row['ping_p99_ms']:.0f}",
        f"{row['driver_cores']:.2f}",
    ]
    return [cell.replace("nan, ", "").replace("nan", "") for cell in cells]


def closing(run: Run, results: Figures) -> str:
    """Return what the driver and others took of the machine, and a caveat if there is one."""
    cores = max(phase.driver_cores for phase in run.phases)
    late_ms: list[float] = []
    foreign_cores: list[float] = []
    for phase in run.phases:
        late_ms += [late_s * 1e3 for late_s in phase.late_s]
        if not math.isnan(phase.foreign_cores):
            foreign_cores.append(phase.foreign_cores)

    caveat = ""
    if results.get("hogs", {}).get("is_at_least"):
        caveat = "The light client still waited at the end: its ratio is a lower bound. "

    return (
        f"{caveat}The driver took {cores:.2f} of {os.cpu_count()} cores in its dearest phase and "
        f"sent requests {quantile(late_ms, 0.99):.1f} ms late (p99); others than its server took "
        f"up to {quantile(foreign_cores, 1):.2f} cores. On {machine()}."
    )


def clean(value: Any) -> Any:
    """Return the value as JSON has it: rounded, and None for what is not a number."""
    if isinstance(value, Mapping):
        return {name: clean(part) for name, part in value.items()}

    if isinstance(value, list):
        return [clean(part) for part in value]

    if not isinstance(value, float):
        return value

    return round(value, 4) if math.isfinite(value) else None


if __name__ == "__main__":
    main()
