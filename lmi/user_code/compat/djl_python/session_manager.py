"""Sessions of a model's own code: files that all its processes share, and that go when the session
ends.

A value is kept as JSON, and an array as a mapped file. The sessions are the server's
(`lmi/sessions/folder.py`), so every process of the model finds one that another has created. A key
only names a file by its hash.
"""

import hashlib
import json
import logging
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmi.sessions.folder import Session as Opened, Sessions

EXPIRATION_S = 1200
NEW_SESSION = "NEW_SESSION"

log = logging.getLogger(__name__)


class Session:
    """One session. `files_path` is its folder, `expiration_ts` the time of its end in seconds since
    the epoch.
    """

    def __init__(
        self, session_id: str, session_root: str, expiration_ts: float | None = None
    ) -> None:
        self.session_id = session_id
        self.files_path = os.path.join(session_root, session_id)
        self.expiration_ts = expiration_ts

    def put(self, key: str, value: Any) -> None:
        """Keep a value. Raises TypeError for one that JSON cannot hold, and OSError, with which the
        old value stays.
        """
        text = json.dumps(value)
        path = self._path(key)
        # Other threads, and processes of other containers with the same id, may keep one too.
        new_path = path.with_suffix(f".{secrets.token_hex(8)}")
        try:
            new_path.write_text(text)
            new_path.rename(path)
        except OSError:
            new_path.unlink(missing_ok=True)
            raise

    def get(self, key: str, d: Any = None) -> Any:
        """Return the value that was kept, or `d` if there is none."""
        try:
            return json.loads(self._path(key).read_text())
        except FileNotFoundError:
            return d

    def get_as_numpy(
        self, key: str, shape: Any, dtype: Any = "float32", create: bool = False
    ) -> Any:
        """Return an array whose elements are kept as they are written. With `create` it begins with
        zeros.

        The array takes its room on the disk now, because a later write to a full disk would end the
        process.
        """
        import numpy

        path = self._path(key)
        if create:
            sizes = [shape] if isinstance(shape, int) else shape
            num_bytes = math.prod(sizes) * numpy.dtype(dtype).itemsize
            with open(path, "wb") as file:
                if num_bytes:
                    os.posix_fallocate(file.fileno(), 0, num_bytes)

        return numpy.memmap(path, dtype=dtype, mode="r+", shape=shape)

    def remove(self) -> bool:
        """Remove the session with its files. Raises ValueError if it is gone already."""
        if not os.path.isdir(self.files_path):
            raise ValueError(f"session directory does not exist: {self.session_id}")

        shutil.rmtree(self.files_path)
        return True

    def _path(self, key: str) -> Path:
        return Path(self.files_path, hashlib.sha256(key.encode()).hexdigest())


class SessionManager:
    """Creates, finds and closes sessions, with the options `sessions_path` and
    `sessions_expiration` (seconds).
    """

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self.expiration = float(properties.get("sessions_expiration", EXPIRATION_S))
        sessions_path = properties.get("sessions_path")
        if not sessions_path:
            sessions_path = os.path.join(tempfile.gettempdir(), "djl_sessions")

        self.sessions_path = str(sessions_path)
        self._sessions = Sessions(Path(self.sessions_path), self.expiration)
        if properties.get("sessions_s3url"):
            log.warning(
                "sessions_s3url has no effect here, sessions stay in %s", self.sessions_path
            )

    def create_session(self) -> Session:
        """Open a session, and remove those that have expired. Raises an error that says why there
        is no room.
        """
        return self._as_session(self._sessions.open())

    def get_session(self, session_id: str | None) -> Session | None:
        """Return the session, or None if it has expired or none is named. Raises ValueError for an
        unknown id.
        """
        if not session_id or session_id == NEW_SESSION:
            return None

        opened = self._sessions.find(session_id)
        if opened is None:
            raise ValueError(f"session not found: {session_id}")

        return None if opened.has_expired else self._as_session(opened)

    def close_session(self, session_id: str | None) -> None:
        """Remove a session. Raises ValueError for an id that is missing or unknown."""
        if not session_id:
            raise ValueError(f"invalid session_id: {session_id}")

        if not self._sessions.close(session_id):
            raise ValueError(f"session not found: {session_id}")

    def _as_session(self, opened: Opened) -> Session:
        return Session(opened.id, self.sessions_path, opened.expires_s)
