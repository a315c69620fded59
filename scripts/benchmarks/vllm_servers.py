"""Measures `lmi serve` with vLLM as its engine against vLLM's own servers; `vllm_report.py` reports
the figures.

All servers get one model and the same requests, and have their default settings. They run one at a
time, in turns, and each turn reverses their order. A round in which other processes used more than
a quarter of a core does not count and is repeated. The number of tokens that answers report is
compared with each server's counter.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from scripts.benchmarks import servers, vllm_model
from scripts.benchmarks.load import (
    LMI as LMI_RECORDS,
    Records,
    Round,
    invocation,
    request,
    run_round,
)
from scripts.benchmarks.servers import Server

NUM_TOKENS = 64
# By number of streams: the requests of each in a round.
ASKS = {1: 10, 8: 6, 32: 4, 64: 3}
MOST = max(ASKS)
# Kinds of requests.
STREAMED = "streamed"
WHOLE = "whole"
LOG_PROBS = "log-probs"
OWN_API = "own API"
# By kind: the numbers of streams that are measured.
CASES = {
    # At /v1/completions, as are the next two.
    STREAMED: tuple(ASKS),
    WHOLE: tuple(ASKS),
    LOG_PROBS: (MOST,),
    # At /invocations, whose every line carries a log-prob.
    OWN_API: tuple(ASKS),
}
NUM_LOG_PROBS = 5
# A round counts if other processes used no more cores.
MAX_FOREIGN = 0.25
# How often a round that does not count is repeated in one turn.
MAX_AGAIN = 2

# By default vLLM's server takes nine tenths of all memory for its KV cache, and does not start if
# they are not free.
ENVIRON: dict[str, str | None] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": None,
    "GOMP_SPINCOUNT": None,
}
BARE_ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "1000",
}

FRONT = "front"
CORE = "core"
WORKER = "worker"
REST = "rest"
TITLES = {
    "lmi-front-": FRONT,
    "vllm-rs": FRONT,
    "lmi-engine-": CORE,
    "VLLM::EngineCore": CORE,
    "VLLM::Worker": WORKER,
}

LMI = "lmi"
VLLM = "vllm"
RUST = "vllm_rust"
BARE = "bare"


@dataclass(frozen=True)
class Asking:
    """One kind of request, and how its answer is read."""

    request: Callable[[str], bytes]  # given the prompt
    records: Records


@dataclass(frozen=True)
class Peer:
    """A server to measure: how to start it and ask it."""

    name: str
    # Given the model's folder and one for its caches
    start: Callable[[str, Path], AbstractContextManager[Server]]
    # By kind of case
    askings: Mapping[str, Asking]
    # The metric that counts the tokens it has sent
    counter: str
    # Of the process that is started
    root_role: str = REST

    @property
    def cases(self) -> list[tuple[str, int]]:
        return [(kind, num_streams) for kind in self.askings for num_streams in CASES[kind]]

    def roles(self, root: int) -> dict[int, str]:
        """Return the role of each process of the server, by its title."""
        roles: dict[int, str] = {}
        for pid in servers.family(root):
            roles[pid] = self.root_role if pid == root else REST
            for title, role in TITLES.items():
                if servers.has_title(pid, title):
                    roles[pid] = role
                    break

        return roles


def completion(prompt: str, **more: object) -> bytes:
    body = {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    return request("/v1/completions", json.dumps(body | more).encode())


def completions() -> dict[str, Asking]:
    """The requests to every server, with the same path and body for all."""
    chunk = Records(
        mark=re.compile(rb'"text": ?"[^"]'), count=re.compile(rb'"completion_tokens": ?(\d+)')
    )
    stream: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    parameters: dict[str, dict[str, Any]] = {
        STREAMED: stream,
        WHOLE: {},
        LOG_PROBS: stream | {"logprobs": NUM_LOG_PROBS},
    }
    return {kind: Asking(partial(completion, **more), chunk) for kind, more in parameters.items()}


def kept_in(caches: Path) -> dict[str, str | None]:
    """Variables that keep compiled kernels in `caches`: a server writes them to its cache folder or
    to TMPDIR.
    """
    caches.mkdir(exist_ok=True)
    return {"XDG_CACHE_HOME": str(caches), "TMPDIR": str(caches), "VLLM_CACHE_ROOT": None}


def lmi_peer() -> Peer:
    properties = {
        # The default: a line for each request, as from vLLM's Python server
        "log_level": "INFO",
        "option.rolling_batch": "vllm",
        "option.model_name": "bench",
    }
    return Peer(
        name="lmi",
        start=lambda model, caches: servers.lmi(properties, model, ENVIRON | kept_in(caches)),
        askings=completions() | {OWN_API: Asking(partial(invocation, NUM_TOKENS), LMI_RECORDS)},
        counter="lmi_generated_tokens_total",
    )


def vllm_peer(rust_binary: str | None = None) -> Peer:
    environ = dict(ENVIRON)
    if rust_binary:
        environ |= {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": rust_binary}

    @contextmanager
    def start(model: str, caches: Path) -> Iterator[Server]:
        port = servers.free_port()
        command = [sys.executable, "-m", "scripts.benchmarks.vllm_serve", "serve", model]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "bench"]
        with servers.process(command, port, environ | kept_in(caches), "/health") as server:
            yield server

    return Peer(
        name="vLLM, Rust front end" if rust_binary else "vllm serve",
        start=start,
        askings=completions(),
        counter="vllm:generation_tokens_total",
        root_role=REST if rust_binary else FRONT,
    )


def rust_binary() -> str | None:
    """The path of vLLM's Rust front end, from its variable or in the package, or None if this build
    has none.
    """
    path_text = os.environ.get("VLLM_RUST_FRONTEND_PATH")
    if path_text:
        return path_text

    location = subprocess.run(
        [
            sys.executable,
            "-c",
            "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    inside = Path(location.stdout.strip(), "vllm-rs")
    return str(inside) if os.access(inside, os.X_OK) else None


@dataclass
class Record:
    """The measurements of one server."""

    name: str
    starts_s: list[float] = field(default_factory=list)
    # By role, one for each turn
    memory_mb: list[dict[str, float]] = field(default_factory=list)
    rounds: dict[tuple[str, int], list[Round]] = field(default_factory=dict)
    num_left_out: int = 0

    def add(self, case: tuple[str, int], done: Round) -> bool:
        """Add a round if it counts. Returns whether it does."""
        if done.foreign > MAX_FOREIGN:
            self.num_left_out += 1
            return False

        self.rounds.setdefault(case, []).append(done)
        return True

    def median(self, case: tuple[str, int], figure: Callable[[Round], float]) -> float | None:
        """Return the median of a figure over the rounds of a case, or None if there are none."""
        rounds = self.rounds.get(case)
        if not rounds:
            return None

        return statistics.median(map(figure, rounds))

    def memory(self, role: str) -> float | None:
        """Return the median memory of a role over the turns, or None if there was no turn."""
        if not self.memory_mb:
            return None

        return statistics.median(by_role.get(role, 0.0) for by_role in self.memory_mb)


def turn(
    peer: Peer, record: Record, model: str, repeats: int, seed: str, deadline_s: float
) -> None:
    """Start the server, measure every case, stop it.

    Only its first start finds no compiled kernels: later ones find those of the first.
    """
    caches = Path(model, f"caches of {peer.name}".replace(" ", "-"))
    with peer.start(model, caches) as server:
        record.starts_s.append(server.start_s)
        roles = peer.roles(server.process.pid)
        for kind in peer.askings:
            for num_streams in (1, MOST):
                run_case(peer, server, roles, (kind, num_streams), "warm-up", num_asks=1)

        for repeat in range(repeats):
            for case in peer.cases:
                for again in range(1 + MAX_AGAIN):
                    done = run_case(peer, server, roles, case, f"{seed} {repeat}.{again}")
                    if record.add(case, done) or time.monotonic() > deadline_s:
                        break

        memory_mb: dict[str, float] = {}
        for pid, role in roles.items():
            memory_mb[role] = memory_mb.get(role, 0.0) + servers.rss_mb(pid)

        record.memory_mb.append(memory_mb)


def run_case(
    peer: Peer,
    server: Server,
    roles: dict[int, str],
    case: tuple[str, int],
    seed: str,
    num_asks: int | None = None,
) -> Round:
    """Run one round of a case. Raises RuntimeError if an answer is short or the server's counter
    does not agree.
    """
    kind, num_streams = case
    num_asks = num_asks or ASKS[num_streams]
    prompts = iter(vllm_model.prompts(num_streams * num_asks, f"{seed} {case}"))
    asking = peer.askings[kind]
    requests = [
        [asking.request(next(prompts)) for _ in range(num_asks)] for _ in range(num_streams)
    ]
    num_before = num_counted(server.port, peer.counter)
    done = run_round(server.port, requests, asking.records, roles)
    if done.num_tokens != num_streams * num_asks * NUM_TOKENS:
        raise RuntimeError(
            f"{peer.name}: {done.num_tokens} tokens in {num_streams * num_asks} answers of "
            f"{NUM_TOKENS}"
        )

    # Counters may follow a moment later
    give_up_s = time.monotonic() + 10
    while num_counted(server.port, peer.counter) - num_before != done.num_tokens:
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"{peer.name} counted other than {done.num_tokens} tokens")

        time.sleep(0.05)

    return done


def num_counted(port: int, counter: str) -> int:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()

    return sum(
        int(float(line.rsplit(" ", 1)[1])) for line in lines if re.match(rf"{counter}[ {{]", line)
    )


def bare_turn(record: Record, model: str, repeats: int, seed: str) -> None:
    """Measure the engine without a server, in its own process, under the load of the
    most streams.
    """
    num_prompts = MOST * ASKS[MOST]
    rounds = [
        vllm_model.prompts(num_prompts, f"{seed} {number}")
        for number in range(repeats + MAX_AGAIN + 1)
    ]
    settings = {"model": model, "num_users": MOST, "num_tokens": NUM_TOKENS, "rounds": rounds}
    environ = {**os.environ, **ENVIRON, **BARE_ENVIRON}
    output = subprocess.run(
        [sys.executable, "-m", "scripts.benchmarks.vllm_bare"],
        input=json.dumps(settings).encode(),
        env={name: value for name, value in environ.items() if value is not None},
        cwd=tempfile.gettempdir(),
        stdout=subprocess.PIPE,
        check=True,
        timeout=180,
    ).stdout
    num_good = 0
    for line in output.splitlines():
        if line.startswith(b'{"num_tokens"') and num_good < repeats:
            num_good += record.add((STREAMED, MOST), Round(**json.loads(line)))


def measure(turns: int, repeats: int, limit_s: float) -> dict[str, Record]:
    """Take turns until all are done or the next one would exceed the limit."""
    began_s = time.monotonic()
    peers = {LMI: lmi_peer(), VLLM: vllm_peer()}
    binary = rust_binary()
    if binary:
        peers[RUST] = vllm_peer(binary)

    records = {key: Record(peer.name) for key, peer in peers.items()}
    records[BARE] = Record("bare engine, no server")
    with tempfile.TemporaryDirectory(prefix="lmi-bench-") as model:
        subprocess.run([sys.executable, "-m", "scripts.benchmarks.vllm_model", model], check=True)
        for number in range(turns):
            turn_began_s = time.monotonic()
            keys = list(records)
            if number % 2:
                keys.reverse()

            for key in keys:
                say(f"turn {number + 1} of {turns}: {records[key].name}")
                if key == BARE:
                    bare_turn(records[key], model, repeats, f"{number}")
                else:
                    turn(peers[key], records[key], model, repeats, f"{number}", began_s + limit_s)

            now_s = time.monotonic()
            if now_s - began_s + (now_s - turn_began_s) > limit_s:
                say(f"{now_s - began_s:.0f} s are over, no further turn")
                break

    return records


def say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)
