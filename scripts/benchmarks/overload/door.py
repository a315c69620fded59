"""Which server is asked, when and how, for streamed completions, and how what a client read becomes
a record.
"""

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from scripts.benchmarks import servers
from scripts.benchmarks.load import LMI, Answer, Records, request
from scripts.benchmarks.overload.records import Outcome, Record
from scripts.benchmarks.table import ROOT
from scripts.benchmarks.vllm_model import words
from scripts.benchmarks.vllm_servers import ENVIRON

# By kind of lmi's servers: their variables. A flag counts more than a variable.
LMI_ENVIRON = {
    "echo": {
        "OPTION_ROLLING_BATCH": "echo",
        # Slow enough for busy cores.
        "OPTION_ECHO_STEP_MS": "60",
    },
    "demo": {},
    "35M": {},
}
KINDS = [*LMI_ENVIRON, "vllm"]
# The longest start: vLLM compiles first.
READY_S = 300.0
REFUSALS = (429, 503)
RETRY_AFTER = re.compile(rb"(?i)\r\nretry-after: *([\d.]+)")
APIS = {"openai": "/v1/completions", "lmi": "/invocations"}
OPENAI = Records(re.compile(rb'"text": ?"'), re.compile(rb'"completion_tokens": ?(\d+)'))
WORDS = words()
WHOLE = {"openai": re.compile(rb"data: \[DONE\]"), "lmi": re.compile(rb'"generated_text": ?"')}
BROKEN = re.compile(rb'data: \{"error"|"finish_reason": ?"error"')


@dataclass(frozen=True)
class Target:
    """A server that is asked."""

    host: str
    port: int
    # The path of its health check.
    health: str
    # What a body of OpenAI's API names.
    model: str
    # Of its first process, if it was started here.
    pid: int | None = None

    def roles(self) -> dict[int, str]:
        """Return the processes of the server, if they are known, for a `Meter`."""
        if not self.pid:
            return {}

        return {pid: "server" for pid in servers.family(self.pid)}


@contextmanager
def started(kind: str, flags: Sequence[str]) -> Iterator[Target]:
    """Start a server of one of `KINDS` with more flags of its command, and end it with
    the block.
    """
    port = servers.free_port()
    address = ["--host", "127.0.0.1", "--port", str(port)]
    if kind == "vllm":
        command = [sys.executable, "-m", "scripts.benchmarks.vllm_serve", "serve", model_35m()]
        command += [*address, "--served-model-name", "bench", *flags]
    else:
        model = model_35m() if kind == "35M" else "demo"
        command = [sys.executable, "-m", "lmi", "serve", model, *address]
        command += ["--log-level", "WARNING", "--set", "trust_fairness_id=true", *flags]

    environ = ENVIRON | LMI_ENVIRON.get(kind, {})
    with servers.process(command, port, environ, "/health", READY_S) as server:
        yield running(f"http://127.0.0.1:{port}", pid=server.process.pid)


