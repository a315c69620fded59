"""Runs the benchmarks and reports each figure beside its goal: a table for people, then one line of
JSON.

`--write` puts the table into docs/performance.md and its first figures into README.md, between
their marks. Absolute times hold for this machine; only ratios compare.
"""

import argparse
import json
import sys
from collections.abc import Callable

from scripts.benchmarks import engine, frontend, gateway, install, model, start
from scripts.benchmarks.table import PAGE, README, ROOT, Goal, machine, table, write

MARKS = ("<!-- figures -->", "<!-- end of figures -->")
HEADLINE_MARKS = ("<!-- headlines -->", "<!-- end of headlines -->")
# The figures that README.md has.
HEADLINES = {
    "wheel_install_s",
    "serve_uv_s",
    "start_s",
    "return_s",
    "idle_pss_mb",
    "demo_1",
    "int8_speedup_8",
    "sampled_ratio",
    "ping_p99_ms",
}

PARTS: dict[str, Callable[[], dict[str, float]]] = {
    "install": install.measure,
    "start": start.measure,
    "frontend": frontend.measure,
    "gateway": gateway.measure,
    "model": model.measure,
    "engine": engine.measure,
}

GOALS: list[Goal] = [
    Goal(
        "wheel_install_s", "`pip install` of the wheel in a new venv, packages cached, s", "<=", 35
    ),
    Goal("wheel_mb", "what it adds to the venv, MB", "<=", 330),
    Goal(
        "serve_pip_s",
        "`scripts/serve` in a new checkout to its first answer, with pip, packages cached, s",
        "<=",
        40,
    ),
    Goal("serve_uv_s", "same, with uv, s", "<=", 12),
    Goal("start_s", "`lmi serve demo`, from its exec to 200 at `/ping`, s", "<=", 1.0),
    Goal("return_s", "from SIGKILL of the engine to the next 200, s", "<=", 0.5),
    Goal("idle_pss_mb", "all processes of `lmi serve demo`, idle, PSS, MB", "<=", 150),
    Goal(
        "frontend_ratio",
        "front-end CPU a streamed token, 64 streams / bare uvicorn writing ready-made lines",
        "<=",
        1.7,
    ),
    Goal("frontend_idle_mb", "front-end worker, idle, MB", "<=", 150),
    Goal(
        "gateway_frontend_ratio",
        "front-end CPU a streamed token, 64 streams through the gateway / without it",
        "<=",
        1.2,
    ),
    Goal(
        "gateway_first_ms",
        "time that the gateway adds to the first token at 64 streams, ms",
        "<=",
        2.0,
    ),
    Goal("demo_1", "model step / transformers' model call, demo shape, batch 1", "<=", 1.0),
    Goal("demo_8", "same, batch 8", "<=", 0.8),
    Goal("demo_32", "same, batch 32", "<=", 0.65),
    Goal("demo_64", "same, batch 64", "<=", 0.65),
    Goal("demo_1_bf16", "same, batch 1, weights in bfloat16", "<=", 0.7),
    Goal("135m_1", "same, 135M shape, batch 1", "<=", 0.95),
    Goal("135m_8", "same, batch 8", "<=", 0.6),
    Goal("135m_32", "same, batch 32", "<=", 0.6),
    Goal("int8_speedup_8", "int8 over float32, 135M shape, batch 8, times faster", ">=", 1.6),
    Goal("rest_ms_1", "a step's time beside the model, batch 1, ms", "<=", 1.0),
    Goal("rest_ms_8", "same, batch 8, ms", "<=", 1.0),
    Goal("rest_share_64", "same, batch 64, share of the step", "<=", 0.08),
    Goal(
        "sampled_ratio",
        "tokens/s of 64 streams, temperature 0.8 and top_p 0.95 / greedy, 135M shape",
        ">=",
        0.93,
    ),
    Goal(
        "guide_cost_16", "a guide's share over a step without one, batch 16, demo model", "<=", 0.05
    ),
    Goal(
        "beam_ratio",
        "time of a beam search of width 4 / of four sampled sequences, demo model",
        "<=",
        1.5,
    ),
    Goal(
        "concurrency_ratio",
        "tokens/s of 64 requests at once / one after another, demo model",
        ">=",
        10.0,
    ),
    Goal("ping_p99_ms", "`/ping` p99 while 64 streams run, ms", "<=", 50.0),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        "scripts/bench", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("parts", nargs="*", help=f"any of {', '.join(PARTS)}; all by default")
    parser.add_argument(
        "--write", action="store_true", help="put the table into docs/performance.md and README.md"
    )
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")

    figures: dict[str, float] = {}
    for name in arguments.parts or PARTS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        figures |= PARTS[name]()

    text = f"{table(figures, GOALS)}\n\nOn {machine()}."
    print(text)
    if arguments.write:
        write(text, MARKS, ROOT / PAGE)
        goals_of_headlines = [goal for goal in GOALS if goal.figure in HEADLINES]
        headlines = table(figures, goals_of_headlines)
        write(f"{headlines}\n\nOn {machine()}.", HEADLINE_MARKS, README)

    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
