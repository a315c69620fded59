"""Rolling restarts under load: servers behind a balancer end and start again, or one takes over
from another.

Clients keep their connections, ask again at once or after a moment, and note each request that
failed and each stream that was cut. The balancers' configurations are those of docs/scale.md.

    with Load(port, num_clients=12) as load:
        restart(server)
    assert load.failures == []
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from tests.served import Server, launch
from tests.system.container import ROOT, free_port, wait_until, write_model

PAGE = ROOT / "docs" / "scale.md"
NUM_TOKENS = 25
STEP_MS = 10
# Of a client before its next request
THINK_S = (0.0, 0.0, 0.05, 0.4)
DRAIN_DELAY_S = 3
TIMEOUT_S = 30.0
ID = "X-Amzn-SageMaker-Inference-Id"


class Load:
    """Clients that ask until the block ends, each over one connection; every second request is a
    stream.
    """

    def __init__(self, port: int, num_clients: int, name: str = "clients") -> None:
        """`name` stands in the log of the servers, in the ids of these requests."""
        self.port = port
        self.name = name
        self.ends: Counter[str] = Counter()
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._clients = [
            threading.Thread(target=self._ask_on, args=(number,)) for number in range(num_clients)
        ]

    def __enter__(self) -> Load:
        for client in self._clients:
            client.start()

        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let each client end its request, and ask no more."""
        self._stop.set()
        for client in self._clients:
            client.join()

    def wait_for(self, num_answers: int) -> None:
        """Wait until so many more requests were answered whole."""
        before = self.ends["whole"]
        wait_until(
            lambda: self.ends["whole"] >= before + num_answers, f"{num_answers} answers came"
        )

    def _ask_on(self, number: int) -> None:
        chance = random.Random(number)
        connection = HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        is_stream = bool(number % 2)
        while not self._stop.is_set():
            started_s = time.monotonic()
            end = self._ask(connection, is_stream)
            self.ends[end] += 1
            if end != "whole":
                kind = "stream" if is_stream else "whole"
                self.failures.append(f"{kind} after {time.monotonic() - started_s:.3f} s: {end}")
                connection.close()

            is_stream = not is_stream
            self._stop.wait(chance.choice(THINK_S))

        connection.close()

    def _ask(self, connection: HTTPConnection, is_stream: bool) -> str:
        """Return how a request ended: "whole", or what went wrong."""
        body = {"inputs": "abc", "parameters": {"max_new_tokens": NUM_TOKENS}, "stream": is_stream}
        try:
            connection.request("POST", "/invocations", json.dumps(body), {ID: self.name})
            response = connection.getresponse()
            answer = response.read()
        except (OSError, HTTPException) as error:
            return f"{type(error).__name__}: {error}"

        if response.status != 200:
            return f"{response.status} {answer[:100]!r}"

        lines = [json.loads(line) for line in answer.splitlines()]
        is_whole = len(lines) == (NUM_TOKENS if is_stream else 1) and "generated_text" in lines[-1]
        return "whole" if is_whole and "error" not in lines[-1] else f"cut: {answer[-100:]!r}"


class Pings:
    """Asks /ping until the block ends, each time over a connection of its own, and notes each
    answer but 200.
    """

    def __init__(self, port: int) -> None:
        self.failures: list[str] = []
        self.longest_s = 0.0
        self._port = port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask_on)

    def __enter__(self) -> Pings:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask_on(self) -> None:
        while not self._stop.wait(0.01):
            started_s = time.monotonic()
            if not answers(self._port):
                self.failures.append(f"at {started_s:.2f} s")

            self.longest_s = max(self.longest_s, time.monotonic() - started_s)


@contextmanager
def two_servers(folder: Path, drain_delay_s: float) -> Iterator[list[Server]]:
    """Run two servers with the echo engine, which are ready."""
    with ExitStack() as stack:
        options = {"drain_delay": drain_delay_s, "option.echo_step_ms": STEP_MS}
        folders = [write_model(folder / name, **options) for name in ("a", "b")]
        servers = [stack.enter_context(launch(model)) for model in folders]
        for server in servers:
            server.wait_200()

        yield servers