def running(url: str, model: str = "", pid: int | None = None) -> Target:
    """Return a server that runs. Without a `model` it is the first that the server lists."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"the URL must be http://HOST:PORT, given {url}")

    root = f"http://{parts.netloc}"
    named_model = model or _first_model(root)
    return Target(parts.hostname, parts.port or 80, _health_of(root), named_model, pid)


def _health_of(root: str) -> str:
    """Return the first of the usual paths that is 200."""
    for path in ("/ping", "/health", "/v1/models"):
        if _get(root + path) is not None:
            return path

    return "/ping"


def _first_model(root: str) -> str:
    listing = json.loads(_get(f"{root}/v1/models") or b"{}")
    models = listing.get("data")
    return str(models[0]["id"]) if models else ""


def model_35m() -> str:
    """The folder of the model, which is made once: a process makes it, so that torch stays out of
    the driver's.
    """
    folder = ROOT / "build" / "overload" / "35M"
    if not (folder / "config.json").exists():
        print("making the model ...", file=sys.stderr, flush=True)
        subprocess.run(
            [sys.executable, "-m", "scripts.benchmarks.vllm_model", folder, "35M"],
            check=True,
            cwd=ROOT,
        )

    return str(folder)


def _get(url: str) -> bytes | None:
    try:
        with urlopen(url, timeout=10) as response:
            body: bytes = response.read()
            return body
    except HTTPError:
        return None


@dataclass(frozen=True)
class Ask:
    """A request that a client will send."""

    tenant: str
    # The tokens of all its answers together.
    num_wanted: int
    payload: bytes


@dataclass
class Asked:
    """A request that a client has sent. Times are of `time.perf_counter`."""

    ask: Ask
    due_s: float
    sent_s: float
    end_s: float = 0.0
    answer: Answer = field(default_factory=lambda: Answer(0.0))
    has_left: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Door:
    """One API of a server."""

    # A name in APIS.
    api: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    # In a prompt.
    num_words: int = 16

    def ask(
        self,
        tenant: str,
        num_tokens: int,
        draw: random.Random,
        num_prompts: int = 1,
        num_choices: int = 1,
    ) -> Ask:
        """Return a request for answers of `num_tokens` to prompts of random words.

        It samples where a prompt has several answers. A stream of LMI's API has one prompt and one
        answer.
        """
        prompts = [" ".join(draw.choices(WORDS, k=self.num_words)) for _ in range(num_prompts)]
        body: dict[str, object]
        if self.api == "openai":
            num_answers = num_prompts * num_choices
            body = {
                "model": self.model,
                "prompt": prompts if num_prompts > 1 else prompts[0],
                "n": num_choices,
                "max_tokens": num_tokens,
                "temperature": 1.0 if num_choices > 1 else 0.0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        else:
            num_answers = 1
            parameters = {"max_new_tokens": num_tokens, "ignore_eos_token": True}
            body = {"inputs": prompts[0], "stream": True, "parameters": parameters}

        headers = {name: value.format(tenant=tenant) for name, value in self.headers.items()}
        payload = request(APIS[self.api], json.dumps(body).encode(), headers)
        return Ask(tenant, num_tokens * num_answers, payload)

    def record(self, sent: Asked, start_s: float) -> Record:
        """Return what the client of a phase that began at `start_s` saw."""
        answer = sent.answer
        body = answer.body
        records = OPENAI if self.api == "openai" else LMI
        times_s = answer.record_times_s(records.mark) if answer.status == 200 else []
        outcome = self._outcome(sent, body)
        num_tokens = float(len(times_s))
        if outcome == Outcome.WHOLE and not isinstance(records.count, int):
            num_tokens = float(records.count.findall(body)[-1])

        retry_after = None
        if outcome == Outcome.REFUSED:
            retry_after = RETRY_AFTER.search(body)

        reason = ""
        if outcome == Outcome.FAILED:
            reason = sent.reason or body[-300:].decode(errors="replace")

        return Record(
            tenant=sent.ask.tenant,
            start_s=sent.due_s - start_s,
            end_s=sent.end_s - start_s,
            outcome=outcome,
            num_wanted=sent.ask.num_wanted,
            times_s=tuple(at_s - start_s for at_s in times_s),
            num_tokens=num_tokens,
            retry_after_s=float(retry_after[1]) if retry_after else None,
            reason=reason,
        )

    def _outcome(self, sent: Asked, body: bytes) -> Outcome:
        if sent.has_left:
            return Outcome.LEFT

        if sent.answer.status in REFUSALS:
            return Outcome.REFUSED

        if sent.answer.status != 200 or BROKEN.search(body):
            return Outcome.FAILED

        return Outcome.WHOLE if WHOLE[self.api].search(body) else Outcome.FAILED


def poisson(rate: float, seconds: float, seed: str) -> list[float]:
    """Return the times, ascending, of arrivals that come independently at `rate` a second."""
    if rate <= 0:
        return []

    draw = random.Random(seed)
    times_s: list[float] = []
    at_s = draw.expovariate(rate)
    while at_s < seconds:
        times_s.append(at_s)
        at_s += draw.expovariate(rate)

    return times_s
