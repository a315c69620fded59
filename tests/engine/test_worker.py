"""The engine process, started as the supervisor starts it; a bare front end talks to it over its
socket.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmi.engine.messages import (
    Cancel,
    Ready,
    Refused,
    Responses,
    Submit,
    ToFrontEnd,
    decode_to_front_end,
    encode,
)
from lmi.errors import ErrorInfo
from lmi.executor import FinishReason, Request, Response
from lmi.ipc import MAX_FRAME_BYTES, FrameReader, frame
from lmi.runtime import ENVIRONMENT_NAME, Runtime
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.settings.handler import announced
from lmi.shared.state import EngineRecord, Phase
from tests.scripted import wait_until
from tests.system.container import START_TIMEOUT_S, wait_within

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
# token ids that break the echo engine
HANG = 250
FAULT = 251
PROMPT = (1, 2, 3)


class Worker:
    def __init__(self, runtime: Runtime, errors: Path, slot: int = 0) -> None:
        self.runtime = runtime
        self.slot = slot
        self.errors = errors
        self.front_ends: list[FrontEnd] = []
        self.record: EngineRecord = runtime.attach().engines[slot]
        paths = f"{ROOT}:{ROOT / 'tests/system/engines'}"
        environ = {**os.environ, ENVIRONMENT_NAME: str(runtime.path), "PYTHONPATH": paths}
        handler = runtime.config.engine.handler
        load = announced()[handler].load if handler in announced() else f"trial_engines:{handler}"
        command = [
            sys.executable,
            "-P",
            "-m",
            "lmi.engine.worker",
            "--slot",
            str(slot),
            "--load-with",
            load,
        ]
        with open(errors, "wb") as file:
            self.process = subprocess.Popen(command, env=environ, stderr=file)

    def wait_ready(self) -> Worker:
        wait_until(
            lambda: self.record.phase == Phase.READY or self.process.poll() is not None,
            START_TIMEOUT_S,
        )
        assert self.process.poll() is None, self.errors.read_text()
        return self

    def connect(self) -> FrontEnd:
        self.front_ends.append(FrontEnd(self.runtime.engine_socket(self.slot)))
        return self.front_ends[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for front_end in self.front_ends:
            front_end.close()


class FrontEnd:
    """A blocking client that remembers every frame."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(path)
        self.reader = FrameReader()
        self.pending: list[ToFrontEnd] = []

    def send(self, *messages: Submit | Cancel) -> None:
        self.socket.sendall(b"".join(frame(encode(message)) for message in messages))

    def next(self) -> ToFrontEnd:
        while not self.pending:
            data = self.socket.recv(65536)
            assert data, "the engine closed the connection"
            self.pending += [decode_to_front_end(payload) for payload in self.reader.feed(data)]

        return self.pending.pop(0)

    def outputs(self, until_final: int) -> list[Responses]:
        """The frames up to the one that holds the last of `until_final` final Responses."""
        outputs: list[Responses] = []
        while (
            sum(response.is_final for output in outputs for response in output.responses)
            < until_final
        ):
            message = self.next()
            assert isinstance(message, Responses), message
            outputs.append(message)

        return outputs

    def is_closed(self) -> bool:
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            pass

        return True

    def close(self) -> None:
        self.socket.close()


