"""A process that holds one engine and runs bursts of requests on it, when it is told to.

    python -m scripts.benchmarks.peers.worker ENGINE SETTINGS

SETTINGS is the JSON object of the engine's arguments. Each line of the input is a `Burst` as JSON,
each line of the output its `Outcome`. The first line of the output is the engine's `Start`. It runs
in the venv of its engine, so each engine imports what it needs.
"""

import dataclasses
import json
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

Prompts: TypeAlias = Sequence[list[int]]
Sampling: TypeAlias = Mapping[str, float]
# Whose answer it is, and how many new tokens it has.
Answers: TypeAlias = Iterator[tuple[object, int]]
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
# It stands for the port in the command of a server.
PORT = "PORT"
# The longest start: vLLM compiles first.
READY_S = 300.0


class Done(NamedTuple):
    """What an engine has made of prompts."""

    num_tokens: int
    seconds: float
    # From the start to the first token, of each request.
    first_s: list[float]


@dataclass(frozen=True)
class Burst:
    """Requests that are sent at once."""

    num_streams: int
    # The tokens of each prompt.
    num_prompt: int
    # The tokens that each request makes.
    num_new: int
    vocab_size: int
    seed: int
    # How many tokens all prompts begin with.
    num_shared: int = 0
    # Whether a request with the shared tokens has been answered before.
    is_warm: bool = False
    # Whether tokens are drawn as SAMPLED says; else greedily.
    is_sampled: bool = False

    def prompts(self) -> list[list[int]]:
        draw = random.Random(self.seed)
        shared = self._tokens(draw, self.num_shared)
        return [
            shared + self._tokens(draw, self.num_prompt - self.num_shared)
            for _ in range(self.num_streams)
        ]

    def _tokens(self, draw: random.Random, number: int) -> list[int]:
        # Lower ones may have a meaning.
        return [draw.randrange(300, self.vocab_size) for _ in range(number)]


@dataclass(frozen=True)
class Start:
    """How a process came to be ready: a server from its exec to the first 200 of its health check,
    an engine from its import on.
    """

    seconds: float
    # PSS of all its processes.
    idle_mb: float


@dataclass(frozen=True)
class Outcome:
    num_tokens: int
    seconds: float
    # From the start of the burst to the first token, of each request.
    first_s: list[float]
    # The share of its time in which the engine was ready to run and had no core.
    waited: float


class Engine:
    """An engine as a library, in this process."""

    def answers(self, prompts: Prompts, num_new: int, reuses: bool, sampling: Sampling) -> Answers:
        """Yield when all is prepared; then ask all at once, and yield each new piece of an answer.

        With `reuses` the engine must look for shared starts of prompts, if it can. Without
        `sampling` it is greedy.
        """
        raise NotImplementedError

    def run(self, prompts: Prompts, num_new: int, reuses: bool, sampling: Sampling) -> Done:
        answers = self.answers(prompts, num_new, reuses, sampling)
        next(answers)
        start_s = time.perf_counter()
        num_tokens = 0
        first_s = dict[object, float]()
        for number, num_more in answers:
            num_tokens += num_more
            first_s.setdefault(number, time.perf_counter() - start_s)

        return Done(num_tokens, time.perf_counter() - start_s, list(first_s.values()))

    def pids(self) -> list[int]:
        """The processes that compute."""
        return [os.getpid()]

    def start_s(self, loaded_s: float) -> float:
        """How long its start took, of which this process saw `loaded_s`."""
        return loaded_s

    def close(self) -> None:
        """End what does not end with this process."""


