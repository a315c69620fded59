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
    """Return the microseconds of CPU that a process takes for a streamed token."""
    requests = [[invocation(NUM_TOKENS)]] * NUM_STREAMS
    return run_round(port, requests, LMI, {pid: "server"}).us_per_token("server")


def bare_command(port: int) -> list[str]:
    """Return the command of the bare application."""
    flags = {
        "--port": str(port),
        "--http": "httptools",
        "--loop": "uvloop",
        "--lifespan": "off",
        "--log-level": "warning",
    }
    command = [sys.executable, "-m", "uvicorn", "scripts.benchmarks.bare:app", "--no-access-log"]
    for flag, value in flags.items():
        command += [flag, value]

    return command


def measure(rounds: int = ROUNDS) -> dict[str, float]:
    """Alternate between the two servers. The ratio is the median over the rounds."""
    port = servers.free_port()
    environ = {"BENCH_STEP_S": str(STEP_S), "BENCH_NUM_TOKENS": str(NUM_TOKENS)}
    properties = {
        "option.rolling_batch": "echo",
        "option.echo_step_ms": STEP_S * 1000,
        "frontend_workers": 1,
    }
    lmi_us: list[float] = []
    bare_us: list[float] = []
    with (
        servers.process(bare_command(port), port, environ) as bare,
        servers.lmi(properties) as lmi,
    ):
        front_pid = lmi.pid("lmi-front-0")
        idle_mb = servers.rss_mb(front_pid)
        # The first round warms up.
        for _ in range(1 + rounds):
            lmi_us.append(us_per_token(lmi.port, front_pid))
            bare_us.append(us_per_token(port, bare.process.pid))

    del lmi_us[0]
    del bare_us[0]
    ratios = [of_lmi / of_bare for of_lmi, of_bare in zip(lmi_us, bare_us, strict=True)]
    return {
        "frontend_us_per_token": statistics.median(lmi_us),
        "bare_us_per_token": statistics.median(bare_us),
        "frontend_ratio": statistics.median(ratios),
        "frontend_idle_mb": idle_mb,
    }
