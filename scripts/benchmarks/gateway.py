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
# Of each user, one after another
NUM_REQUESTS = 12
NUM_TOKENS = (10, 30)
STEP_S = 0.02
ROUNDS = 3
TIMEOUT_S = 60.0
STREAM_PATH = "/endpoints/any/invocations-response-stream"


@dataclass(frozen=True)
class Round:
    # Mean time to the first token
    first_s: float
    # A token, by role
    cpu_us: dict[str, float]


async def ask(port: int, path: str, chance: random.Random) -> list[Answer]:
    """One user. The answer to the first request does not count, since all users send it at once."""
    _, connection = await asyncio.get_running_loop().create_connection(
        Connection, "127.0.0.1", port
    )
    answers = []
    for _ in range(1 + NUM_REQUESTS):
        answers.append(await connection.ask(invocation(chance.randint(*NUM_TOKENS), path=path)))
        await asyncio.sleep(chance.uniform(0, 2 * STEP_S))

    connection.close()
    return answers


async def ask_all(port: int, path: str, seed: int) -> list[list[Answer]]:
    async with asyncio.timeout(TIMEOUT_S):
        users = (ask(port, path, random.Random(f"{seed} {user}")) for user in range(NUM_STREAMS))
        return await asyncio.gather(*users)


def run(port: int, path: str, roles: dict[int, str], seed: int) -> Round:
    meter = Meter(roles)
    with realtime(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers = runner.run(ask_all(port, path, seed))

    cpu_s, _ = meter.stop()
    num_tokens = sum(
        len(LMI.mark.findall(answer.body)) for user_answers in answers for answer in user_answers
    )
    counted = [answer for user_answers in answers for answer in user_answers[1:]]
    first_s = statistics.mean(
        answer.record_times_s(LMI.mark)[0] - answer.start_s for answer in counted
    )
    return Round(first_s, {role: seconds / num_tokens * 1e6 for role, seconds in cpu_s.items()})


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
        command = [
            sys.executable,
            "-m",
            "lmi",
            "gateway",
            "--port",
            str(port),
            "--log-level",
            "warning",
        ]
        command += ["--endpoint", f"http://127.0.0.1:{lmi.port}"]
        with servers.process(command, port) as gateway:
            roles = {lmi.pid("lmi-front-0"): "front end", gateway.process.pid: "gateway"}
            # The first is the warm-up
            pairs = [
                (run(lmi.port, "/invocations", roles, seed), run(port, STREAM_PATH, roles, seed))
                for seed in range(rounds + 1)
            ][1:]

    return figures(pairs)


def figures(pairs: list[tuple[Round, Round]]) -> dict[str, float]:
    """Return the figures of rounds at the server, and at the gateway."""
    return {
        "gateway_frontend_ratio": statistics.median(
            through.cpu_us["front end"] / direct.cpu_us["front end"] for direct, through in pairs
        ),
        "gateway_first_ms": statistics.median(
            (through.first_s - direct.first_s) * 1e3 for direct, through in pairs
        ),
        "gateway_us_per_token": statistics.median(
            through.cpu_us["gateway"] for _, through in pairs
        ),
        "frontend_behind_gateway_us_per_token": statistics.median(
            through.cpu_us["front end"] for _, through in pairs
        ),
    }
