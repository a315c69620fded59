"""A server that speaks OpenAI's completions: the same streamed requests to all, over kept-alive connections."""

import json
import re
from collections.abc import Sequence

from scripts.benchmarks import servers
from scripts.benchmarks.load import Records, request, run_round
from scripts.benchmarks.peers.worker import Sampling

RECORDS = Records(mark=re.compile(rb'"text": ?"'), count=re.compile(rb'"completion_tokens": ?(\d+)'))
PORT = "PORT"  # in the command
READY_S = 300.0  # vLLM compiles first


class ServedEngine:
    def __init__(self, command: list[str], health: str, environ: dict[str, str | None]) -> None:
        self._port = servers.free_port()
        command = [str(self._port) if word == PORT else word for word in command]
        self._process = servers.process(command, self._port, environ, health, READY_S)
        self._server = self._process.__enter__()

    def run(
        self, prompts: Sequence[list[int]], num_new: int, reuses: bool, sampling: Sampling
    ) -> tuple[int, float, list[float]]:
        body = {"model": "bench", "max_tokens": num_new, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **sampling}
        asked = [[request("/v1/completions", json.dumps(body | {"prompt": prompt}).encode())] for prompt in prompts]
        done = run_round(self._port, asked, RECORDS, {})
        return done.num_tokens, done.seconds, list(done.first_s)

    def pids(self) -> list[int]:
        return servers.family(self._server.process.pid)

    def close(self) -> None:
        self._process.__exit__(None, None, None)