@contextmanager
def taking_over(server: Server, folder: Path, **options: object) -> Iterator[Server]:
    """Start another server in the place of one, and do not wait for it."""
    model = write_model(folder, **{"option.echo_step_ms": STEP_MS, **options})
    with launch(model, {"SERVING_TAKEOVER": "true"}, port=server.port) as new:
        yield new


def restart(server: Server, *loads: Load) -> None:
    """End a server as a platform does, start it again at its port, and wait until each load comes
    to it again.
    """
    server.signal(signal.SIGTERM)
    assert server.wait() == 0, server.account()
    num_bytes = server.log.stat().st_size
    server.start_and_wait()

    def is_asked() -> bool:
        log_text = server.log.read_bytes()[num_bytes:].decode(errors="replace")
        return all(f'"request_id":"{load.name}","status":200' in log_text for load in loads)

    wait_until(is_asked, "each balancer sends requests to the server again")


# Balancers.


@dataclass(frozen=True)
class Kind:
    """A balancer: the language of its block on the page, and its command, where FILE is its
    configuration.
    """

    language: str
    command: Sequence[str]
    # How the block says where it listens
    listens: str
    # How the block says an address
    address: str
    # The rest of the file
    around: str = "BLOCK"


NGINX = """
pid FOLDER/nginx.pid;
daemon off;
events {}
http {
    access_log off;
    client_body_temp_path FOLDER/bodies;
    proxy_temp_path FOLDER/answers;
    BLOCK
}
"""
HAPROXY = """
global
    log stderr local0 notice
BLOCK
"""
KINDS = {
    "nginx": Kind(
        "nginx",
        ("nginx", "-p", "FOLDER", "-c", "FILE", "-e", "stderr"),
        listens="listen 80;",
        address="{host}:{port}",
        around=NGINX,
    ),
    "haproxy": Kind(
        "haproxy",
        ("haproxy", "-f", "FILE"),
        listens="bind 0.0.0.0:80\n",
        address="{host}:{port}",
        around=HAPROXY,
    ),
    "envoy": Kind(
        "yaml",
        ("envoy", "-c", "FILE", "--use-dynamic-base-id", "--concurrency", "1", "-l", "warning"),
        listens="{address: 0.0.0.0, port_value: 80}",
        address="{{address: {host}, port_value: {port}}}",
    ),
}
SERVERS = ("10.0.0.1", "10.0.0.2")  # of the blocks