Start = Callable[..., Worker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    workers: list[Worker] = []

    def start(handler: str = "echo", step_ms: int = 5, **options: str) -> Worker:
        options = {
            "echo_step_ms": str(step_ms),
            "echo_hang_token": str(HANG),
            "echo_fault_token": str(FAULT),
            **options,
        }

        config = Config(
            server=ServerConfig(log_format="json"),
            model=ModelConfig(path=str(tmp_path), name="m"),
            engine=EngineConfig(handler=handler, options=options),
        )
        folder = tmp_path / f"runtime-{len(workers)}"
        folder.mkdir()
        workers.append(Worker(Runtime.create(config, folder), tmp_path / f"errors-{len(workers)}"))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()


@pytest.fixture
def worker(start: Start) -> Worker:
    return start().wait_ready()


def request(num_tokens: int, prompt: tuple[int, ...] = PROMPT, **settings: object) -> Request:
    return Request(input_token_ids=prompt, max_tokens=num_tokens, streaming=True, **settings)  # type: ignore[arg-type]


def tokens(outputs: list[Responses], request_id: int) -> list[int]:
    mine = [
        r for output in outputs for r in output.responses if r.request_id == request_id and r.result
    ]
    return [
        token
        for response in mine
        if response.result
        for token in response.result.output_token_ids[0]
    ]


def final(outputs: list[Responses]) -> Response:
    return outputs[-1].responses[-1]


# Loading.


def test_a_loaded_engine_says_so_in_its_record_and_reports_its_stages(start: Start) -> None:
    worker = start("slow", load_s="2")
    wait_until(lambda: worker.record.phase == Phase.LOADING and worker.record.stage == "weights")
    wait_until(lambda: 0 < worker.record.progress < 1)
    worker.wait_ready()
    report = worker.runtime.read_report(0)

    assert report.engine == "echo" and 1.9 < report.stages_s["weights"] < TIMEOUT_S

    lines = [line for line in worker.errors.read_text().splitlines() if "weights" in line]
    # At most one a second
    assert 1 <= len(lines) <= 1 + int(report.stages_s["weights"])
    assert worker.record.pid == worker.process.pid and worker.record.stage == ""


@pytest.mark.parametrize(
    ("handler", "code", "said"),
    [
        ("broken", 4, "model.safetensors is cut short"),
        ("insecure", 5, "option.allow_pickle"),
        ("lacking", 2, "a_library_that_nobody_has"),
    ],
)
def test_what_an_operator_can_mend_is_one_event_a_reason_and_an_exit_code(
    start: Start, handler: str, code: int, said: str
) -> None:
    worker = start(handler)
    assert worker.process.wait(60) == code
    assert said in worker.record.reason
    lines = worker.errors.read_text().splitlines()
    [event] = [event for event in map(json.loads, lines) if event["level"] != "INFO"]
    assert said in event["message"] and "error" not in event


def test_an_unexpected_fault_is_exit_1_with_a_traceback_and_a_reason(start: Start) -> None:
    worker = start("crashing")
    assert worker.process.wait(60) == 1
    assert worker.record.reason == "RuntimeError: the weights are cursed"
    assert "Traceback" in worker.errors.read_text()


def test_sigterm_while_loading_ends_the_worker_at_once(start: Start) -> None:
    worker = start("freezing")
    wait_until(lambda: worker.record.stage == "weights")
    worker.process.terminate()
    wait_within(2, lambda: worker.process.poll() is not None, "it ended")
    assert worker.process.wait() == -signal.SIGTERM


# Serving.


def test_ready_comes_first_and_every_step_is_one_frame_for_each_front_end(worker: Worker) -> None:
    first = worker.connect()
    second = worker.connect()
    for front_end in (first, second):
        ready = front_end.next()
        assert isinstance(ready, Ready) and ready.info.name == "echo"

    first.send(*(Submit(i, request(10)) for i in range(20)))
    second.send(Submit(0, request(10)))
    outputs = first.outputs(until_final=20)

    assert all(tokens(outputs, i) == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1] for i in range(20))
    assert len(outputs) <= 30  # of 200 tokens
    assert tokens(second.outputs(until_final=1), 0) == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]


def test_the_record_counts_what_happens_and_returns_to_nothing(worker: Worker) -> None:
    front_end = worker.connect()
    record = worker.record
    front_end.next()
    front_end.send(Submit(0, request(200)), Submit(1, request(200)))
    wait_until(lambda: record.num_running == 2)
    front_end.outputs(until_final=2)
    wait_until(lambda: record.num_running + record.num_waiting == 0)
    assert record.step >= 200 and time.monotonic() - record.step_s < 5
    beat_s = record.beat_s
    wait_until(lambda: record.beat_s > beat_s + 0.15)


def test_requests_over_the_batch_wait(start: Start) -> None:
    worker = start(echo_max_num_sequences="2").wait_ready()
    front_end = worker.connect()
    front_end.next()
    front_end.send(*(Submit(i, request(300)) for i in range(5)))
    wait_until(lambda: (worker.record.num_running, worker.record.num_waiting) == (2, 3))
    assert worker.record.max_num_sequences == 2


def test_cancel_ends_a_request_with_a_final_cancelled(worker: Worker) -> None:
    front_end = worker.connect()
    front_end.next()
    front_end.send(Submit(7, request(4000)))
    assert isinstance(front_end.next(), Responses)
    front_end.send(Cancel(7), Cancel(99))
    end = final(front_end.outputs(until_final=1))
    assert end.request_id == 7 and end.result is not None
    assert end.result.finish_reasons == [FinishReason.CANCELLED]
    wait_until(lambda: worker.record.num_running == 0)


def test_a_closed_connection_cancels_what_it_asked_for_and_nothing_else(worker: Worker) -> None:
    gone = worker.connect()
    stays = worker.connect()
    gone.next(), stays.next()
    gone.send(*(Submit(i, request(4000)) for i in range(5)))
    stays.send(Submit(0, request(400)))
    wait_until(lambda: worker.record.num_running == 6)
    gone.close()
    wait_until(lambda: worker.record.num_running <= 1)
    assert len(tokens(stays.outputs(until_final=1), 0)) == 400


def test_a_request_that_the_engine_cannot_do_is_refused_with_label_and_words(
    worker: Worker,
) -> None:
    front_end = worker.connect()
    front_end.next()
    front_end.send(
        Submit(3, request(5, bad_words=((1,),))), Submit(4, request(5, prompt=(1 << 30,)))
    )
    unsupported = front_end.next()
    invalid = front_end.next()

    assert isinstance(unsupported, Refused) and unsupported.request_id == 3
    assert (unsupported.error.label, unsupported.error.field) == ("unsupported", "bad_words")
    assert isinstance(invalid, Refused) and invalid.request_id == 4
    assert (invalid.error.label, invalid.error.field) == ("invalid_parameter", "input_token_ids")


