"""The fetches that front ends ask for while the server runs: adapters that lie at a hub or in S3.

A front end lays a folder with a `FetchRequest` below `fetches/` of the server's, and waits for the
result or the failure there. It removes the request when it waits no longer.
"""

import logging
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from lmi.errors import StartError, shorten
from lmi.runtime import ServerRuntime
from lmi.settings.config import ServerConfig
from lmi.shared import linux
from lmi.sources.fetches import FAILURE, REQUEST, FetchRequest, read, write
from lmi.supervisor.child import Failure
from lmi.supervisor.stages import Stage, fetch_words

MAX_AT_ONCE = 4  # the others wait, the oldest is next

log = logging.getLogger(__name__)


class FetchProcesses:
    """The fetches of the server. Iterating yields those whose processes run or may start."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._folder = runtime.fetches()
        self._config = runtime.config
        self._fetches: dict[Path, Fetch] = {}  # the oldest first

    def __iter__(self) -> "Iterator[Fetch]":
        return iter([fetch for fetch in self._fetches.values() if fetch.is_open][:MAX_AT_ONCE])

    def look(self) -> None:
        """Note new requests, end the fetches that nobody waits for, and remove what is left of
        them.
        """
        with suppress(OSError):  # nothing was asked for yet
            found = {path for path in self._folder.iterdir() if not path.name.startswith(".")} - {
                *self._fetches
            }
            for folder in sorted(found, key=lambda path: path.stat().st_mtime):
                with suppress(OSError):  # it cannot be read now, so it is for the next look
                    self._begin(folder)

        for folder, fetch in list(self._fetches.items()):
            if not fetch.is_wanted:
                fetch.is_retired = True
                fetch.send(signal.SIGKILL)  # what lies on the disk is good at any moment
                if not fetch.is_open:
                    fetch.close()
                    shutil.rmtree(folder, ignore_errors=True)
                    del self._fetches[folder]

    def _begin(self, folder: Path) -> None:
        """Note a request. One that is gone or no request is removed. Raises OSError where it cannot
        be read now.
        """
        request = None
        try:
            request = read(folder / REQUEST, FetchRequest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.error("%s cannot be read: %s", folder / REQUEST, error)

        if request is not None:
            self._fetches[folder] = Fetch(folder, request, self._config)
        else:  # nobody waits any more; where one does, this shows that nobody works on it
            shutil.rmtree(folder, ignore_errors=True)


class Fetch(Stage):
    """One fetch, from its request until nobody waits for it."""

    def __init__(self, folder: Path, request: FetchRequest, config: ServerConfig) -> None:
        super().__init__("fetch process", folder, config, *fetch_words(folder), "--no-bar")
        self._writer = request.writer
        self._sources = ", ".join(shorten(wanted.source, 300) for wanted in request.sources)
        log.info("fetching %s for a client", self._sources)

    @property
    def is_open(self) -> bool:
        """Whether its process runs or is still to start."""
        return self.pid is not None or not (self.is_done or self.is_retired)

    @property
    def is_wanted(self) -> bool:
        return linux.is_there(self.folder / REQUEST) and linux.is_alive(self._writer)

    def fatal(self, code: int, why: str) -> StartError | None:
        return (
            StartError(f"fetch process {why}") if code > 0 else None
        )  # a signal may have ended it

    def fail(self, failure: Failure) -> None:
        """Leave the reason for the front end, unless the process itself did."""
        self.is_retired = True
        if (self.folder / FAILURE).exists():
            return

        said = StartError(f"{self._sources}: {failure.message}")
        try:
            write(self.folder / FAILURE, said.info)
        except OSError as error:  # the disk is full, or nobody waits
            log.error("%s; this cannot be passed on: %s", said, error)
            shutil.rmtree(self.folder, ignore_errors=True)
