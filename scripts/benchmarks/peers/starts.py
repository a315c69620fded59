"""How fast each server starts, and how much memory it takes idle, in turns."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.benchmarks import servers
from scripts.benchmarks.peers.contest import ROOT, Contestant, say
from scripts.benchmarks.peers.server_engine import PORT, READY_S
from scripts.benchmarks.start import SETTLE_S, pss_mb

NUM_STARTS = 3


@dataclass(frozen=True)
class Start:
    seconds: float  # from its exec to the first 200 of its health check
    idle_mb: float  # PSS of all its processes


def play(own: Sequence[Contestant]) -> dict[str, Start]:
    """Return the medians of each server. One that does not start is left out, with a line that says so."""
    found: dict[str, list[Start]] = {contestant.name: [] for contestant in own}
    for number in range(NUM_STARTS):
        for contestant in own if number % 2 else reversed(own):
            try:
                found[contestant.name].append(_start(contestant, **contestant.settings))
            except (RuntimeError, TimeoutError) as error:
                say(f"left out: {contestant.name}: {error}")
    return {
        name: Start(statistics.median(one.seconds for one in starts), statistics.median(one.idle_mb for one in starts))
        for name, starts in found.items()
        if starts
    }


def _start(contestant: Contestant, command: list[str], health: str, environ: Mapping[str, str | None]) -> Start:
    port = servers.free_port()
    command = [str(port) if word == PORT else word for word in command]
    environ = {"PYTHONPATH": str(ROOT), **contestant.environ, **environ}
    with servers.process(command, port, environ, health, READY_S) as server:
        time.sleep(SETTLE_S)
        return Start(server.start_s, sum(pss_mb(server).values()))