def test_a_step_that_raises_ends_its_requests_with_an_error_and_the_engine_goes_on(
    worker: Worker,
) -> None:
    front_end = worker.connect()
    front_end.next()
    front_end.send(Submit(0, request(5, prompt=(FAULT,))))
    assert final(front_end.outputs(until_final=1)).error is not None
    front_end.send(Submit(1, request(5)))
    assert len(tokens(front_end.outputs(until_final=1), 1)) == 5


def test_an_executor_that_gives_up_ends_the_worker_after_its_last_words(worker: Worker) -> None:
    front_end = worker.connect()
    front_end.next()
    # Three failed steps in a row
    for i in range(3):
        front_end.send(Submit(i, request(5, prompt=(FAULT,))))
        assert final(front_end.outputs(until_final=1)).error is not None

    assert worker.process.wait(TIMEOUT_S) == 1
    assert "stopped by itself" in worker.record.reason


# Front ends that misbehave.

BAD_FRAMES = {
    "no message": frame(b"\xc1"),
    "a message to a front end": frame(encode(Refused(1, ErrorInfo("a", "b")))),
    "a request of wrong types": frame(
        encode(Submit(1, request(5))).replace(b"max_tokens\x05", b"max_tokens\xa1")
    ),
    "a request that breaks a rule": frame(
        encode(Submit(1, request(5))).replace(b"max_tokens\x05", b"max_tokens\x00")
    ),
    "a length over the limit": (MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_malformed_frame_closes_its_connection_and_no_other(worker: Worker, name: str) -> None:
    bad = worker.connect()
    good = worker.connect()
    bad.next(), good.next()
    good.send(Submit(0, request(30)))
    bad.send(Submit(0, request(4000)))
    assert isinstance(bad.next(), Responses)
    bad.socket.sendall(BAD_FRAMES[name])
    assert bad.is_closed()
    assert len(tokens(good.outputs(until_final=1), 0)) == 30
    wait_until(lambda: worker.record.num_running == 0)


def test_an_id_in_use_closes_the_connection(worker: Worker) -> None:
    front_end = worker.connect()
    front_end.next()
    front_end.send(Submit(0, request(4000)), Submit(0, request(4000)))
    assert front_end.is_closed()
    wait_until(lambda: worker.record.num_running == 0)


def test_a_front_end_that_does_not_read_is_dropped_before_memory_is(start: Start) -> None:
    worker = start(step_ms=0, echo_max_num_sequences="512").wait_ready()
    front_end = worker.connect()
    front_end.next()
    front_end.send(
        *(Submit(i, request(4000, return_all_generated_tokens=True)) for i in range(400))
    )
    wait_until(lambda: worker.record.num_running > 0)
    wait_until(lambda: worker.record.num_running == 0)
    assert front_end.is_closed()

    resident_bytes = int(Path(f"/proc/{worker.process.pid}/statm").read_text().split()[1]) * 4096
    assert resident_bytes < 600 << 20


def test_the_socket_is_for_this_user_alone(worker: Worker) -> None:
    assert os.stat(worker.runtime.engine_socket(0)).st_mode & 0o777 == 0o600


# The end of the process.


def test_sigterm_finishes_what_runs_and_refuses_what_comes(worker: Worker) -> None:
    front_end = worker.connect()
    front_end.next()
    front_end.send(Submit(0, request(150)))
    assert isinstance(front_end.next(), Responses)

    worker.process.terminate()
    wait_until(lambda: worker.record.phase == Phase.DRAINING)
    front_end.send(Submit(1, request(5)))
    messages = [front_end.next()]
    while not isinstance(messages[-1], Responses) or not messages[-1].responses[-1].is_final:
        messages.append(front_end.next())

    assert [message.error.label for message in messages if isinstance(message, Refused)] == [
        "engine_lost"
    ]
    assert worker.process.wait(TIMEOUT_S) == 0


def test_a_new_worker_takes_over_the_socket_of_a_killed_one(worker: Worker, tmp_path: Path) -> None:
    worker.process.kill()
    worker.process.wait()
    worker.record.phase = Phase.STARTING
    successor = Worker(worker.runtime, tmp_path / "successor").wait_ready()
    try:
        front_end = successor.connect()
        front_end.next()
        front_end.send(Submit(0, request(5)))

        assert len(tokens(front_end.outputs(until_final=1), 0)) == 5
    finally:
        successor.kill()


def test_sigusr2_writes_the_stacks_of_every_thread(worker: Worker) -> None:
    worker.process.send_signal(signal.SIGUSR2)
    wait_until(lambda: "_wait_for_work" in worker.errors.read_text())
    assert worker.process.poll() is None
