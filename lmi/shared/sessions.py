"""The open sessions of a server: one folder each, which every process of the server may read and write.

    ID/session.json   the id, and when the session expires
    ID/…              what the model's own code keeps in it

A session is made under another name and renamed, so a reader sees a whole session or none. A process that opens or
removes one holds the lock of the folder, so the limit is exact. An id is a random UUID, and only such an id ever
becomes part of a path.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from lmi.errors import LmiError, shorten

MAX_SESSIONS = 10_000
ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
FILE = "session.json"
HIDDEN = "."  # begins the name of a session that is being made or removed

log = logging.getLogger(__name__)


class InvalidSession(LmiError):
    """The request names a session in a way that breaks a rule, or one that is not open."""

    status = 400
    label = "invalid_session"

    def __init__(self, name: str, rule: str, given: object) -> None:
        super().__init__(f"must be {rule}, given {shorten(given)}", name)


class SessionFailed(LmiError):
    """A session cannot be opened or closed here: there are too many, or the disk is full."""

    status = 424
    label = "session_failed"


class Session(msgspec.Struct, frozen=True):
    id: str
    expires_s: float  # since the epoch

    @property
    def has_expired(self) -> bool:
        return time.time() >= self.expires_s


class Sessions:
    """The sessions in the folder `path`. Each expires `expiration_s` seconds after it was opened, used or not.

    The methods read and write files, so an event loop calls them in a thread.
    """

    def __init__(self, path: Path, expiration_s: float, max_sessions: int = MAX_SESSIONS) -> None:
        self._path = path
        self._expiration_s = expiration_s
        self._max_sessions = max_sessions
        self._known: dict[str, Session] = {}  # those that were read before; a session never changes

    def open(self) -> Session:
        """Open a session. Raises SessionFailed if there are too many, or if it cannot be written."""
        try:
            with self._lock():
                num_open = self._remove_expired()
                if num_open >= self._max_sessions:
                    raise SessionFailed(f"{num_open} sessions are open, there is no room for another one")
                return self._make()
        except OSError as error:
            raise SessionFailed(f"no session can be created in {self._path}: {error.strerror}") from None

    def find(self, session_id: str) -> Session | None:
        """Return the session, which may have expired, or None if no session has this id."""
        return self._read(session_id) if ID.fullmatch(session_id) else None

    def close(self, session_id: str) -> bool:
        """Remove a session with its files. Returns False if no session has this id. Raises SessionFailed."""
        if self.find(session_id) is None:
            return False
        try:
            with self._lock():
                hidden = self._hide(session_id)
        except FileNotFoundError:  # another process was faster
            return False
        except OSError as error:
            raise SessionFailed(f"the session cannot be removed from {self._path}: {error.strerror}") from None
        shutil.rmtree(hidden, ignore_errors=True)
        return True

    def remove_expired(self) -> None:
        """Remove the sessions that have expired, and what a process left that died while it made or removed one."""
        if self._path.is_dir():
            with self._lock():
                self._remove_expired()

    def folder(self, session_id: str) -> Path:
        """Return the folder of a session that was found."""
        return self._path / session_id

    def _remove_expired(self) -> int:
        """Remove what has expired. Returns the number of open sessions."""
        open_sessions = {}
        for name in os.listdir(self._path):
            session = self._known.get(name) or self.find(name)
            if session is not None and not session.has_expired:
                open_sessions[name] = session
            elif ID.fullmatch(name):
                shutil.rmtree(self._hide(name), ignore_errors=True)
            elif ID.fullmatch(name.removeprefix(HIDDEN)):
                shutil.rmtree(self._path / name, ignore_errors=True)
        self._known = open_sessions
        return len(open_sessions)

    def _make(self) -> Session:
        session = Session(str(uuid.uuid4()), time.time() + self._expiration_s)
        hidden = self._path / (HIDDEN + session.id)
        try:
            hidden.mkdir(mode=0o700)
            (hidden / FILE).write_bytes(msgspec.json.encode(session))
            hidden.rename(self._path / session.id)
        except OSError:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        return session

    def _hide(self, session_id: str) -> Path:
        """Take the session out of every reader's sight. Returns where its files are then."""
        return (self._path / session_id).rename(self._path / (HIDDEN + session_id))

    def _read(self, session_id: str) -> Session | None:
        with suppress(FileNotFoundError, NotADirectoryError):
            try:
                return msgspec.json.decode((self._path / session_id / FILE).read_bytes(), type=Session)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                log.error("the session %s cannot be read and is not served: %s", session_id, error)
        return None

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the folder's lock, which one thread of one process has at a time. The kernel frees it at its death."""
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)
