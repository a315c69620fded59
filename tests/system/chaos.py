"""Mixed clients and random faults against one server, and what must hold whatever was struck.

`Chaos.learn` asks each of `ASKS` while nothing else runs. Then `Chaos.run` lets many clients ask
them in any order while processes are killed and stopped. `Chaos.broken` lists what no fault
excuses: an answer that is not, to the byte, that of the calm server, a token of a foreign request,
a request without an end, a cut whose front end was not killed, an error in another form than that
of its route. `outgrown` names processes that grew. `scripts/chaos` runs it for long.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from lmi.supervisor.kinds import FRONT_END_DEATHS_WINDOW_S, MAX_FRONT_END_DEATHS
from tests.machine import wait_until
from tests.served import Server, resident_bytes, serve
from tests.system.container import ROOT, Answer
from tests.system.vllm_server import SETTINGS
from tests.tiny_models import tiny_model

PROMPTS = ("The quick brown", "Where does the river", "Seven ships", "A list of towns: ")
# By then a client calls it a hang; the machine may have stood still
MAX_ANSWER_S = 120.0
BACK_S = 120.0
STOPPED_S = 1.0
RETRY_S = 0.05
NEW_EACH_TIME = re.compile(
    rb'"(?:id|request_id)": ?"[^"]*",?|"created": ?\d+,?|"cached_tokens": ?\d+'
)
LOG_PROBS = re.compile(rb'"log_?prob": ?[-\d.e]+')
KILLED = signal.SIGKILL
STOPPED = signal.SIGSTOP
MASTER = "lmi-gunicorn"
FAULTS: tuple[tuple[str, signal.Signals], ...] = (
    ("lmi-engine", KILLED),
    ("lmi-engine", STOPPED),
    ("lmi-front", KILLED),
    ("lmi-front", STOPPED),
    (MASTER, KILLED),
    ("lmi-guides", KILLED),
)
HOLDS_CONNECTIONS = ("lmi-front", MASTER)
MB = 1 << 20
# An engine touches its cache, a front end keeps buffers
MAX_GROWN_BYTES = 150 * MB
# Name and resident bytes of each process, by its id
Memory = Mapping[int, tuple[str, int]]


@contextmanager
def serving(engine: str = "lmi-dist") -> Iterator[Server]:
    """Two replicas of an engine behind two front ends, all ready."""
    settings = [
        "option.model_name=model",
        "option.tgi_compat=true",
        "frontend_workers=2",
        "minWorkers=2",
    ]
    model = ROOT / "handlers" / "lmi_dist" / "demo"
    if engine == "vllm":
        model, settings = tiny_model("llama_long"), [*SETTINGS, *settings]

    with serve(model, *settings, "maxWorkers=2") as server:
        server.wait_for_front_ends(2)
        wait_until(
            lambda: server.metrics()["lmi_engines_ready"] == 2, "both replicas are ready", BACK_S
        )
        yield server


@dataclass(frozen=True)
class Ask:
    name: str
    path: str
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def is_stream(self) -> bool:
        return "stream" in self.name


def asks(prompt: str, num_tokens: int = 24) -> Iterator[Ask]:
    """One prompt at every door, whole and streamed, with what an engine treats apart, and bodies
    that are refused.
    """
    chat = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": num_tokens,
        "temperature": 0,
    }
    text = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
    sampled = {"do_sample": True, "seed": 7, "temperature": 0.9, "top_p": 0.95}
    lmi: dict[str, Any] = {"inputs": prompt, "parameters": {"max_new_tokens": num_tokens}}
    triton = {"text_input": prompt, "max_tokens": num_tokens}
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}}}
    bodies: dict[str, tuple[str, object]] = {
        "lmi": ("/invocations", lmi),
        "lmi stream": ("/invocations", {**lmi, "stream": True}),
        "lmi sampled stream": (
            "/invocations",
            {"inputs": prompt, "stream": True, "parameters": {**sampled}},
        ),
        "lmi with a stop string": (
            "/invocations",
            {**lmi, "parameters": {"max_new_tokens": 200, "stop": ["e"]}},
        ),
        "chat": ("/v1/chat/completions", chat),
        "chat stream": ("/v1/chat/completions", {**chat, "stream": True, "logprobs": True}),
        "chat with a schema": (
            "/v1/chat/completions",
            {
                **chat,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": schema},
                },
            },
        ),
        "completions": ("/v1/completions", {**text, "n": 3, "temperature": 0.8, "seed": 5}),
        "completions stream": (
            "/v1/completions",
            {**text, "stream": True, "stream_options": {"include_usage": True}},
        ),
        "tgi": (
            "/generate",
            {**lmi, "parameters": {"max_new_tokens": num_tokens, "details": True}},
        ),
        "tgi stream": ("/generate_stream", lmi),
        "triton": ("/v2/models/model/generate", triton),
        "triton stream": ("/v2/models/model/generate_stream", triton),
        "a wrong type": ("/invocations", {"inputs": 5}),
        "an unknown parameter value": ("/v1/completions", {**text, "temperature": -1}),
    }
    for name, (path, body) in bodies.items():
        yield Ask(name, path, json.dumps(body).encode())

    lines = b"\n".join(
        json.dumps({**lmi, "inputs": prompt + word}).encode() for word in ("", " and", " or")
    )
    yield Ask("lines", "/invocations", lines, {"content-type": "application/jsonlines"})
    yield Ask("half a body", "/invocations", b'{"inputs": "')


ASKS = [ask for prompt in PROMPTS for ask in asks(prompt)]


def send(
    server: Server, ask: Ask, leave_after_bytes: int | None = None, pause_s: float = 0.0
) -> Answer:
    """Ask and read to the end, slowly with `pause_s`; or leave after so many bytes. Raises OSError,
    HTTPException.
    """
    with server.open(ask.data, ask.path, ask.headers, MAX_ANSWER_S) as response:
        heard = b""
        is_whole = True
        try:
            while piece := response.read1(65536 if pause_s == 0 else 64):
                heard += piece
                if leave_after_bytes is not None and len(heard) >= leave_after_bytes:
                    break

                time.sleep(pause_s)

            # A connection that ends within a body of known length is no error to http.client
            is_whole = not response.length
        except TimeoutError:
            raise
        except (OSError, HTTPException):
            is_whole = False

        return Answer(
            response.status, {k.lower(): v for k, v in response.getheaders()}, heard, is_whole
        )


def records(body: bytes) -> list[bytes]:
    """The lines or events of an answer, without what is new each time."""
    return [NEW_EACH_TIME.sub(b"", record) for record in body.splitlines() if record]


@dataclass
class Chaos:
    """`is_exact` compares log-probs too, for engines that promise them whatever shares a batch."""

    server: Server
    num_clients: int
    seed: int = 0
    is_exact: bool = True
    ends: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    _num_front_ends: int = 0
    expected: dict[Ask, tuple[int, list[bytes]]] = field(default_factory=dict)
    # When a process that holds connections died, and was back
    cuts: list[list[float]] = field(default_factory=list)
    # When the master of the front ends was killed
    _master_deaths_s: list[float] = field(default_factory=list)

    def learn(self, asks: Sequence[Ask] = ASKS) -> None:
        """Ask each by itself. What the server answers now is right."""
        self._num_front_ends = sum(record.beat_s > 0 for record in self.server.block().frontends)
        for ask in asks:
            answer = send(self.server, ask)
            assert answer.status in (200, 400, 422, 424) and answer.is_whole, (ask, answer)

            self.expected[ask] = (answer.status, self._records(answer.body))

    def run(self, seconds: float, faults: Sequence[tuple[str, signal.Signals]] = FAULTS) -> None:
        until_s = time.monotonic() + seconds
        clients = range(self.num_clients)
        threads = [
            threading.Thread(target=self._ask_until, args=(until_s, client)) for client in clients
        ]
        for thread in threads:
            thread.start()

        draw = random.Random(self.seed)
        while faults and time.monotonic() < until_s:
            time.sleep(draw.uniform(0.2, 1.5))
            self._strike(*draw.choice(faults), draw)

        for thread in threads:
            thread.join()

    def _ask_until(self, until_s: float, client: int) -> None:
        draw = random.Random(f"{self.seed} {client}")
        asks = list(self.expected)
        while time.monotonic() < until_s:
            ask = draw.choice(asks)
            leave_after_bytes = draw.choice((None, None, None, None, 40))
            began_s = time.monotonic()
            try:
                answer = send(
                    self.server, ask, leave_after_bytes, pause_s=draw.choice((0, 0, 0, 0.01))
                )
                end = "left" if leave_after_bytes else self.end_of(ask, answer, began_s)
            except TimeoutError:
                end = f"broken: no end within {MAX_ANSWER_S:.0f} s"
            except (OSError, HTTPException) as error:
                end = self._end_without_answer(began_s, repr(error))

            self.ends[end.partition(":")[0]] += 1
            if end.startswith("broken"):
                self.broken.append(f"{ask.name} ({began_s:.1f} s): {end}")

            if end not in ("whole", "left"):
                time.sleep(RETRY_S)

    def end_of(self, ask: Ask, answer: Answer, began_s: float) -> str:
        """Return how a request ended; "broken: …" if no fault excuses it."""
        status, expected = self.expected[ask]
        answer_records = self._records(answer.body)
        if (answer.status, answer_records) == (status, expected) and answer.is_whole:
            return "whole"

        if not answer.is_whole:
            # The last one may be half
            head = answer_records[:-1]
            return (
                self._end_without_answer(began_s, "cut")
                if head == expected[: len(head)]
                else f"broken: {answer_records}"
            )

        if answer.status == 503 and "retry-after" in answer.headers and b"error" in answer.body:
            return "refused"

        if (
            answer.status == 200 == status
            and ask.name == "lines"
            and len(answer_records) == len(expected)
        ):
            is_said = all(
                b'"error"' in line or line == right
                for line, right in zip(answer_records, expected, strict=True)
            )
            return "error" if is_said else f"broken: {answer_records}, expected {expected}"

        if answer.status == 200 == status and ask.is_stream:
            data_records = [record for record in answer_records if b"[DONE]" not in record]
            is_said = (
                b'"error"' in data_records[-1]
                and data_records[:-1] == expected[: len(data_records) - 1]
            )
            return "error" if is_said else f"broken: {data_records}, expected {expected}"

        return f"broken: {answer.status} {answer.headers} {answer.body[:300]!r}"

    def _end_without_answer(self, began_s: float, how: str) -> str:
        """A connection may be cut by the death of the process that held it, and refused until the
        next one listens.
        """
        is_excused = any(began_s <= back_s for _, back_s in self.cuts)
        return (
            "cut"
            if is_excused
            else f"broken: {how} at {time.monotonic():.1f} s, and no front end was killed"
        )

    def _strike(self, name: str, signum: signal.Signals, draw: random.Random) -> None:
        pids = self.server.pids(name)
        if not pids:
            return

        if name == MASTER and signum == KILLED and not self._may_kill_master():
            return

        pid = draw.choice(pids)
        self.struck[f"{signum.name} {name}"] += 1
        cut = [time.monotonic(), float("inf")]
        if signum == KILLED and name.startswith(HOLDS_CONNECTIONS):
            self.cuts.append(cut)

        with suppress(ProcessLookupError):
            os.kill(pid, signum)
            if signum == STOPPED:
                time.sleep(STOPPED_S)
                os.kill(pid, signal.SIGCONT)

        engines = self.server.engines()
        front_ends = self.server.block().frontends
        struck_s = time.monotonic()

        def is_whole() -> bool:
            num_front_ends = sum(record.beat_s > struck_s for record in front_ends)
            is_up = all(engine.is_alive and engine.beat_s > struck_s for engine in engines)
            return is_up and num_front_ends >= self._num_front_ends

        wait_until(is_whole, f"the server is whole again after {signum.name} to {name}", BACK_S)
        cut[1] = time.monotonic()

    def _may_kill_master(self) -> bool:
        """Whether the server would start it again, and note that it is killed.

        The server ends when it dies too often, which is a promise of its own.
        """
        now_s = time.monotonic()
        recent = [
            death_s
            for death_s in self._master_deaths_s
            if death_s > now_s - FRONT_END_DEATHS_WINDOW_S
        ]
        if len(recent) >= MAX_FRONT_END_DEATHS - 1:
            return False

        self._master_deaths_s = [*recent, now_s]
        return True

    def _records(self, body: bytes) -> list[bytes]:
        answer_records = records(body)
        return (
            answer_records
            if self.is_exact
            else [LOG_PROBS.sub(b"", record) for record in answer_records]
        )


def outgrown(before: Memory, after: Memory) -> list[str]:
    """Name each process that has grown by more than warms it up. A new one is compared with the
    largest of its name.
    """
    largest = {
        name: max(size for other_name, size in before.values() if other_name == name)
        for name, _ in before.values()
    }

    grown = [
        (name, size, size - before.get(pid, (name, largest.get(name, size)))[1])
        for pid, (name, size) in after.items()
    ]

    return [
        f"{name} grew by {by / MB:.0f} MB to {size / MB:.0f} MB"
        for name, size, by in grown
        if by > MAX_GROWN_BYTES
    ]


def memory(server: Server) -> Memory:
    """The name of each process of a server and its resident bytes, by its id."""
    sizes = {}
    for pid in server.pids():
        with suppress(OSError):
            sizes[pid] = (Path(f"/proc/{pid}/comm").read_text().strip(), resident_bytes(pid))

    return sizes


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("lmi-dist", "vllm"), default="lmi-dist")
    parser.add_argument(
        "--calm", action="store_true", help="no faults: a soak, for the memory of each process"
    )
    arguments = parser.parse_args()
    with serving(arguments.engine) as server:
        chaos = Chaos(
            server, arguments.clients, arguments.seed, is_exact=arguments.engine == "lmi-dist"
        )
        chaos.learn()
        # Whatever is done for the first time takes memory
        chaos.run(arguments.seconds / 10, ())
        before = memory(server)
        num_warm = sum(chaos.ends.values())
        chaos.run(arguments.seconds, () if arguments.calm else FAULTS)
        wait_until(server.is_idle, "no request and no block of the cache is held")
        num_requests = sum(chaos.ends.values()) - num_warm
        after = memory(server)
        chaos.broken += outgrown(before, after)
        for pid, (name, num_bytes) in after.items():
            if pid in before:
                grown = num_bytes - before[pid][1]
                print(
                    f"{name:16} {num_bytes / 1e6:7.1f} MB "
                    f"{grown / max(1, num_requests) / 1e3:+7.2f} kB a request"
                )

        server.signal(signal.SIGTERM)
        code = server.wait()

    print(
        f"{num_requests} requests: {dict(chaos.ends)}\nstruck: {dict(chaos.struck)}\nexit code "
        f"{code}"
    )
    print(*chaos.broken, f"{len(chaos.broken)} broken", sep="\n")
    return int(bool(chaos.broken) or code != 0)


if __name__ == "__main__":
    sys.exit(main())
