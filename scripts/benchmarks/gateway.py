"""What the gateway costs a server at 64 streams: CPU of its front end a token, and time to the
first token.

The same users ask the server and then the gateway before it. They pause between their requests, so
that these fall anywhere in the engine's steps: then the time that the gateway takes to pass a
request and its first part on is the difference of the mean times to the first token.
"""

import asyncio
import random
import statistics
import sys
from dataclasses import dataclass

import uvloop

from scripts.benchmarks import servers
from scripts.benchmarks.load import LMI, Answer, Connection, Meter, invocation, realtime

NUM_STREAMS = 64
# Of each user, one after another.
NUM_REQUESTS = 12
# The least and the most of an answer.
NUM_TOKENS = (10, 30)
STEP_S = 0.02
ROUNDS = 3
TIMEOUT_S = 60.0
STREAM_PATH = "/endpoints/any/invocations-response-stream"


@dataclass(frozen=True)
class Round:
    # The mean time to the first token.
    first_s: float
    # The CPU that a token takes, by role.
    cpu_us: dict[str, float]


async def ask(port: int, path: str, chance: random.Random) -> list[Answer]:
    """Be one user. The first answer does not count, since all users ask for it at once."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
    answers = []
    for _ in range(1 + NUM_REQUESTS):
        request = invocation(chance.randint(*NUM_TOKENS), path=path)
        answers.append(await connection.ask(request))
        await asyncio.sleep(chance.uniform(0, 2 * STEP_S))

    connection.close()
    return answers


async def ask_all(port: int, path: str, seed: int) -> list[list[Answer]]:
    async with asyncio.timeout(TIMEOUT_S):
        users = (ask(port, path, random.Random(f"{seed} {user}")) for user in range(NUM_STREAMS))
        return await asyncio.gather(*users)


def run(port: int, path: str, roles: dict[int, str], seed: int) -> Round:
    """Let all users ask, and return what it took."""
    meter = Meter(roles)
    with realtime(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers_of_users = runner.run(ask_all(port, path, seed))

    cpu_s, _ = meter.stop()
    num_tokens = 0
    first_s: list[float] = []
    for answers in answers_of_users:
        for answer in answers:
            num_tokens += len(LMI.mark.findall(answer.body))

        for answer in answers[1:]:
            times_s = answer.record_times_s(LMI.mark)
            first_s.append(times_s[0] - answer.start_s)

    cpu_us = {role: seconds / num_tokens * 1e6 for role, seconds in cpu_s.items()}
    return Round(statistics.mean(first_s), cpu_us)


def measure(rounds: int = ROUNDS) -> dict[str, float]:
    """Alternate between the server and the gateway before it. Each figure is the median over the
    rounds.
    """
    port = servers.free_port()
    properties = {
        "option.rolling_batch": "echo",
        "option.echo_step_ms": STEP_S * 1000,
        "frontend_workers": 1,
    }
    with servers.lmi(properties) as lmi:
        command = [sys.executable, "-m", "lmi", "gateway", "--port", str(port)]
        command += ["--log-level", "warning", "--endpoint", f"http://127.0.0.1:{lmi.port}"]
        with servers.process(command, port) as gateway:
            roles = {lmi.pid("lmi-front-0"): "front end", gateway.process.pid: "gateway"}
            pairs: list[tuple[Round, Round]] = []
            for seed in range(rounds + 1):
                direct = run(lmi.port, "/invocations", roles, seed)
                through = run(port, STREAM_PATH, roles, seed)
                pairs.append((direct, through))

    # The first pair is the warm-up.
    return figures(pairs[1:])


def figures(pairs: list[tuple[Round, Round]]) -> dict[str, float]:
    """Return the figures of rounds at the server, and at the gateway."""
    ratios: list[float] = []
    added_ms: list[float] = []
    gateway_us: list[float] = []
    front_end_us: list[float] = []
    for direct, through in pairs:
        ratios.append(through.cpu_us["front end"] / direct.cpu_us["front end"])
        added_ms.append((through.first_s - direct.first_s) * 1e3)
        gateway_us.append(through.cpu_us["gateway"])
        front_end_us.append(through.cpu_us["front end"])

    return {
        "gateway_frontend_ratio": statistics.median(ratios),
        "gateway_first_ms": statistics.median(added_ms),
        "gateway_us_per_token": statistics.median(gateway_us),
        "frontend_behind_gateway_us_per_token": statistics.median(front_end_us),
    }
