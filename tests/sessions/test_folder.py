"""The folder of sessions, as several processes use it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmi.sessions.folder import COUNTS, FILE, HIDDEN, SessionFailed, Sessions
from tests.machine import measurements

HOSTILE = [
    "",
    ".",
    "..",
    "../x",
    "/etc/passwd",
    "a/b",
    "NEW_SESSION",
    "session.json",
    "\0",
    "é" * 36,
    "0" * 36,
]


def test_a_session_is_found_by_every_reader_until_it_is_closed(tmp_path: Path) -> None:
    mine, their_sessions = (Sessions(tmp_path / "sessions", 60) for _ in range(2))
    opened_s = time.time()
    session = mine.open()

    assert uuid.UUID(session.id).version == 4 and str(uuid.UUID(session.id)) == session.id
    assert their_sessions.find(session.id) == session and not session.has_expired
    assert opened_s + 60 <= session.expires_s <= time.time() + 60
    assert their_sessions.close(session.id)
    assert mine.find(session.id) is None and not mine.close(session.id)
    assert list((tmp_path / "sessions").iterdir()) == []


def test_the_files_of_a_session_go_with_it(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, 60)
    session = sessions.open()
    ((tmp_path / session.id) / "state").write_text("kept")
    assert {file.name for file in (tmp_path / session.id).iterdir()} == {"state", FILE}
    sessions.close(session.id)
    assert not (tmp_path / session.id).exists()


def test_an_expired_session_goes_when_another_needs_its_place_and_when_somebody_cleans(
    tmp_path: Path,
) -> None:
    short, long = (Sessions(tmp_path, expiration_s, max_sessions=3) for expiration_s in (0.01, 60))
    first = short.open()
    time.sleep(0.02)
    assert short.find(first.id) == first and first.has_expired
    second = long.open()
    assert long.find(first.id) is None and long.find(second.id) == second
    third = short.open("another")
    time.sleep(0.02)
    long.remove_expired()
    assert long.find(third.id) is None and long.find(second.id) == second


def test_sessions_in_a_folder_that_stays_outlive_their_server(tmp_path: Path) -> None:
    session = Sessions(tmp_path, 60).open()
    assert Sessions(tmp_path, 1).find(session.id) == session


def test_there_are_never_more_than_the_limit_however_many_open_one_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from lmi.sessions.folder import *\n"
        "sessions = Sessions(Path(sys.argv[1]), 60, max_sessions=50)\n"
        "try:\n  for number in range(99): sessions.open(f'{sys.argv[2]}-{number}')\n"
        "except SessionFailed as error: print(error)"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(n)], stdout=subprocess.PIPE, text=True
        )
        for n in range(3)
    ]
    outputs = [process.communicate(timeout=60)[0].strip() for process in started]

    assert outputs == ["50 sessions are open, there is no room for another one"] * 3
    assert len(names(tmp_path)) == 50


def test_an_owner_has_as_many_sessions_as_are_free_so_nobody_takes_the_last_place(
    tmp_path: Path,
) -> None:
    sessions = Sessions(tmp_path, 60, max_sessions=20)

    def opened(owner: str) -> list[str]:
        ids = []
        with pytest.raises(
            SessionFailed,
            match="of this client are open, and it may have as many as are free|no room",
        ):
            while True:
                ids.append(sessions.open(owner).id)

        return ids

    greedy = [opened("a"), opened("b"), opened("c")]
    assert [len(ids) for ids in greedy] == [10, 5, 3]

    sessions.open("d")
    sessions.close(greedy[0][0])
    sessions.open("e")

    assert opened("a") == [], "its own place went to another"


def test_the_count_of_sessions_is_mended_when_somebody_cleans(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, 60, max_sessions=4)
    for session in (sessions.open(), sessions.open()):
        # As the model's own code may do
        shutil.rmtree(tmp_path / session.id)

    sessions.remove_expired()
    assert names(tmp_path) == [] and not (tmp_path / COUNTS).exists()
    assert sessions.open() and sessions.open()


def test_the_ten_thousandth_session_opens_as_fast_as_the_first(tmp_path: Path) -> None:
    for number, measurement in enumerate(measurements()):
        sessions = Sessions(tmp_path / str(number), 60)
        first_s = timed(sessions, 100)
        for _ in range(9800):
            sessions.open()

        with measurement.within(4 * first_s):
            timed(sessions, 100)


def timed(sessions: Sessions, number: int) -> float:
    """The seconds that it takes to open so many sessions."""
    started_s = time.monotonic()
    for _ in range(number):
        sessions.open()

    return time.monotonic() - started_s


def names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir() if file.name != COUNTS]


def test_one_of_many_that_close_a_session_at_once_closes_it(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, 60)
    session = sessions.open()
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda _: sessions.close(session.id), range(8))) == 1


def test_what_a_dead_process_left_half_done_goes(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, 60)
    session = sessions.open()
    half_made, half_removed, broken = (str(uuid.uuid4()) for _ in range(3))
    (tmp_path / (HIDDEN + half_made)).mkdir()
    (tmp_path / (HIDDEN + half_removed)).mkdir()
    (tmp_path / (HIDDEN + half_removed) / FILE).write_text("{}")
    (tmp_path / broken).mkdir()
    (tmp_path / broken / FILE).write_text('{"id": 5')
    assert sessions.find(half_removed) is None and sessions.find(broken) is None

    sessions.remove_expired()
    assert names(tmp_path) == [session.id]


def test_files_of_others_in_the_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    (tmp_path / ".hidden").mkdir()
    Sessions(tmp_path, 60).open()
    assert (tmp_path / "notes").exists() and (tmp_path / ".hidden").exists()


@pytest.mark.parametrize("given", HOSTILE)
def test_only_a_random_uuid_is_looked_for(tmp_path: Path, given: str) -> None:
    sessions = Sessions(tmp_path / "sessions", 60)
    session = sessions.open()
    (tmp_path / FILE).write_text("{}")
    assert sessions.find(given) is None and not sessions.close(given)
    assert sessions.find(session.id.upper()) is None
    assert names(tmp_path / "sessions") == [session.id]


def test_a_place_that_cannot_be_written_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SessionFailed, match="^no session can be created: Not a directory$"):
        Sessions(tmp_path / "file" / "x", 60).open()

    assert f"no session can be created in {tmp_path}/file/x: Not a directory" in caplog.text


def test_a_disk_without_room_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; from lmi.sessions.folder import *\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "try: Sessions(Path(sys.argv[1]), 60).open()\n"
        "except SessionFailed as error: print(error.status, str(error)[:9], end='')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "507 no sessio" and list(tmp_path.iterdir()) == []
