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
from lmi.shared import processes
from lmi.shared.files import is_there
from lmi.sources.fetches import FAILURE, REQUEST, FetchRequest, read, write
from lmi.supervisor.child import Failure
from lmi.supervisor.stages import Stage, fetch_words

# So many run at once. The others wait, and the oldest is next.
MAX_AT_ONCE = 4

log = logging.getLogger(__name__)


class FetchProcesses:
    """The fetches of the server. Iterating yields those whose processes run or may start."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._folder = runtime.fetches()
        self._config = runtime.config
        # The oldest comes first.
        self._fetches: dict[Path, Fetch] = {}

    def __iter__(self) -> "Iterator[Fetch]":
        open_fetches = [fetch for fetch in self._fetches.values() if fetch.is_open]
        return iter(open_fetches[:MAX_AT_ONCE])

    def look(self) -> None:
        """Note new requests, end the fetches that nobody waits for, and remove what is left of
        them.
        """
        # The folder is there from the first request on.
        with suppress(OSError):
            self._look_for_requests()

        for folder, fetch in list(self._fetches.items()):
            if fetch.is_wanted:
                continue

            # What lies on the disk is good at any moment.
            fetch.is_retired = True
            fetch.send(signal.SIGKILL)
            if not fetch.is_open:
                fetch.close()
                shutil.rmtree(folder, ignore_errors=True)
                del self._fetches[folder]

    def _look_for_requests(self) -> None:
        folders = {path for path in self._folder.iterdir() if not path.name.startswith(".")}
        new_folders = folders - self._fetches.keys()
        for folder in sorted(new_folders, key=lambda path: path.stat().st_mtime):
            # What cannot be read now is for the next look.
            with suppress(OSError):
                self._begin(folder)

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
            return

        # Nobody waits any more. Where one does, this shows that nobody works on it.
        shutil.rmtree(folder, ignore_errors=True)


class Fetch(Stage):
    """One fetch, from its request until nobody waits for it."""

    def __init__(self, folder: Path, request: FetchRequest, config: ServerConfig) -> None:
        super().__init__("fetch process", folder, config, *fetch_words(folder), "--no-bar")
        self._writer = request.writer
        texts = [shorten(source.source, 300) for source in request.sources]
        self._sources = ", ".join(texts)
        log.info("fetching %s for a client", self._sources)

    @property
    def is_open(self) -> bool:
        """Whether its process runs or is still to start."""
        return self.pid is not None or not (self.is_done or self.is_retired)

    @property
    def is_wanted(self) -> bool:
        return is_there(self.folder / REQUEST) and processes.is_alive(self._writer)

    def fatal(self, code: int, why: str) -> StartError | None:
        # A code below 0 is a signal, which may have ended it.
        if code <= 0:
            return None

        return StartError(f"fetch process {why}")

    def fail(self, failure: Failure) -> None:
        """Leave the reason for the front end, unless the process itself did."""
        self.is_retired = True
        if (self.folder / FAILURE).exists():
            return

        start_error = StartError(f"{self._sources}: {failure.message}")
        try:
            write(self.folder / FAILURE, start_error.info)
        except OSError as error:
            # The disk is full, or nobody waits.
            log.error("%s; this cannot be passed on: %s", start_error, error)
            shutil.rmtree(self.folder, ignore_errors=True)
