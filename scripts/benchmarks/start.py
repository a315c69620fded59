"""How fast `lmi serve demo` starts, how fast it is back after its engine was killed, and how much
memory it takes idle.

Each time is a median: from the exec of the console script to the first 200 of `/ping`, and from
SIGKILL of the engine to the next 200. Memory is PSS, which counts a page that several processes
share once in all.
"""

import os
import signal
import statistics
import sys
import time
from http.client import HTTPConnection
from pathlib import Path

from lmi.shared import processes
from scripts.benchmarks.servers import Server, family, free_port, process

NUM_STARTS = 5
LIMIT_S = 60.0
POLL_S = 0.005
# After so long an idle server has done what it does once.
SETTLE_S = 1.0
ENGINE = "lmi-engine"


def measure() -> dict[str, float]:
    starts = []
    returns = []
    memory: dict[str, float] = {}
    for _ in range(NUM_STARTS):
        port = free_port()
        script = str(Path(sys.executable).with_name("lmi"))
        command = [
            script,
            "serve",
            "demo",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--log-level",
            "WARNING",
        ]
        with process(command, port) as server:
            starts.append(server.start_s)
            time.sleep(SETTLE_S)
            memory = pss_mb(server)
            returns.append(return_s(server))

    for title, megabytes in memory.items():
        print(f"  {title:<16} {megabytes:6.1f} MB", file=sys.stderr)

    return {
        "start_s": statistics.median(starts),
        "return_s": statistics.median(returns),
        "idle_pss_mb": sum(memory.values()),
    }


def pss_mb(server: Server) -> dict[str, float]:
    """Return the PSS of each process of a server, by its name."""
    megabytes: dict[str, float] = {}
    for pid in family(server.process.pid):
        title = processes.title(pid)
        megabytes[title] = megabytes.get(title, 0.0) + pss_kb(pid) / 1024

    return megabytes


def pss_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])

    raise LookupError(f"process {pid} has no PSS")


def return_s(server: Server) -> float:
    """Kill the engine, and return the time until another one has made `/ping` 200."""
    engine_pid = server.pid(ENGINE)
    began_s = time.monotonic()
    os.kill(engine_pid, signal.SIGKILL)
    has_failed = False
    while time.monotonic() - began_s < LIMIT_S:
        is_healthy = ping(server.port) == 200
        if is_healthy and has_failed:
            return time.monotonic() - began_s

        has_failed = has_failed or not is_healthy
        time.sleep(POLL_S)

    raise TimeoutError("the engine did not come back")


def ping(port: int) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("GET", "/ping")
        return connection.getresponse().status
    finally:
        connection.close()