class Lmi(Engine):
    """lmi's embedded executor."""

    def __init__(
        self,
        model: str,
        dtype: str,
        quantize: str | None = None,
        max_num_sequences: int | None = 64,
        max_sequence_length: int | None = 1024,
    ) -> None:
        from handlers.lmi_dist import Executor
        from lmi.settings.config import EngineConfig

        # All of them: there is no front end beside it, as there is none at others
        cores = len(os.sched_getaffinity(0))
        config = EngineConfig(
            dtype=dtype,
            quantize=quantize,
            num_threads=cores,
            max_num_sequences=max_num_sequences,
            max_sequence_length=max_sequence_length,
        )
        self._executor = Executor(model, config)

    def answers(self, prompts: Prompts, num_new: int, reuses: bool, sampling: Sampling) -> Answers:
        from lmi.executor import Request, Response, SamplingConfig

        config = SamplingConfig(
            temperature=sampling.get("temperature", 0.0), top_p=sampling.get("top_p")
        )
        fields: dict[str, Any] = {"streaming": True, "ignore_eos": True, "sampling_config": config}
        requests = [Request(tuple(prompt), num_new, **fields) for prompt in prompts]
        yield None, 0
        self._executor.enqueue_requests(requests)
        num_open = len(prompts)
        while num_open:
            for response in cast(list[Response], self._executor.await_responses(timeout_s=60)):
                if response.result is None:
                    raise RuntimeError(response.error_msg)

                num_open -= response.is_final
                yield response.request_id, len(response.result.output_token_ids[0])


class OpenVino(Engine):
    """OpenVINO GenAI's pipeline with continuous batching. `properties` are those of its CPU plugin.

    Its prefix cache is off by default and costs memory, so it is a second pipeline that is made
    when a burst asks for it.
    """

    def __init__(self, model: str, properties: dict[str, str]) -> None:
        self._model = model
        self._properties = properties
        self._next_id = 0
        self._pipeline(False)

    @cache  # noqa: B019 (there is one object, until the process ends)
    def _pipeline(self, reuses: bool) -> Any:
        import openvino_genai  # type: ignore[import-not-found]

        scheduler = openvino_genai.SchedulerConfig()
        # Its documentation's choice for throughput; the default is 256
        scheduler.max_num_batched_tokens = 2048
        scheduler.cache_size = 2  # GB
        scheduler.enable_prefix_caching = reuses
        return openvino_genai.ContinuousBatchingPipeline(
            self._model, scheduler, "CPU", self._properties
        )

    def answers(self, prompts: Prompts, num_new: int, reuses: bool, sampling: Sampling) -> Answers:
        import numpy
        import openvino  # type: ignore[import-not-found]
        import openvino_genai

        pipeline = self._pipeline(reuses)
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_new
        config.ignore_eos = True
        config.do_sample = bool(sampling)
        for name, value in sampling.items():
            setattr(config, name, value)

        yield None, 0
        handles = []
        for prompt in prompts:
            self._next_id += 1
            handles.append(
                pipeline.add_request(self._next_id, openvino.Tensor(numpy.array([prompt])), config)
            )

        while pipeline.has_non_finished_requests():
            pipeline.step()
            for number, handle in enumerate(handles):
                if handle.can_read():
                    yield (
                        number,
                        sum(len(output.generated_ids) for output in handle.read().values()),
                    )


