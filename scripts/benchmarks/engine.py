"""The time of the embedded executor beside its model, what guides cost, and the gain of continuous
batching.
"""

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from typing import Any, cast

from lmi.client.bench.figures import quantile
from lmi.engine.messages import Responses, encode
from lmi.executor import (
    ExecutorConfig,
    GuidedDecodingParams,
    GuideType,
    OutputConfig,
    Request,
    Response,
    SamplingConfig,
)
from lmi.ipc import frame
from lmi.settings.config import EngineConfig
from lmi.settings.served_folder import demo_folder
from lmi.shared import machine
from lmi.supervisor.cores import num_engine_threads
from scripts.benchmarks import servers
from scripts.benchmarks.load import LMI, ask_all, invocation, run_round

NUM_TOKENS = 128
BATCHES = (1, 8, 64)
NUM_SEQUENTIAL = 6
GUIDED_BATCH = 16
NUM_GUIDED_RUNS = 5
NUM_GUIDED_PAIRS = 7
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
NUM_SAMPLED_PAIRS = 3
# A schema that no answer of NUM_TOKENS completes
PEOPLE = {
    "type": "array",
    "minItems": NUM_TOKENS,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    },
}
BEAM_WIDTH = 4
NUM_SEARCHES = 12
TOKEN_IDS = tuple(range(5, 25))  # of a prompt


class TimedRunner:
    """A model runner that records the start and the forward time of each decode step of a full
    batch.
    """

    def __init__(self, runner: object, batch: int) -> None:
        self._runner = runner
        self._batch = batch
        self.forward_s: list[float] = []
        self.starts_s: list[float] = []

    @property
    def steps_s(self) -> list[float]:
        """The time from the start of each step to that of the next one."""
        return [after - before for before, after in pairwise(self.starts_s)]

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def forward(self, plan: object) -> object:
        start_s = time.perf_counter()
        logits = self._runner.forward(plan)  # type: ignore[attr-defined]
        if len(plan.decodes) == self._batch and not plan.prefills:  # type: ignore[attr-defined]
            self.starts_s.append(start_s)
            self.forward_s.append(time.perf_counter() - start_s)

        return logits


def greedy(**fields: Any) -> Request:
    """A streamed greedy request for NUM_TOKENS tokens."""
    sampling = SamplingConfig(temperature=0.0)
    return Request(
        TOKEN_IDS, NUM_TOKENS, streaming=True, ignore_eos=True, sampling_config=sampling, **fields
    )


def overhead(model: str, batch: int) -> tuple[float, float]:
    """Milliseconds of a step outside the model, and in the model: medians over full decode steps.

    All parts run as in the engine's process: one thread waits for Responses and writes one frame a
    step to a socket.
    """
    from handlers.lmi_dist import Executor
    from handlers.lmi_dist.loading import load_runner

    near_end, far_end = socket.socketpair()
    threading.Thread(target=read_all, args=[far_end], daemon=True).start()
    config = EngineConfig(max_num_sequences=64)
    loaded_runner, _ = load_runner(model, config, lambda stage, share: None)
    runner = TimedRunner(loaded_runner, batch)
    request = greedy(output_config=OutputConfig(return_log_probs=True))
    with Executor(runner, config) as executor:
        executor.enqueue_requests([request] * batch)
        num_open = batch
        while num_open:
            responses = cast(list[Response], executor.await_responses(timeout_s=10))
            near_end.sendall(frame(encode(Responses(responses))))
            num_open -= sum(response.is_final for response in responses)

    near_end.close()
    outside_s: list[float] = []
    for step_s, forward_s in zip(runner.steps_s, runner.forward_s, strict=False):
        outside_s.append(step_s - forward_s)

    return statistics.median(outside_s) * 1000, statistics.median(runner.forward_s) * 1000


def read_all(end: socket.socket) -> None:
    """Read what comes until the other end is closed."""
    while end.recv(1 << 20):
        pass


def guided_step(model: str, guide: str | None) -> float:
    """The milliseconds of a decode step of GUIDED_BATCH sequences that follow a JSON schema: a
    median.
    """
    from handlers.guides.tokenizer_files import read_vocabulary
    from handlers.lmi_dist import Executor
    from handlers.lmi_dist.loading import load_runner

    loaded_runner, _ = load_runner(model, EngineConfig(), lambda stage, share: None)
    runner = TimedRunner(loaded_runner, GUIDED_BATCH)
    params = None if guide is None else GuidedDecodingParams(GuideType.JSON_SCHEMA, guide)
    request = greedy(guided_decoding_params=params)
    config = ExecutorConfig(guided_decoding_config=read_vocabulary(model))
    with Executor(runner, config) as executor:
        # The guide is compiled in the first run.
        for _ in range(NUM_GUIDED_RUNS):
            executor.enqueue_requests([request] * GUIDED_BATCH)
            num_open = GUIDED_BATCH
            while num_open:
                responses = cast(list[Response], executor.await_responses(timeout_s=10))
                num_open -= sum(response.is_final for response in responses)

    return statistics.median(runner.steps_s) * 1000


