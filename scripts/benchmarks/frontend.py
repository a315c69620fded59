"""The CPU time of the front end per streamed token, against a bare uvicorn application at the same
token rate.
"""

import statistics
import sys

from scripts.benchmarks import servers
from scripts.benchmarks.load import LMI, invocation, run_round

NUM_STREAMS = 64
NUM_TOKENS = 200
STEP_S = 0.02
ROUNDS = 5


def us_per_token(port: int, pid: int) -> float:
    return run_round(
        port, [[invocation(NUM_TOKENS)]] * NUM_STREAMS, LMI, {pid: "server"}
    ).us_per_token("server")


def measure(rounds: int = ROUNDS) -> dict[str, float]:
    """Alternate between the two servers. The ratio is the median over the rounds."""
    port = servers.free_port()
    bare = [sys.executable, "-m", "uvicorn", "scripts.benchmarks.bare:app"]
    bare += [
        "--port",
        str(port),
        "--http",
        "httptools",
        "--loop",
        "uvloop",
        "--no-access-log",
        "--lifespan",
        "off",
    ]
    environ = {"BENCH_STEP_S": str(STEP_S), "BENCH_NUM_TOKENS": str(NUM_TOKENS)}
    properties = {
        "option.rolling_batch": "echo",
        "option.echo_step_ms": STEP_S * 1000,
        "frontend_workers": 1,
    }
    ours_us = []
    bare_us = []
    with (
        servers.process([*bare, "--log-level", "warning"], port, environ) as floor,
        servers.lmi(properties) as lmi,
    ):
        front = lmi.pid("lmi-front-0")
        idle_mb = servers.rss_mb(front)
        us_per_token(lmi.port, front), us_per_token(port, floor.process.pid)  # warm-up
        for _ in range(rounds):
            ours_us.append(us_per_token(lmi.port, front))
            bare_us.append(us_per_token(port, floor.process.pid))

    ratios = [our_us / their_us for our_us, their_us in zip(ours_us, bare_us, strict=True)]
    return {
        "frontend_us_per_token": statistics.median(ours_us),
        "bare_us_per_token": statistics.median(bare_us),
        "frontend_ratio": statistics.median(ratios),
        "frontend_idle_mb": idle_mb,
    }