class Vllm(Engine):
    """vLLM's engine, compiled, as its server has it by default."""

    def __init__(self, model: str, dtype: str, max_model_len: int = 1024) -> None:
        from handlers.lmi_vllm.process_setup import hide_foreign_builds

        hide_foreign_builds()
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = EngineArgs(
            model=model, dtype=dtype, max_model_len=max_model_len, max_num_seqs=64
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._next_id = 0

    def answers(self, prompts: Prompts, num_new: int, reuses: bool, sampling: Sampling) -> Answers:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            **({"temperature": 0.0} | dict(sampling)),
            ignore_eos=True,
            max_tokens=num_new,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        yield None, 0
        for prompt in prompts:
            self._next_id += 1
            self._engine.add_request(str(self._next_id), tokens_input(prompt), params)

        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                yield (
                    output.request_id,
                    sum(len(completion.token_ids) for completion in output.outputs),
                )


class Server(Engine):
    """A server that speaks OpenAI's completions: the same streamed requests to all, over kept-alive
    connections.
    """

    def __init__(self, command: list[str], health: str, environ: dict[str, str | None]) -> None:
        from scripts.benchmarks import servers

        self._port = servers.free_port()
        command = [str(self._port) if word == PORT else word for word in command]
        self._process = servers.process(command, self._port, environ, health, READY_S)
        self._server = self._process.__enter__()

    def run(self, prompts: Prompts, num_new: int, reuses: bool, sampling: Sampling) -> Done:
        from scripts.benchmarks.load import Records, request, run_round

        records = Records(
            mark=re.compile(rb'"text": ?"'), count=re.compile(rb'"completion_tokens": ?(\d+)')
        )
        body = {"model": "bench", "max_tokens": num_new, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **sampling}
        requests = [
            [request("/v1/completions", json.dumps(body | {"prompt": prompt}).encode())]
            for prompt in prompts
        ]
        done = run_round(self._port, requests, records, {})
        return Done(done.num_tokens, done.seconds, list(done.first_s))

    def start_s(self, loaded_s: float) -> float:
        return self._server.start_s

    def pids(self) -> list[int]:
        from scripts.benchmarks import servers

        return servers.family(self._server.process.pid)

    def close(self) -> None:
        self._process.__exit__(None, None, None)


ENGINES = {"lmi": Lmi, "openvino": OpenVino, "vllm": Vllm, "server": Server}


class ThreadTimes(NamedTuple):
    """How long threads ran, and how long they waited for a core."""

    ran_ns: int
    waited_ns: int


class Meter:
    """Measures the threads of some processes, from when it is made."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._start = self._now()

    def _now(self) -> ThreadTimes:
        ran_ns = 0
        waited_ns = 0
        for pid in self._pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                # A thread may have just ended.
                with suppress(OSError):
                    fields = (task / "schedstat").read_text().split()
                    ran_ns += int(fields[0])
                    waited_ns += int(fields[1])

        return ThreadTimes(ran_ns, waited_ns)

    def waited(self) -> float:
        """Return the share of time in which threads were ready to run and had no core."""
        end = self._now()
        ran_ns = end.ran_ns - self._start.ran_ns
        waited_ns = max(0, end.waited_ns - self._start.waited_ns)
        return waited_ns / max(1, ran_ns + waited_ns)


def run(engine: Engine, burst: Burst) -> Outcome:
    """Run one burst."""
    prompts = burst.prompts()
    if burst.is_warm:
        shared = prompts[0][: burst.num_shared]
        engine.run([shared], 1, reuses=True, sampling={})

    meter = Meter(engine.pids())
    sampling = SAMPLED if burst.is_sampled else {}
    done = engine.run(prompts, burst.num_new, reuses=burst.num_shared > 0, sampling=sampling)
    return Outcome(done.num_tokens, done.seconds, done.first_s, meter.waited())


def start_of(engine: Engine, loaded_s: float) -> Start:
    """How an engine started, when it is idle."""
    from scripts.benchmarks.start import SETTLE_S, pss_kb

    time.sleep(SETTLE_S)
    idle_mb = sum(pss_kb(pid) for pid in engine.pids()) / 1024
    return Start(engine.start_s(loaded_s), idle_mb)


def main() -> None:
    output = os.fdopen(os.dup(1), "w", buffering=1)
    # What engines print is not an answer
    os.dup2(2, 1)
    began_s = time.monotonic()
    engine: Engine = ENGINES[sys.argv[1]](**json.loads(sys.argv[2]))
    try:
        start = start_of(engine, time.monotonic() - began_s)
        print(json.dumps(dataclasses.asdict(start)), file=output)
        for line in sys.stdin:
            outcome = run(engine, Burst(**json.loads(line)))
            print(json.dumps(dataclasses.asdict(outcome)), file=output)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