def beam_ratio(model: str) -> float:
    """The time of beam searches of width BEAM_WIDTH over that of as many sampled sequences, one
    request at a time.
    """
    from handlers.lmi_dist import Executor

    num_answers = BEAM_WIDTH
    searching = SamplingConfig(BEAM_WIDTH, num_return_sequences=num_answers)
    sampling = SamplingConfig(num_return_sequences=num_answers)
    beams_s: list[float] = []
    sampled_s: list[float] = []
    with Executor(model, EngineConfig(max_num_sequences=64)) as executor:
        for _ in range(NUM_SEARCHES):
            for config, times_s in ((searching, beams_s), (sampling, sampled_s)):
                request = Request(TOKEN_IDS, NUM_TOKENS, ignore_eos=True, sampling_config=config)
                start_s = time.perf_counter()
                request_id = executor.enqueue_request(request)
                is_final = False
                while not is_final:
                    responses = executor.await_responses(request_id, 60)
                    is_final = cast(list[Response], responses)[-1].is_final

                times_s.append(time.perf_counter() - start_s)

    # The first ones find everything cold.
    return statistics.median(beams_s[1:]) / statistics.median(sampled_s[1:])


def tokens_per_s(port: int, num_streams: int, *requests: bytes) -> float:
    return run_round(port, [list(requests)] * num_streams, LMI, {}).tokens_per_s


def throughput(port: int) -> dict[str, float]:
    """The tokens per second of 64 streams at once, those of streams one after another, and the
    ratio of the two.
    """
    crowd = tokens_per_s(port, 64, invocation(NUM_TOKENS))
    alone = tokens_per_s(port, 1, *[invocation(NUM_TOKENS)] * NUM_SEQUENTIAL)
    return {"tokens_per_s_64": crowd, "tokens_per_s_1": alone, "concurrency_ratio": crowd / alone}


def sampled_ratio() -> float:
    """Tokens/s of 64 sampled streams over those of 64 greedy ones, 135M shape: a median
    of pairs.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "scripts.benchmarks.peers.shapes", "135M", folder]
        # torch makes it, in a process that ends
        subprocess.run(command, check=True, stdout=sys.stderr)
        ratios = []
        with servers.lmi({}, f"{folder}/f32") as server:
            for _ in range(NUM_SAMPLED_PAIRS + 1):
                sampled_speed = tokens_per_s(server.port, 64, invocation(64, **SAMPLED))
                greedy_speed = tokens_per_s(server.port, 64, invocation(64))
                ratios.append(sampled_speed / greedy_speed)

    # The first pair warms up
    return statistics.median(ratios[1:])


async def ping_under_load(port: int) -> list[float]:
    """The seconds of each `/ping`, each on its own connection, while 64 streams run."""
    load = asyncio.create_task(ask_all(port, [[invocation(NUM_TOKENS)]] * 64))
    times_s: list[float] = []
    while not load.done():
        start_s = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        if b" 200 " not in answer.split(b"\r\n", 1)[0]:
            raise RuntimeError(f"/ping said {answer[:80]!r}")

        times_s.append(time.perf_counter() - start_s)
        writer.close()
        await asyncio.sleep(0.005)

    await load
    return times_s


def measure() -> dict[str, float]:
    """Measure all figures on the demo, with the threads that a server gives its engine."""
    model = str(demo_folder())
    os.environ["OMP_NUM_THREADS"] = str(
        num_engine_threads(EngineConfig(), model, machine.num_usable_cores())
    )
    figures: dict[str, float] = {}
    with servers.lmi({}, model) as server:
        # The warm-up.
        tokens_per_s(server.port, 4, invocation(NUM_TOKENS))
        figures |= throughput(server.port)
        pings_s = asyncio.run(ping_under_load(server.port))
        pings_s += asyncio.run(ping_under_load(server.port))
        figures["ping_p99_ms"] = quantile(pings_s, 0.99) * 1000
        figures["num_pings"] = len(pings_s)

    for batch in BATCHES:
        rest_ms, model_ms = overhead(model, batch)
        figures[f"rest_ms_{batch}"] = rest_ms
        figures[f"model_ms_{batch}"] = model_ms
        figures[f"rest_share_{batch}"] = rest_ms / (rest_ms + model_ms)

    ratios = []
    for _ in range(NUM_GUIDED_PAIRS):
        guided_ms = guided_step(model, json.dumps(PEOPLE))
        plain_ms = guided_step(model, None)
        ratios.append(guided_ms / plain_ms)

    figures["guide_cost_16"] = statistics.median(ratios) - 1
    figures["beam_ratio"] = beam_ratio(model)
    figures["sampled_ratio"] = sampled_ratio()
    return figures
