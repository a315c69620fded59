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

    near_end, theirs = socket.socketpair()
    threading.Thread(
        target=lambda: [None for _ in iter(lambda: theirs.recv(1 << 20), b"")], daemon=True
    ).start()
    config = EngineConfig(max_num_sequences=64)
    runner = TimedRunner(load_runner(model, config, lambda stage, share: None)[0], batch)
    request = greedy(output_config=OutputConfig(return_log_probs=True))
    with Executor(runner, config) as executor:
        executor.enqueue_requests([request] * batch)
        num_open = batch
        while num_open:
            responses = cast(list[Response], executor.await_responses(timeout_s=10))
            near_end.sendall(frame(encode(Responses(responses))))
            num_open -= sum(response.is_final for response in responses)

    near_end.close()
    steps_s = [
        after - before for before, after in zip(runner.starts_s, runner.starts_s[1:], strict=False)
    ]
    rest_s = [step - forward for step, forward in zip(steps_s, runner.forward_s, strict=False)]
    return statistics.median(rest_s) * 1000, statistics.median(runner.forward_s) * 1000


def guided_step(model: str, guide: str | None) -> float:
    """The milliseconds of a decode step of GUIDED_BATCH sequences that follow a JSON schema: a
    median.
    """
    from handlers.guides.vocabulary import read_config
    from handlers.lmi_dist import Executor
    from handlers.lmi_dist.loading import load_runner

    runner = TimedRunner(
        load_runner(model, EngineConfig(), lambda stage, share: None)[0], GUIDED_BATCH
    )
    params = None if guide is None else GuidedDecodingParams(GuideType.JSON_SCHEMA, guide)
    request = greedy(guided_decoding_params=params)
    with Executor(runner, ExecutorConfig(guided_decoding_config=read_config(model))) as executor:
        # The guide is compiled in the first
        for _ in range(NUM_GUIDED_RUNS):
            executor.enqueue_requests([request] * GUIDED_BATCH)
            num_open = GUIDED_BATCH
            while num_open:
                responses = cast(list[Response], executor.await_responses(timeout_s=10))
                num_open -= sum(response.is_final for response in responses)

    steps_s = [
        after - before for before, after in zip(runner.starts_s, runner.starts_s[1:], strict=False)
    ]
    return statistics.median(steps_s) * 1000


def beam_ratio(model: str) -> float:
    """The time of beam searches of width BEAM_WIDTH over that of as many sampled sequences, one
    request at a time.
    """
    from handlers.lmi_dist import Executor

    several = BEAM_WIDTH
    configs = [
        SamplingConfig(several, num_return_sequences=several),
        SamplingConfig(num_return_sequences=several),
    ]
    requests = [
        Request(TOKEN_IDS, NUM_TOKENS, ignore_eos=True, sampling_config=sampling)
        for sampling in configs
    ]
    times_s: list[list[float]] = [[], []]
    with Executor(model, EngineConfig(max_num_sequences=64)) as executor:
        for _ in range(NUM_SEARCHES):
            for request, own_s in zip(requests, times_s, strict=True):
                start_s = time.perf_counter()
                request_id = executor.enqueue_request(request)
                while not cast(list[Response], executor.await_responses(request_id, 60))[
                    -1
                ].is_final:
                    pass

                own_s.append(time.perf_counter() - start_s)

    # The first ones find everything cold
    beams_s, sampled_s = (statistics.median(own_s[1:]) for own_s in times_s)
    return beams_s / sampled_s


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
                sampled, greedy = (
                    tokens_per_s(server.port, 64, invocation(64, **parameters))
                    for parameters in (SAMPLED, {})
                )
                ratios.append(sampled / greedy)

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
        tokens_per_s(server.port, 4, invocation(NUM_TOKENS))  # warm-up
        figures |= throughput(server.port)
        pings_s = asyncio.run(ping_under_load(server.port)) + asyncio.run(
            ping_under_load(server.port)
        )
        figures["ping_p99_ms"] = quantile(pings_s, 0.99) * 1000
        figures["num_pings"] = len(pings_s)

    for batch in BATCHES:
        rest_ms, model_ms = overhead(model, batch)
        figures[f"rest_ms_{batch}"] = rest_ms
        figures[f"model_ms_{batch}"] = model_ms
        figures[f"rest_share_{batch}"] = rest_ms / (rest_ms + model_ms)

    pairs_ms = [
        [guided_step(model, guide) for guide in (json.dumps(PEOPLE), None)]
        for _ in range(NUM_GUIDED_PAIRS)
    ]
    figures["guide_cost_16"] = (
        statistics.median(guided_ms / plain_ms for guided_ms, plain_ms in pairs_ms) - 1
    )
    figures["beam_ratio"] = beam_ratio(model)
    figures["sampled_ratio"] = sampled_ratio()
    return figures
