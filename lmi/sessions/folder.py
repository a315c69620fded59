"""The open sessions of a server: one folder each, which every process of the server may read and
write.

    ID/session.json   the id, who opened it, and when the session expires
    ID/…              what the model's own code keeps in it
    .open/            files as long as the number of open sessions: of all, and of each owner

A session is made under another name and renamed, so a reader sees a whole session or none. Who
opens or removes one holds the lock of the folder, so the limits are exact. An owner may hold as
many as places are free, so nobody takes the last place from others. Only an id that is a random
UUID ever becomes part of a path.
"""

import errno
import fcntl
import hashlib
import logging
import math
import os
import re
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import msgspec

from lmi.errors import LmiError, shorten
from lmi.runtime import Runtime

# One owner alone may hold half of them.
MAX_SESSIONS = 20_000
ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
FILE = "session.json"
# Begins the name of a session that is being made or removed.
HIDDEN = "."
COUNTS = ".open"
ALL = "all"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The time between two scans for sessions that have expired, and that where there is no room.
SCAN_S = 60.0
FULL_SCAN_S = 1.0

log = logging.getLogger(__name__)


class InvalidSession(LmiError, label="invalid_session", status=400):
    """The request names a session in a way that breaks a rule, or one that is not open."""

    def __init__(self, name: str, rule: str, value: object) -> None:
        super().__init__(f"must be {rule}, given {shorten(value)}", name)


class SessionFailed(LmiError, label="session_failed", status=424):
    """A session cannot be opened or closed here: there are too many, or the folder cannot be
    written.
    """


class NoRoomForSession(SessionFailed, status=507):
    """A session cannot be opened here, because its disk is full. Another server may have room."""


class Session(msgspec.Struct, frozen=True):
    id: str
    # In seconds since the epoch.
    expires_s: float
    # A hash that names who opened it.
    owner: str = ""

    @property
    def has_expired(self) -> bool:
        return time.time() >= self.expires_s


class Sessions:
    """The sessions in the folder `path`. Each expires `expiration_s` seconds after it was opened,
    used or not.

    The methods read and write files, so an event loop calls them in a thread.
    """

    def __init__(self, path: Path, expiration_s: float, max_sessions: int = MAX_SESSIONS) -> None:
        self._path = path
        self._expiration_s = expiration_s
        self._max_sessions = max_sessions
        # The sessions that were read before. A session never changes.
        self._known: dict[str, Session] = {}
        self._scanned_s = -math.inf

    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        """Return the sessions of a model, or None if they are switched off."""
        server = runtime.config.server
        if not server.enable_sessions:
            return None

        return cls(runtime.sessions_path, server.sessions_expiration_s, server.max_sessions)

    def open(self, owner: str = "") -> Session:
        """Open a session of an owner. Raises SessionFailed if there are too many, or if it cannot
        be written.
        """
        owner = hashlib.sha256(owner.encode()).hexdigest()[:32]
        try:
            with self._lock():
                self._check_room(owner)
                session = self._make(owner)
                self._count(owner, 1)
                return session
        except OSError as error:
            log.error("no session can be created in %s: %s", self._path, error.strerror)
            kind = NoRoomForSession if error.errno in FULL else SessionFailed
            raise kind(f"no session can be created: {error.strerror}") from None

    def find(self, session_id: str) -> Session | None:
        """Return the session, which may have expired, or None if no session has this id."""
        if not ID.fullmatch(session_id):
            return None

        with suppress(FileNotFoundError, NotADirectoryError):
            try:
                content = (self._path / session_id / FILE).read_bytes()
                return msgspec.json.decode(content, type=Session)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                log.error("the session %s cannot be read and is not served: %s", session_id, error)

        return None

    def close(self, session_id: str) -> bool:
        """Remove a session with its files. Returns False if no session has this id. Raises
        SessionFailed.
        """
        session = self.find(session_id)
        if session is None:
            return False

        try:
            with self._lock():
                hidden = self._hide(session_id)
                self._count(session.owner, -1)
        except FileNotFoundError:
            # Another process was faster.
            return False
        except OSError as error:
            log.error(
                "the session %s cannot be removed from %s: %s",
                session_id,
                self._path,
                error.strerror,
            )
            raise SessionFailed(f"the session cannot be removed: {error.strerror}") from None

        shutil.rmtree(hidden, ignore_errors=True)
        return True

    def remove_expired(self) -> None:
        """Remove the sessions that have expired, and what a process left that died while it made or
        removed one.
        """
        if self._path.is_dir():
            with self._lock():
                self._remove_expired()

    def _check_room(self, owner: str) -> None:
        """Raise SessionFailed unless another session of the owner has room. Sessions that have
        expired make room.
        """
        scan_after_s = FULL_SCAN_S if self._is_full(owner) else SCAN_S
        if time.monotonic() - self._scanned_s >= scan_after_s:
            self._remove_expired()

        if not self._is_full(owner):
            return

        num_open = self._num_open(ALL)
        num_open_of_owner = self._num_open(owner)
        if num_open >= self._max_sessions:
            raise SessionFailed(f"{num_open} sessions are open, there is no room for another one")

        num_free = self._max_sessions - num_open
        raise SessionFailed(
            f"{num_open_of_owner} sessions of this client are open, and it may have as many as are "
            f"free ({num_free})"
        )

    def _is_full(self, owner: str) -> bool:
        return self._num_open(owner) >= self._max_sessions - self._num_open(ALL)

    def _num_open(self, owner: str) -> int:
        try:
            return (self._path / COUNTS / owner).stat().st_size
        except FileNotFoundError:
            return 0

    def _count(self, owner: str, change: int) -> None:
        """Note that sessions of an owner were opened, or closed if `change` is negative."""
        for name in (owner, ALL):
            self._set_count(name, max(0, self._num_open(name) + change))

    def _set_count(self, owner: str, number: int) -> None:
        folder = self._path / COUNTS
        if number:
            folder.mkdir(mode=0o700, exist_ok=True)
            with open(folder / owner, "ab") as file:
                file.truncate(number)

            return

        (folder / owner).unlink(missing_ok=True)
        # The folder stays while it has other files.
        with suppress(OSError):
            folder.rmdir()

    def _remove_expired(self) -> None:
        """Remove what has expired, and count the others, whose files may have been removed by their
        own code.
        """
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
        self._scanned_s = time.monotonic()

        num_open = Counter(session.owner for session in open_sessions.values())
        if open_sessions:
            num_open[ALL] = len(open_sessions)

        folder = self._path / COUNTS
        noted_owners = os.listdir(folder) if folder.is_dir() else []
        for owner in {*noted_owners, *num_open}:
            if self._num_open(owner) != num_open[owner]:
                self._set_count(owner, num_open[owner])

    def _make(self, owner: str) -> Session:
        session = Session(str(uuid.uuid4()), time.time() + self._expiration_s, owner)
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

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the folder's lock, which one thread of one process has at a time. The kernel frees
        it at its death.
        """
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)