def block_of(name: str) -> str:
    """Return the balancer's block of docs/scale.md."""
    fence = rf"^```{KINDS[name].language}\n(.*?)^```$"
    [block] = re.findall(fence, PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(block)


def configured(name: str, port: int, servers: Sequence[int]) -> str:
    """Return the configuration of a balancer at `port` of loopback, in front of two servers by
    their ports.
    """
    kind = KINDS[name]
    block = block_of(name)
    places = dict(zip(SERVERS, servers, strict=True))
    for host, server in places.items():
        block = replaced(block, kind.address.format(host=host, port=8080), kind.address, server)

    in_block, _, number = kind.listens.partition("80")
    here = (
        kind.address
        if "port_value" in kind.listens
        else f"{in_block.replace('0.0.0.0:', '')}{kind.address}{number}"
    )
    return kind.around.replace("BLOCK", replaced(block, kind.listens, here, port))


def replaced(block: str, said: str, form: str, port: int) -> str:
    """Return a block with a port of loopback in the place of what it says."""
    assert said in block, said
    return block.replace(said, form.format(host="127.0.0.1", port=port))


@contextmanager
def balancer(name: str, folder: Path, servers: Sequence[int]) -> Iterator[int]:
    """Run a balancer in front of servers by their ports. Yields its own port."""
    port = free_port()
    # Envoy looks at the ending
    file = folder / f"{name}.{KINDS[name].language}"
    file.write_text(configured(name, port, servers).replace("FOLDER", str(folder)))
    words = [
        word.replace("FOLDER", str(folder)).replace("FILE", str(file))
        for word in KINDS[name].command
    ]
    with open(folder / f"{name}.log", "wb") as log:
        process = subprocess.Popen([str(command_of(name)), *words[1:]], stdout=log, stderr=log)

    try:
        wait_until(lambda: process.poll() is not None or answers(port), f"{name} answers")
        assert process.poll() is None, (folder / f"{name}.log").read_text()
        yield port
    finally:
        process.terminate()
        process.wait()


def command_of(name: str) -> str | None:
    """Return the balancer's program, None if this machine has none. Debian's lie where only root
    looks.
    """
    word = KINDS[name].command[0]
    return shutil.which(word) or shutil.which(word, path="/usr/sbin")


def answers(port: int) -> bool:
    """Whether a server behind a port answers 200 to /ping."""
    connection = HTTPConnection("127.0.0.1", port, timeout=2.0)
    try:
        connection.request("GET", "/ping")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


# The long run.


@dataclass
class Outcome:
    num_restarts: int
    ends: Counter[str]
    failures: list[str]
    not_ready: str = "-"

    def row(self, name: str) -> str:
        return (
            f"| {name} | {self.num_restarts} | {self.ends['whole']} | {len(self.failures)} | "
            f"{self.not_ready} |"
        )


def restart_behind(
    name: str, folder: Path, seconds: float, num_clients: int, drain_delay_s: float
) -> Outcome:
    """Restart two servers behind a balancer, one after the other, until the time is over."""
    with two_servers(folder, drain_delay_s) as servers:
        with (
            balancer(name, folder, [server.port for server in servers]) as port,
            Load(port, num_clients) as load,
        ):
            num_restarts = 0
            ends_s = time.monotonic() + seconds
            while time.monotonic() < ends_s:
                load.wait_for(num_clients)
                restart(servers[num_restarts % 2], load)
                num_restarts += 1

            load.stop()
            return Outcome(num_restarts, load.ends, load.failures)


def take_over_again(folder: Path, seconds: float, num_clients: int) -> Outcome:
    """Let one server after the other take the port over, until the time is over."""
    with ExitStack() as stack:
        model = write_model(folder / "0", **{"option.echo_step_ms": STEP_MS})
        server = stack.enter_context(launch(model))
        server.wait_200()
        pings = stack.enter_context(Pings(server.port))
        load = stack.enter_context(Load(server.port, num_clients))
        num_restarts = 0
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            load.wait_for(num_clients)
            num_restarts += 1
            new = stack.enter_context(taking_over(server, folder / str(num_restarts)))
            assert server.wait() == 0, server.account()
            server = new

        load.stop()
        ping_text = f"{len(pings.failures)} pings, longest {pings.longest_s * 1000:.0f} ms"
        return Outcome(num_restarts, load.ends, load.failures, ping_text)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/rolling-restart", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument(
        "parts",
        nargs="*",
        help=f"{', '.join(KINDS)}, takeover; without one: all that this machine has",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part [20]")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument(
        "--drain-delay", type=float, default=DRAIN_DELAY_S, help=f"of the servers [{DRAIN_DELAY_S}]"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - {*KINDS, "takeover"}:
        parser.error(f"no part {', '.join(sorted(unknown))}")

    print(
        "| part | restarts | whole answers | failed | pings that were not 200 "
        "|\n|---|---|---|---|---|",
        flush=True,
    )
    failures: list[str] = []
    for name in arguments.parts or [*KINDS, "takeover"]:
        with tempfile.TemporaryDirectory(prefix="lmi-rolling-") as folder:
            if name == "takeover":
                outcome = take_over_again(Path(folder), arguments.seconds, arguments.clients)
            elif command_of(name) is None:
                print(f"| {name} | not on this machine | | | |", flush=True)
                continue
            else:
                outcome = restart_behind(
                    name, Path(folder), arguments.seconds, arguments.clients, arguments.drain_delay
                )

        print(outcome.row(name), flush=True)
        failures += [f"{name}: {failure}" for failure in outcome.failures]

    print(*failures[:50], sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
