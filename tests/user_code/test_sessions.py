"""Sessions of a model's own code, as files written for djl-serving use them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lmi.sessions.folder import FILE


def manager(path: Path, **properties: str) -> Any:
    from djl_python import SessionManager

    return SessionManager({"sessions_path": str(path), **properties})


def test_what_one_process_keeps_another_finds(tmp_path: Path) -> None:
    opened_s = time.time()
    session = manager(tmp_path).create_session()
    session.put("metadata", {"step": 1, "text": "é"})
    session_found = manager(tmp_path).get_session(session.session_id)
    assert session_found is not None and session_found.get("metadata") == {"step": 1, "text": "é"}
    assert (session_found.get("other"), session_found.get("other", 7)) == (None, 7)
    assert session_found.expiration_ts == session.expiration_ts
    assert opened_s + 1200 <= session_found.expiration_ts <= time.time() + 1200


def test_an_array_is_kept_as_it_is_written(tmp_path: Path) -> None:
    session = manager(tmp_path).create_session()
    array = session.get_as_numpy("state", shape=(10, 5, 5), create=True)

    assert array.sum() == 0 and array.dtype == "float32"

    array.fill(1)
    session_found = manager(tmp_path).get_session(session.session_id)

    assert (
        session_found is not None
        and session_found.get_as_numpy("state", shape=(10, 5, 5)).sum() == 250
    )
    assert session.get_as_numpy("row", shape=4, dtype="int64", create=True).shape == (4,)

    with pytest.raises(FileNotFoundError):
        session.get_as_numpy("never", shape=(1,))


def test_a_value_that_json_cannot_hold_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    session = manager(tmp_path).create_session()
    session.put("a", 1)
    with pytest.raises(TypeError, match="not JSON serializable"):
        session.put("a", object())

    assert session.get("a") == 1


def test_many_may_keep_a_value_of_one_name_at_once(tmp_path: Path) -> None:
    session = manager(tmp_path).create_session()
    num_files = len(list(Path(session.files_path).iterdir()))
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda number: session.put("a", number), range(200)):
            pass

    assert session.get("a") in range(200)
    assert len(list(Path(session.files_path).iterdir())) == num_files + 1


@pytest.mark.parametrize("key", [FILE, "../../x", "..", "", "a/b", "é" * 300])
def test_a_key_never_becomes_a_path(tmp_path: Path, key: str) -> None:
    sessions = manager(tmp_path / "sessions")
    session = sessions.create_session()
    session.put(key, "kept")
    assert session.get(key) == "kept"
    assert sessions.get_session(session.session_id) is not None
    assert [file.name for file in tmp_path.iterdir()] == ["sessions"]
    assert len(list(Path(session.files_path).iterdir())) == 2


def test_a_session_that_is_closed_is_gone_with_its_files(tmp_path: Path) -> None:
    sessions = manager(tmp_path)
    first = sessions.create_session()
    second = sessions.create_session()
    sessions.close_session(first.session_id)
    assert second.remove()

    for session in (first, second):
        with pytest.raises(ValueError, match="session not found"):
            sessions.get_session(session.session_id)

        with pytest.raises(ValueError, match="session not found"):
            sessions.close_session(session.session_id)

    with pytest.raises(ValueError, match="does not exist"):
        second.remove()

    with pytest.raises(ValueError, match="invalid session_id: None"):
        sessions.close_session(None)


def test_no_session_is_named_by_nothing_and_an_expired_one_is_none(tmp_path: Path) -> None:
    sessions = manager(tmp_path, sessions_expiration="0.05")
    assert sessions.get_session(None) is None and sessions.get_session("NEW_SESSION") is None
    session = sessions.create_session()
    time.sleep(0.06)
    assert sessions.get_session(session.session_id) is None
    manager(tmp_path).create_session()
    assert not Path(session.files_path).exists()


def test_the_classes_stand_where_files_import_them_from() -> None:
    from djl_python import SessionManager, session_manager

    assert (
        session_manager.SessionManager is SessionManager
        and session_manager.Session.__name__ == "Session"
    )
