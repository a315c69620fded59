"""The processes of a server, killed, stopped and ended by signals while they work."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from lmi.shared.state import Phase
from tests.machine import measurements
from tests.served import Server
from tests.system.container import (
    Answer,
    Container,
    free_port,
    wait_until,
    wait_within,
    write_model,
)

STEP_S = 0.02
Make = Callable[..., Server]
Background = Callable[..., "Future[Answer]"]


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Make]:
    """A function that makes a container with the given options. At the end none of their processes
    may be left.
    """
    servers: list[Server] = []

    def make(
        environ: dict[str, str] | None = None,
        command_prefix: list[str] | None = None,
        stderr: str | None = None,
        **options: object,
    ) -> Server:
        option_values = {name.replace("__", "."): value for name, value in options.items()}
        number = len(servers)
        folder = write_model(
            tmp_path / f"model-{number}", **{"option.echo_step_ms": STEP_S * 1000, **option_values}
        )
        # Sockets need short paths
        runtime = folders.enter_context(tempfile.TemporaryDirectory(prefix="lmi-"))
        environ = {"TMPDIR": runtime, **(environ or {})}
        servers.append(
            Server(
                folder,
                tmp_path / f"log-{number}",
                free_port(),
                environ,
                command_prefix or [],
                stderr,
            )
        )
        return servers[-1]

    with ExitStack() as folders:
        yield make
        for started in servers:
            started.kill()


@pytest.fixture
def background() -> Iterator[Background]:
    with ThreadPoolExecutor(64) as pool:
        yield pool.submit


def running(server: Container, num: int) -> None:
    wait_until(lambda: server.metric("lmi_requests_running") == num, f"{num} requests run")


def assert_nothing_left(server: Container, within_s: float = 0.5) -> None:
    wait_within(within_s, lambda: not server.pids(), "every process is gone")
    wait_within(within_s, lambda: not listens(server.port), "nothing listens on its port")


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False

    return True


def assert_whole(answer: Answer, num_tokens: int) -> None:
    assert answer.status == 200 and answer.is_whole
    assert len(answer.lines) == num_tokens and "error" not in answer.lines[-1], answer.lines[-1]


# Start.


def test_a_server_gets_ready_answers_and_ends_without_a_trace(container: Make) -> None:
    server = container(frontend_workers=2).start_and_wait()
    assert_whole(server.generate(5), 5)

    assert [name.split("-")[1] for name in names(server)] == [
        "engine",
        "front",
        "front",
        "gunicorn",
        "supervisor",
    ]

    wait_until(
        lambda: '"event":"ready"' in server.log.read_text(), "the server said that it is ready"
    )
    server.signal(signal.SIGTERM)
    assert server.wait() == 0

    assert_nothing_left(server)
    assert not list(Path(server.environ["TMPDIR"]).iterdir())


def names(server: Container) -> list[str]:
    return sorted(Path(f"/proc/{pid}/comm").read_text().strip() for pid in server.pids())


def test_ready_is_shown_to_people_with_a_command_that_gets_an_answer(container: Make) -> None:
    server = container(log_format="text").start_and_wait()
    wait_until(lambda: "lmi is ready" in server.log.read_text(), "the banner is there")
    [command] = re.findall(r"^ +(curl .*)$", server.log.read_text(), re.MULTILINE)
    answer = subprocess.run(["sh", "-c", command], capture_output=True, check=True).stdout

    assert b"generated_text" in answer


def test_the_port_answers_while_the_model_loads(container: Make) -> None:
    server = container(option__rolling_batch="slow", option__load_s=4).start()
    wait_until(lambda: server.ping() == 503, "the server answers that it loads")
    ping_body = server.request("GET", "/ping").body
    assert b"Loading" in ping_body
    wait_until(lambda: server.ping() == 200, "the server got ready")


def test_secrets_reach_no_front_end_and_no_engine_but_by_option_env(container: Make) -> None:
    secrets = {
        "HF_TOKEN": "hf_canary",
        "AWS_SECRET_ACCESS_KEY": "canary",
        "OPTION_API_KEY": "canary",
    }
    secrets |= {
        "GIT_PAT": "canary",
        "PRIVATE_KEY": "canary",
        "DATABASE_URL": "postgres://user:canary@host/db",
    }
    secrets |= {
        "AUTH_HEADER": "canary",
        "BASIC_AUTH": "canary",
        "SENTRY_DSN": "canary",
        "SESSION_COOKIE": "canary",
    }
    environ_given = {**secrets, "TOKENIZERS_PARALLELISM": "false"}
    server = container(
        environ=environ_given, option__env="SETTING=canary_of_env,OTHER=1"
    ).start_and_wait()
    fronts = [*server.pids("lmi-front"), *server.pids("lmi-gunicorn")]
    assert len(fronts) >= 2

    for pid in fronts:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"canary" not in environ and b"TOKENIZERS_PARALLELISM" in environ

    engine = Path(f"/proc/{server.pid('lmi-engine')}/environ").read_bytes()
    assert b"SETTING=canary_of_env\0" in engine and b"TOKENIZERS_PARALLELISM" in engine
    assert not any(text.encode() + b"\0" in engine for text in secrets.values())

    # Front ends read this file
    [settings] = Path(server.environ["TMPDIR"]).glob("lmi-*/*/config.json")

    assert b"canary_of_env" not in settings.read_bytes()


def test_a_port_in_use_is_exit_3_and_names_its_owner(container: Make) -> None:
    server = container()
    with socket.create_server(("127.0.0.1", server.port)):
        assert server.start().wait_within(5.0) == 3

    words = server.last_words()
    assert (words["cause"], words["code"]) == ("port_unavailable", 3)
    assert str(server.port) in words["message"] and f"process {os.getpid()}" in words["message"]


@pytest.mark.parametrize(
    ("engine", "code", "said"),
    [
        ("broken", 4, "model.safetensors is cut short"),
        ("insecure", 5, "option.allow_pickle"),
        ("lacking", 2, "a_library_that_nobody_has"),
    ],
)
def test_a_model_that_cannot_be_used_ends_the_server_at_once(
    container: Make, engine: str, code: int, said: str
) -> None:
    server = container(option__rolling_batch=engine).start()
    assert server.wait() == code
    assert said in server.last_words()["message"] and server.last_words()["code"] == code
    assert "Traceback" not in server.log.read_text()
    assert server.log.read_text().count("starts as process") == 1
    assert_nothing_left(server)


def test_an_engine_that_keeps_dying_fails_the_server_after_a_ping_of_500(
    container: Make, tmp_path: Path
) -> None:
    server = container(
        option__rolling_batch="crashing", option__crash_after=tmp_path / "crash", retry_threshold=2
    )
    server.start()
    wait_until(lambda: server.ping() == 503, "the port answers")
    (tmp_path / "crash").touch()
    wait_until(lambda: server.ping() == 500, "the failure can be seen")
    assert server.wait() == 1

    words = server.last_words()
    assert (words["cause"], words["stage"]) == (
        "engine_lost",
        "weights",
    ) and "the weights are cursed" in words["message"]
    assert server.log.read_text().count("starts as process") == 2

    assert_nothing_left(server)


def test_a_replica_that_keeps_dying_leaves_the_server_to_the_others(container: Make) -> None:
    server = container(
        minWorkers=2, maxWorkers=2, retry_threshold=2, frontend_workers=1
    ).start_and_wait()
    wait_until(lambda: server.metric("lmi_engines_ready") == 2, "both replicas are ready")
    victim, survivor = server.engines()
    for num_starts in (1, 2):
        ready = (num_starts, Phase.READY)
        wait_until(lambda ready=ready: (victim.num_starts, victim.phase) == ready, "it is ready")
        os.kill(victim.pid, signal.SIGKILL)

    wait_until(lambda: victim.phase == Phase.FAILED, "it is set aside")
    assert server.ping() == 200 and survivor.phase == Phase.READY
    assert (server.metric("lmi_engines_set_aside"), server.metric("lmi_engines_ready")) == (1, 1)

    assert_whole(server.generate(3), 3)
    assert "another replica serves, next try in 30 s" in server.log.read_text()

    os.kill(survivor.pid, signal.SIGKILL)
    wait_until(
        lambda: (survivor.num_starts, survivor.phase) == (2, Phase.READY),
        "the other one comes back by itself",
    )
    assert_whole(server.generate(3), 3)


def test_a_request_without_an_answer_yet_goes_on_at_another_replica(
    container: Make, background: Background
) -> None:
    server = container(
        minWorkers=2, maxWorkers=2, frontend_workers=1, option__echo_step_ms=1500
    ).start_and_wait()
    wait_until(lambda: server.metric("lmi_engines_ready") == 2, "both replicas are ready")
    # Until the front end is connected with both
    while not all(engine.step for engine in server.engines()):
        for answer in [background(server.generate, 1, stream=False) for _ in range(2)]:
            assert answer.result().status == 200

    answers = [background(server.generate, 3, stream=False) for _ in range(2)]
    wait_until(
        lambda: [engine.num_running for engine in server.engines()] == [1, 1],
        "each replica has one request",
    )
    os.kill(server.engines()[0].pid, signal.SIGKILL)
    for answer in answers:
        assert answer.result().status == 200 and answer.result().lines[0]["generated_text"] == "abc"

    assert server.metric("lmi_requests_moved_total") == 1


def test_without_retries_the_first_death_of_an_engine_ends_the_server(container: Make) -> None:
    server = container(option__rolling_batch="crashing", retry_threshold=0).start()
    assert server.wait() == 1
    assert server.last_words()["cause"] == "engine_lost"
    assert server.log.read_text().count("starts as process") == 1
    assert_nothing_left(server)


def test_an_engine_that_freezes_while_it_loads_is_killed_with_its_stacks_in_the_log(
    container: Make,
) -> None:
    server = container(
        option__rolling_batch="freezing", retry_threshold=1, model_loading_timeout=6.0
    ).start()
    assert server.wait() == 1
    assert "did not finish loading" in server.last_words()["message"]
    # The frame that faulthandler prints
    assert "in freezing" in server.log.read_text()
    assert_nothing_left(server)


def test_a_folder_without_a_tokenizer_is_exit_4(container: Make) -> None:
    server = container()
    (server.folder / "tokenizer.json").unlink()
    assert server.start().wait() == 4
    assert server.last_words()["cause"] == "model_unusable"
    assert_nothing_left(server)


def test_a_server_is_a_good_first_process_of_its_container(container: Make) -> None:
    if subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make a pid namespace")

    server = container(
        command_prefix=["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    ).start_and_wait()
    [first] = server.pids("lmi-supervisor")
    assert "NSpid:\t" + f"{first}\t1" in Path(f"/proc/{first}/status").read_text()

    assert_whole(server.generate(3), 3)
    os.kill(server.pid("lmi-gunicorn"), signal.SIGKILL)
    wait_until(
        lambda: server.ping() == 200 and len(server.pids("lmi-gunicorn")) == 1,
        "there is a new master",
    )
    os.kill(first, signal.SIGTERM)
    assert server.wait() == 0

    assert_nothing_left(server)


# Kill.


def test_a_killed_engine_ends_its_streams_with_an_error_and_comes_back(
    container: Make, background: Background
) -> None:
    server = container(frontend_workers=2).start_and_wait()
    streams = [background(server.generate, 2000) for _ in range(6)]
    running(server, 6)
    fronts = server.pids("lmi-front")
    engine = server.pid("lmi-engine")
    os.kill(engine, signal.SIGKILL)
    for stream in streams:
        answer = stream.result()
        assert answer.is_whole and answer.lines[-1]["code"] == 503 and len(answer.lines) > 1

    wait_until(lambda: server.pids("lmi-engine") not in ([], [engine]), "there is a new engine")
    wait_until(lambda: server.ping() == 200, "the new engine is ready")
    assert_whole(server.generate(3), 3)

    assert server.pids("lmi-front") == fronts
    assert server.metric("lmi_engine_restarts_total") == 1
    assert "engine 0 lost" in (text := server.log.read_text()) and "next start in 0 s" in text, (
        "it was ready"
    )


def test_while_the_only_engine_is_away_a_request_is_503_and_so_is_ping(container: Make) -> None:
    server = container(option__rolling_batch="slow", option__load_s=2).start_and_wait()
    os.kill(server.pid("lmi-engine"), signal.SIGKILL)
    wait_within(2.0, lambda: server.ping() == 503, "ping says that no engine is there")
    assert server.generate(3).status == 503
    assert b"SIGKILL" in server.request("GET", "/ping").body
    wait_until(lambda: server.ping() == 200, "the engine is back")


def test_a_lost_engine_says_at_every_api_when_to_come_back(
    container: Make, background: Background
) -> None:
    """To those that it worked for, and to those that come before the next one is ready."""
    server = container(
        option__rolling_batch="slow",
        option__load_s=5,
        option__chat_template=TEMPLATE,
        frontend_workers=1,
    ).start_and_wait()
    wholes, _ = ask_long(server, background)
    server.lose_engine()

    assert [line["code"] for line in wholes.pop("lines").result().lines] == [503, 503], (
        "each line has its own status"
    )

    late = {
        f"{name}, later": background(server.post, body, path) for name, (path, body) in LONG.items()
    }
    for name, answer in {**wholes, **late}.items():
        status = answer.result().status
        headers = answer.result().headers
        assert status == 503 and int(headers["retry-after"]) >= 1, (name, answer.result())


def test_a_killed_front_end_takes_only_its_own_streams_with_it(
    container: Make, background: Background
) -> None:
    server = container(frontend_workers=2).start_and_wait()
    records = [record for record in server.block().frontends if record.pid]
    streams = []
    # The kernel chooses which front end gets a connection
    while not all(record.num_in_flight for record in records):
        streams.append(background(server.generate, 400))
        running(server, len(streams))

    (victim, num_lost), (survivor, num_kept) = [
        (record.pid, record.num_in_flight) for record in records
    ]
    os.kill(victim, signal.SIGKILL)
    ends = [stream.exception() or stream.result() for stream in streams]
    whole = [end for end in ends if isinstance(end, Answer) and end.is_whole]
    for answer in whole:
        assert_whole(answer, 400)

    assert (len(whole), len(ends)) == (num_kept, num_kept + num_lost)

    wait_within(3.0, lambda: len(server.pids("lmi-front")) == 2, "there are two front ends again")
    wait_until(lambda: server.metric("lmi_frontend_restarts_total") == 1, "it is counted")
    assert survivor in server.pids("lmi-front")

    # The orphans were cancelled
    running(server, 0)
    wait_until(lambda: server.metric("lmi_requests_in_flight") == 0, "no request is in flight")


def test_a_front_end_that_finds_no_model_any_more_waits_for_it_and_the_others_serve(
    container: Make,
) -> None:
    server = container(frontend_workers=2).start_and_wait()
    wait_until(
        lambda: '"event":"ready"' in server.log.read_text(), "the server said that it is ready"
    )
    engine = server.pid("lmi-engine")
    (victim, survivor) = server.pids("lmi-front")
    away = server.folder.with_name("away")
    server.folder.rename(away)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: server.log.read_text().count("next try in") >= 3, "it tries again and again")
    assert_whole(server.generate(3), 3)
    assert server.process.poll() is None and survivor in server.pids("lmi-front")

    away.rename(server.folder)
    server.wait_for_front_ends(2)

    assert server.pid("lmi-engine") == engine
    assert server.log.read_text().count("starts again as process") == 1, (
        "it was one process all the time"
    )


def test_a_killed_gunicorn_master_costs_no_stream_and_no_engine(
    container: Make, background: Background
) -> None:
    server = container(frontend_workers=2).start_and_wait()
    engine = server.pid("lmi-engine")
    master = server.pid("lmi-gunicorn")
    streams = [background(server.generate, 150) for _ in range(8)]
    running(server, 8)
    os.kill(master, signal.SIGKILL)
    wait_within(
        3.0, lambda: server.pids("lmi-gunicorn") not in ([], [master]), "there is a new master"
    )
    wait_within(5.0, lambda: server.ping() == 200, "the new front ends answer")
    for stream in streams:
        assert_whole(stream.result(), 150)

    assert server.pid("lmi-engine") == engine

    wait_until(lambda: len(server.pids("lmi-front")) == 2, "the old front ends have ended")
    wait_until(
        lambda: server.metric("lmi_frontend_restarts_total") == 2,
        "both new front ends have claimed their place",
    )
    assert server.log.read_text().count("starts again as process") == 2

    assert_whole(server.generate(3), 3)
    wait_until(lambda: server.metric("lmi_requests_in_flight") == 0, "no request is in flight")


def test_nothing_outlives_a_killed_supervisor(container: Make, background: Background) -> None:
    server = container(frontend_workers=2).start_and_wait()
    streams = [background(server.generate, 2000) for _ in range(4)]
    running(server, 4)
    os.kill(server.pid("lmi-supervisor"), signal.SIGKILL)
    assert_nothing_left(server, within_s=2.0)
    for stream in streams:
        assert (
            stream.exception()
            or not stream.result().is_whole
            or stream.result().lines[-1]["code"] == 503
        )


# Hang.


def test_a_stopped_engine_with_work_is_replaced_after_the_step_timeout(
    container: Make, background: Background
) -> None:
    server = container(step_timeout=1.0).start_and_wait()
    stream = background(server.generate, 2000)
    running(server, 1)
    engine = server.pid("lmi-engine")
    os.kill(engine, signal.SIGSTOP)
    assert stream.result().lines[-1]["code"] == 503
    wait_until(lambda: server.pids("lmi-engine") not in ([], [engine]), "there is a new engine")
    wait_until(lambda: server.ping() == 200, "the new engine is ready")
    assert "made no step though work waits" in server.log.read_text()


def test_an_engine_that_works_with_little_of_the_machine_is_not_killed_by_the_step_timeout(
    container: Make,
) -> None:
    server = container(
        option__rolling_batch="toiling",
        option__toil_s=2.5,
        step_timeout=1.0,
        first_step_timeout=1.0,
    ).start_and_wait()
    engine = server.pid("lmi-engine")
    assert_whole(server.generate(3), 3)

    assert server.pid("lmi-engine") == engine
    assert "engine 0 has made no step for 1." in server.log.read_text()
    assert server.log.read_text().count("and goes on, because it works") == 1


def test_an_engine_that_hangs_in_a_step_leaves_its_stacks_in_the_log(
    container: Make, background: Background
) -> None:
    server = container(
        step_timeout=1.0, first_step_timeout=1.0, option__echo_hang_token=ord("!")
    ).start_and_wait()
    answer = server.generate(5, prompt="a!")
    assert answer.status == 503
    assert "handlers/echo.py" in server.log.read_text()
    wait_until(lambda: server.ping() == 200, "the server recovered")
    assert_whole(server.generate(3), 3)


def test_a_stopped_front_end_is_replaced_and_pings_go_on(container: Make) -> None:
    server = container(frontend_workers=2).start_and_wait()
    stopped = server.pids("lmi-front")[0]
    os.kill(stopped, signal.SIGSTOP)
    wait_within(
        25.0, lambda: stopped not in server.pids("lmi-front"), "gunicorn killed the silent worker"
    )
    wait_until(lambda: len(server.pids("lmi-front")) == 2, "there are two front ends again")
    assert server.ping() == 200


# Pause.

# Longer than gunicorn waits for a beat
PAUSE_S = 11.0


def test_a_server_that_was_paused_goes_on_where_it_was(
    container: Make, background: Background
) -> None:
    # A busy machine keeps this test waiting for seconds
    server = container(step_timeout=10.0).start_and_wait()
    wait_until(
        lambda: any(record.beat_s for record in server.block().frontends), "the front end beats"
    )
    stream = background(server.generate, 200)
    running(server, 1)
    pids = server.pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)

    time.sleep(PAUSE_S)
    judges = [server.pid("lmi-supervisor"), server.pid("lmi-gunicorn")]
    for pid in judges:
        os.kill(pid, signal.SIGCONT)

    # Each has looked at the others, which are still stopped
    time.sleep(1.5)
    for pid in set(pids) - set(judges):
        os.kill(pid, signal.SIGCONT)

    assert_whole(stream.result(), 200)
    assert server.pids() == pids
    assert server.ping() == 200
    assert re.search(r"the machine gave this process no time for [1-9]\d\.", server.log.read_text())

    stream = background(server.generate, 2000)
    running(server, 1)
    os.kill(server.pid("lmi-engine"), signal.SIGSTOP)

    assert stream.result().lines[-1]["code"] == 503, "one that hangs by itself is still found"
    assert "made no step though work waits for" in server.log.read_text()


# Stop.


def test_sigterm_lets_streams_finish_and_refuses_new_requests(
    container: Make, background: Background
) -> None:
    server = container(frontend_workers=2).start_and_wait()
    streams = [background(server.generate, 150) for _ in range(8)]
    running(server, 8)
    server.drain()
    assert server.ping() == 503

    refused = server.generate(3)
    assert (refused.status, refused.headers["connection"]) == (503, "close")

    wait_within(3.0, lambda: server.ping() == 0, "the port is closed")
    for stream in streams:
        assert_whole(stream.result(), 150)

    assert server.wait() == 0

    assert_nothing_left(server)


TEMPLATE = "{{ messages[0]['content'] }}"
# Requests that outlast any drain, and their paths
# TGI refuses over 4096
LONG: dict[str, tuple[str, dict[str, object]]] = {
    "lmi": ("/invocations", {"inputs": "abc", "parameters": {"max_new_tokens": 5000}}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 5000},
    ),
    "completions": ("/v1/completions", {"prompt": "abc", "max_tokens": 5000}),
    "tgi": (
        "/generate",
        {"inputs": "abc", "parameters": {"max_new_tokens": 4000}},
    ),
    "triton": (
        "/v2/models/model/generate",
        {"text_input": "abc", "parameters": {"max_tokens": 5000}},
    ),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 5000},
    ),
    "responses": ("/v1/responses", {"input": "abc", "max_output_tokens": 5000}),
}
STREAMED_AT = {"tgi": "/generate_stream", "triton": "/v2/models/model/generate_stream"}


def ask_long(
    server: Server, background: Background
) -> tuple[dict[str, Future[Answer]], dict[str, Future[Answer]]]:
    """Send each of LONG, whole and streamed, and a body of lines. Returns the answers to come,
    streams last.
    """
    wholes = {name: background(server.post, body, path) for name, (path, body) in LONG.items()}
    lines = b"\n".join(json.dumps(body).encode() for _, body in (LONG["lmi"], LONG["completions"]))
    wholes["lines"] = background(
        server.post, lines, headers={"content-type": "application/jsonlines"}
    )
    requests_asked = {
        name: (STREAMED_AT.get(name, path), body | {"stream": True})
        for name, (path, body) in LONG.items()
    }
    streams = {
        name: background(server.post, body, path) for name, (path, body) in requests_asked.items()
    }
    running(server, len(wholes) + len(streams) + 1)  # two lines run
    return wholes, streams


def assert_ended_with_the_drain(
    wholes: dict[str, Future[Answer]], streams: dict[str, Future[Answer]]
) -> None:
    for name, future in wholes.items():
        answer = future.result()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1"), name
        error = json.loads(answer.body)["error"]
        assert isinstance(error, dict) == LONG.get(name, ("",))[0].startswith("/v1/"), (
            "each route has its own form"
        )
        assert "longer than drain_timeout (2 s)" in (
            error["message"] if isinstance(error, dict) else error
        ), name

    for name, future in streams.items():
        # Raises for one without its last chunk
        answer = future.result()
        last = [line for line in answer.body.splitlines() if line and line != b"data: [DONE]"][-1]
        assert answer.status == 200 and b"longer than drain_timeout (2 s)" in last, name


def test_at_the_end_of_a_drain_each_request_gets_its_error_in_the_form_of_its_route(
    container: Make, background: Background
) -> None:
    for measurement in measurements():
        server = container(drain_timeout=2.0, option__chat_template=TEMPLATE).start_and_wait()
        open_requests = ask_long(server, background)
        with socket.create_connection(("127.0.0.1", server.port), 30.0) as upload:
            upload.sendall(b"POST /invocations HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
            started_s = time.monotonic()
            with measurement.within(2.0 + 4):
                server.signal(signal.SIGTERM)
                assert server.wait() == 0

            assert time.monotonic() - started_s > 1.5
            assert b" 503 Service Unavailable\r\n" in upload.recv(65536), (
                "whose body was not complete"
            )

        assert_ended_with_the_drain(*open_requests)
        log = server.log.read_text()
        assert "Traceback" not in log and "Exception in ASGI" not in log and "Cancel " not in log

        assert_nothing_left(server)


def test_a_front_end_that_is_told_to_stop_answers_its_requests_and_another_takes_over(
    container: Make, background: Background
) -> None:
    server = container(drain_timeout=2.0, option__chat_template=TEMPLATE).start_and_wait()
    open_requests = ask_long(server, background)
    before = server.pid("lmi-front")
    os.kill(before, signal.SIGTERM)
    assert_ended_with_the_drain(*open_requests)
    wait_until(lambda: before not in server.pids(), "the front end is gone")
    wait_until(lambda: server.ping() == 200, "another serves")
    assert_whole(server.generate(3), 3)
    running(server, 0)
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    ("signum", "is_draining", "code"),
    [
        (signal.SIGTERM, True, 128 + 15),
        (signal.SIGINT, False, 128 + 2),
        (signal.SIGQUIT, False, 128 + 3),
    ],
)
def test_a_second_sigterm_and_the_harsh_signals_stop_at_once(
    container: Make, background: Background, signum: signal.Signals, is_draining: bool, code: int
) -> None:
    for measurement in measurements():
        server = container().start_and_wait()
        stream = background(server.generate, 5000)
        running(server, 1)
        with measurement.within(3):
            if is_draining:
                server.drain()

            server.signal(signum)
            assert server.wait() == code

        assert stream.result().is_whole and stream.result().lines[-1]["code"] == 503, (
            "the client was told"
        )

        assert_nothing_left(server)


def test_sigusr1_makes_every_process_log_at_debug_and_the_next_one_ends_that(
    container: Make,
) -> None:
    server = container(option__output_formatter="form", frontend_workers=2)
    (server.folder / "model.py").write_text(
        "def form(output):\n    return output.request.next_tokens()[0].text\n"
    )
    server.start_and_wait()
    everyone = ["code 0", "engine 0", "front end 0", "front end 1", "supervisor"]

    def said_by(message: str) -> list[str]:
        return sorted(line["role"] for line in server.log_lines() if line.get("message") == message)

    def tells_details() -> bool:
        server.request(
            "POST",
            "/invocations",
            {"inputs": "a", "parameters": {"max_new_tokens": 1, "nothing": 1}},
        )
        return any(line.get("level") == "DEBUG" for line in server.log_lines())

    server.signal(signal.SIGUSR1)
    wait_until(lambda: said_by("the log begins at DEBUG now") == everyone, "all follow")
    wait_until(tells_details, "a front end tells more of a request")
    server.lose_engine()
    wait_until(
        lambda: said_by("the log begins at DEBUG now").count("engine 0") == 2,
        "another engine follows too",
    )
    server.signal(signal.SIGUSR1)
    wait_until(lambda: said_by("the log begins at INFO now") == everyone, "all follow")


@pytest.mark.parametrize("moment_s", [0.0, 0.4, 1.5])
def test_sigterm_while_the_model_loads_ends_the_server_within_five_seconds(
    container: Make, moment_s: float
) -> None:
    server = container(option__rolling_batch="freezing").start()
    wait_until(lambda: server.pids("lmi-engine"), "the engine process is there")
    time.sleep(moment_s)
    server.signal(signal.SIGTERM)
    assert server.wait_within(5.0) == 0
    assert_nothing_left(server)


def test_sigterm_stops_a_stopped_engine_too(container: Make) -> None:
    server = container(drain_timeout=1.0).start_and_wait()
    os.kill(server.pid("lmi-engine"), signal.SIGSTOP)
    server.signal(signal.SIGTERM)
    assert server.wait_within(5.5) == 0
    assert_nothing_left(server)


# The output of libraries.


def test_what_an_engine_and_its_libraries_print_are_lines_of_our_log(container: Make) -> None:
    server = container(option__rolling_batch="talkative").start_and_wait()
    engine = server.pid("lmi-engine")
    wait_until(lambda: "a line from Python" in server.log.read_text(), "the supervisor has read it")
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    printed = {line["message"]: line for line in lines if line.get("logger") == "libraries"}
    warning = "[12:00:00] /project/cpp/grammar.cc:83: Warning: \\xff \x1b[2J"

    assert [printed[text]["level"] for text in (warning, "a line from C")] == ["WARNING", "INFO"]
    assert {(line["role"], line["pid"]) for line in printed.values()} == {("engine 0", engine)}

    assert_whole(server.generate(5), 5)


def test_in_a_log_for_people_too(container: Make) -> None:
    server = container(option__rolling_batch="talkative", log_format="text").start_and_wait()
    wait_until(
        lambda: " libraries: a line from C\n" in server.log.read_text(),
        "the supervisor has read it",
    )
    form = r"^\S+Z WARNING engine 0\[\d+\] libraries: .*83: Warning: \\xff \\u001b\[2J$"
    assert re.search(form, server.log.read_text(), re.MULTILINE)


def test_the_last_words_of_an_engine_that_aborts_are_in_the_log(container: Make) -> None:
    options = {"option__rolling_batch": "talkative", "option__abort": "1", "retry_threshold": 0}
    server = container(**options).start()
    assert server.wait() == 1
    assert "SIGABRT" in server.last_words()["message"]
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    [words] = [line for line in lines if "last words" in line["message"]]
    assert words["level"] == "CRITICAL" and words["role"] == "engine 0"


def test_an_engine_that_prints_a_megabyte_holds_up_neither_itself_nor_the_server(
    container: Make,
) -> None:
    server = container(
        option__rolling_batch="talkative", option__num_bytes=1_000_000
    ).start_and_wait()
    assert_whole(server.generate(5), 5)
    wait_until(
        lambda: server.metric("lmi_log_lines_dropped_total") > 0,
        "the supervisor reads more than it logs",
    )
    assert server.log.stat().st_size < 8 << 20

    server.signal(signal.SIGTERM)
    assert server.wait() == 0

    assert_nothing_left(server)


# Exhausted resources.


def test_a_full_disk_under_the_log_does_not_stop_the_server(container: Make) -> None:
    server = container(stderr="/dev/full").start_and_wait()
    assert_whole(server.generate(5), 5)
    engine = server.lose_engine()
    wait_until(lambda: engine.is_alive and server.ping() == 200, "the engine is back")
    server.signal(signal.SIGTERM)
    assert server.wait() == 0


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_server_without_standard_output_or_error_serves_and_ends_in_order(
    container: Make, closed: str
) -> None:
    server = container(command_prefix=["sh", "-c", f'exec "$@" {closed}', "sh"]).start_and_wait()
    assert_whole(server.generate(5), 5)
    for process, num_own in (("lmi-gunicorn", 3), ("lmi-engine", 1)):
        kinds = [os.readlink(f"/proc/{server.pid(process)}/fd/{fd}") for fd in (0, 1, 2)]
        assert set(kinds[:num_own]) <= {"/dev/null", str(server.log)}, (
            "something else got the number of a closed one"
        )
        assert all(kind.startswith("pipe:") for kind in kinds[num_own:]), (
            "the supervisor reads what an engine prints"
        )

    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert "Traceback" not in server.log.read_text()

    assert_nothing_left(server)


def test_a_server_in_a_poor_environment_serves_and_signals_without_a_meaning_end_nothing(
    container: Make,
) -> None:
    """No home, no locale, little memory, small files, and signals that a shell or an operator may
    send.
    """
    limits = ["prlimit", "--fsize=1000000", f"--as={3 << 29}"]
    poor = {
        "HOME": "/proc/none",
        "XDG_CACHE_HOME": "/proc/none",
        "LANG": "",
        "LC_ALL": "",
        "PATH": os.defpath,
    }
    server = container(environ=poor, command_prefix=limits).start_and_wait()
    for signum in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGWINCH):
        server.signal(signum)
        for process in ("lmi-engine", "lmi-front"):
            if signum in (signal.SIGUSR2, signal.SIGPIPE):
                os.kill(server.pid(process), signum)

        assert_whole(server.generate(5, "Grüße, 世界"), 5)

    assert server.metric("lmi_engine_restarts_total") == 0

    server.signal(signal.SIGTERM)
    assert server.wait() == 0

    assert_nothing_left(server)


def test_too_few_open_files_are_refused_with_what_is_needed_and_what_there_is(
    container: Make,
) -> None:
    server = container(command_prefix=["prlimit", "--nofile=20:20"]).start()
    assert server.wait() == 1
    message = server.last_words()["message"]
    assert "64" in message and "only 20" in message and "ulimit" in message

    # Beside these words two lines about an option of the model's file.
    assert server.log.read_text().count("\n") <= 3
    assert_nothing_left(server)


def test_a_log_that_nobody_reads_holds_up_neither_requests_nor_the_end(
    container: Make, tmp_path: Path
) -> None:
    server = container(frontend_workers=2)
    server.log = tmp_path / "pipe"
    os.mkfifo(server.log)
    reader = os.open(server.log, os.O_RDONLY | os.O_NONBLOCK)
    server.start_and_wait()
    fill_log(server)
    assert_whole(server.generate(5), 5)

    assert server.ping() == 200
    assert server.metric("lmi_log_lines_dropped_total") > 0

    engine = server.pid("lmi-engine")
    os.kill(engine, signal.SIGKILL)
    wait_until(
        lambda: server.pids("lmi-engine") not in ([], [engine]),
        "the supervisor starts another engine",
    )
    wait_until(lambda: server.ping() == 200, "it is ready")

    assert len(read_log(reader)) > 30

    new: list[dict[str, Any]] = []

    def is_told() -> bool:
        server.request("GET", "/nowhere")
        new.extend(read_log(reader))
        return any("lines of this process were dropped" in event["message"] for event in new)

    wait_until(is_told, "the log goes on and says that lines are missing")
    assert any(event["message"] == "GET /nowhere" and event["status"] == 404 for event in new)

    fill_log(server)
    server.signal(signal.SIGTERM)
    assert server.wait_within(5.0) == 0

    read_log(reader)
    os.close(reader)
    assert_nothing_left(server)


def fill_log(server: Container) -> None:
    """Make log lines of 1 KB until one is dropped; a pipe holds 64 KB."""
    num_dropped = server.metric("lmi_log_lines_dropped_total")
    for _ in range(200):
        assert server.request("GET", "/" + "x" * 1000, timeout_s=30.0).status == 404

    assert server.metric("lmi_log_lines_dropped_total") > num_dropped


def read_log(reader: int) -> list[dict[str, Any]]:
    """The contents of the pipe: whole lines, each of them JSON."""
    data = b""
    with suppress(BlockingIOError):
        while piece := os.read(reader, 65536):
            data += piece

    return [json.loads(line) for line in data.split(b"\n") if line]


def test_clients_that_eat_all_descriptors_keep_neither_pings_nor_streams_away(
    container: Make, background: Background
) -> None:
    server = container(command_prefix=["prlimit", "--nofile=64:64"]).start_and_wait()
    stream = background(server.generate, 200)
    running(server, 1)
    crowd = [socket.create_connection(("127.0.0.1", server.port), 5.0) for _ in range(150)]
    assert server.ping() == 200
    assert_whole(server.generate(5), 5)
    assert_whole(stream.result(), 200)
    for connection in crowd:
        connection.close()


# The import path of children, and their order when memory runs out.


def test_children_do_not_import_from_the_folder_they_are_started_in(container: Make) -> None:
    server = container()
    (server.folder / "msgspec.py").write_text("raise SystemExit('imported from the model folder')")
    server.start_and_wait(from_its_folder=True)
    assert_whole(server.generate(3), 3)


def test_an_engine_is_the_first_to_go_when_memory_runs_out(container: Make) -> None:
    server = container().start_and_wait()

    def score(name: str) -> Any:
        return int(Path(f"/proc/{server.pid(name)}/oom_score_adj").read_text())

    assert score("lmi-engine") > score("lmi-front") >= score("lmi-supervisor")
