"""Sessions of a whole server: four front ends and two engines share them, and a restart may keep
them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmi.sessions.folder import COUNTS
from tests.served import Server, launch
from tests.system.container import Answer, wait_until, write_model

FILES = Path(__file__).parents[2] / "user_code" / "files"
SESSION, NEW, CLOSED = (
    f"x-amzn-sagemaker-{name}" for name in ("session-id", "new-session-id", "closed-session-id")
)
# The patterns that the API model of sagemaker-runtime has for the two headers of an answer.
ID = r"[a-zA-Z0-9](-*[a-zA-Z0-9])*"
NEW_PATTERN = ID + r";\sExpires=[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z"
NUM_FRONT_ENDS = 4


@contextmanager
def running(folder: Path, environ: dict[str, str] | None = None) -> Iterator[Server]:
    with launch(folder, environ) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {
        "frontend_workers": NUM_FRONT_ENDS,
        "minWorkers": 2,
        "maxWorkers": 2,
        "option.echo_step_ms": 2,
    }
    with running(write_model(tmp_path_factory.mktemp("sessions") / "model", **options)) as started:
        yield started


def opened(server: Server) -> str:
    answer = server.post({"requestType": "NEW_SESSION"}, headers={SESSION: "NEW_SESSION"})
    assert answer.status == 200, answer.body
    return answer.headers[NEW].partition(";")[0]


def ask(server: Server, session: str, body: object | None = None) -> Answer:
    return server.post(
        body or {"inputs": "abc", "parameters": {"max_new_tokens": 3}}, headers={SESSION: session}
    )


def ask_every_front_end(server: Server, session: str, status: int) -> None:
    """Send requests of the session until each front end has answered one, all with this status."""
    server.wait_for_front_ends(NUM_FRONT_ENDS)
    records = [record for record in server.block().frontends if record.pid]
    before = [dict(record.num_requests.items())[str(status)] for record in records]

    def has_each_answered() -> bool:
        assert ask(server, session).status == status
        now = [dict(record.num_requests.items())[str(status)] for record in records]
        return all(count > old for count, old in zip(now, before, strict=True))

    wait_until(has_each_answered, f"every front end answered {status}")


def test_both_headers_of_a_new_session_have_the_form_that_boto3_knows(server: Server) -> None:
    answer = server.post({"requestType": "NEW_SESSION"})
    assert (
        re.fullmatch(NEW_PATTERN, answer.headers[NEW])
        and answer.headers[SESSION] == answer.headers[NEW]
    )

    session = answer.headers[NEW].partition(";")[0]
    closed = server.post({"requestType": "CLOSE"}, headers={SESSION: session})

    assert closed.headers[CLOSED] == session and re.fullmatch(ID, session)
    assert (json.loads(answer.body), json.loads(closed.body)) == (
        {"result": f"Session {session} created"},
        {"result": f"Session {session} closed"},
    )


def test_every_front_end_knows_a_session_until_one_of_them_closes_it(server: Server) -> None:
    session = opened(server)
    ask_every_front_end(server, session, 200)
    assert ask(server, session, {"requestType": "CLOSE"}).status == 200
    ask_every_front_end(server, session, 400)


def test_ids_that_are_no_ids_make_no_file(server: Server) -> None:
    runtime = Path(server.environ["TMPDIR"])
    opened(server)
    before = sorted(runtime.rglob("*"))
    for attributes in (
        "../../x",
        "/etc/passwd",
        "..",
        "a" * 300,
        "%2e%2e%2fx",
        "0" * 36,
        "session.json",
    ):
        for body in (None, {"requestType": "CLOSE"}):
            answer = ask(server, attributes, body)
            assert (answer.status, json.loads(answer.body)["code"]) == (400, 400)

    assert sorted(runtime.rglob("*")) == before


def test_one_engine_serves_a_session_and_when_it_dies_the_other_does(server: Server) -> None:
    session = opened(server)
    engines = server.engines()

    def that_served() -> list[int]:
        """The engines that made a step for six requests of the session."""
        before = [(engine.pid, engine.step) for engine in engines]
        assert [ask(server, session).status for _ in range(6)] == [200] * 6

        return [
            slot for slot, engine in enumerate(engines) if (engine.pid, engine.step) != before[slot]
        ]

    [slot] = that_served()
    victim = engines[slot].pid
    # It stays away until its successor is wanted
    os.kill(victim, signal.SIGSTOP)
    wait_until(lambda: not engines[slot].is_alive, "the engine is taken for silent")
    assert that_served() == [1 - slot]

    os.kill(victim, signal.SIGKILL)
    wait_until(
        lambda: engines[slot].is_alive and engines[slot].pid != victim, "the engine is back", 60
    )
    wait_until(lambda: that_served() == [slot], "its session is back with it", 60)


def test_a_folder_of_your_own_outlives_the_server_and_every_session_has_its_own_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "kept"
    folder = write_model(
        tmp_path / "model", **{"frontend_workers": 1, "option.sessions_path": path}
    )
    with running(folder) as first:
        session = opened(first)
        first.signal(signal.SIGTERM)
        assert first.wait(60) == 0

    assert {entry.name for entry in path.iterdir()} == {session, COUNTS}

    with running(folder, {"SAGEMAKER_SESSIONS_EXPIRATION": "1"}) as second:
        assert ask(second, session).status == 200

        short = opened(second)
        wait_until(lambda: ask(second, short).status == 400, "the new one is over")
        assert ask(second, session).status == 200

        opened(second)
        assert (path / session).exists()


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("stateful") / "model"
    folder.mkdir()
    shutil.copy(FILES / "stateful" / "model.py", folder)
    settings = (
        "log_format=json",
        "minWorkers=2",
        "maxWorkers=2",
        "frontend_workers=1",
        "option.sessions_expiration=6",
    )
    (folder / "serving.properties").write_text("\n".join(settings) + "\n")
    with running(folder) as started:
        yield started


def test_the_files_of_user_code_are_there_for_each_of_its_processes(stateful: Server) -> None:
    created = stateful.post({"action": "create"})
    session = created.headers[SESSION]

    assert Path(json.loads(created.body)["path"]).parents[3] == Path(stateful.environ["TMPDIR"])

    answers = [json.loads(ask(stateful, session, {"action": "regular"}).body) for _ in range(4)]
    assert [answer["state"] for answer in answers] == [[[n, n]] * 3 for n in (2, 3, 4, 5)]
    assert len({answer["owner"]["pid"] for answer in answers}) == 1

    streamed = ask(stateful, session, {"action": "streaming"})
    assert [json.loads(line) for line in streamed.body.splitlines()] == [[5, 5]] * 3

    closed = ask(stateful, session, {"action": "close"})
    assert closed.headers["x-amzn-sagemaker-session-closed"] == "true"
    assert (
        "session not found"
        in json.loads(ask(stateful, session, {"action": "regular"}).body)["error"]
    )


def test_a_session_of_user_code_ends_at_its_time(stateful: Server) -> None:
    started_s = time.monotonic()
    session = stateful.post({"action": "create"}).headers[SESSION]
    wait_until(lambda: ask(stateful, session, {"action": "regular"}).status == 424, "it is over")
    assert time.monotonic() - started_s > 5


@pytest.mark.parametrize("kind", ["NEW_SESSION", "CLOSE", "MINE"])
def test_a_model_that_is_user_code_answers_request_types_itself(
    stateful: Server, kind: str
) -> None:
    answer = ask(stateful, "any thing", {"requestType": kind})
    assert (answer.status, json.loads(answer.body)) == (
        200,
        {"given": {"requestType": kind}, "session": "any thing"},
    )
    assert NEW not in answer.headers
