"""The async invocations that a gateway has accepted, on the disk until each has left its answer.

A gateway that was killed finds there what it had accepted, and what it was about to write.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from lmi.gateway.async_job import AsyncJob
from lmi.gateway.state_folder import lock_folder
from lmi.gateway.stores import cannot_write

log = logging.getLogger(__name__)


class AsyncQueue:
    """Accepted invocations in `folder`, each in a file. One gateway at a time has the folder.

    Without a folder nothing is kept, and what was accepted ends with the gateway. Raises
    BadConfiguration.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock = None
        if folder is not None:
            self._lock = lock_folder(folder, "--async-queue")

    @property
    def outlives_gateway(self) -> bool:
        """Whether another gateway goes on with what this one leaves."""
        return self._folder is not None

    def keep(self, job: AsyncJob) -> None:
        """Keep an invocation as it is now. It is on the disk when the call returns. Raises
        StoreError, and what was kept of it before stays.
        """
        if self._folder is None:
            return

        file = self._file(job)
        part = file.with_suffix(".part")
        try:
            with open(part, "wb") as opened:
                opened.write(msgspec.msgpack.encode(job))
                opened.flush()
                os.fsync(opened.fileno())

            part.replace(file)
            _sync(self._folder)
        except OSError as error:
            with suppress(OSError):
                part.unlink()

            raise cannot_write(file, error) from error

    def forget(self, job: AsyncJob) -> None:
        """Forget an invocation whose answer is written."""
        if self._folder is None:
            return

        try:
            self._file(job).unlink(missing_ok=True)
        except OSError as error:
            # Another gateway writes the same answer once more.
            log.error("%s cannot be removed: %s", self._file(job), error.strerror)

    def load(self) -> list[AsyncJob]:
        """Return what a former gateway has left, in the order in which it was accepted."""
        if self._folder is None:
            return []

        for part in self._folder.glob("*.part"):
            part.unlink(missing_ok=True)

        jobs = []
        for file in sorted(self._folder.glob("*.job")):
            try:
                jobs.append(msgspec.msgpack.decode(file.read_bytes(), type=AsyncJob))
            except (OSError, msgspec.MsgspecError) as error:
                log.error("%s is passed over, since it cannot be read: %s", file, error)

        return jobs

    def _file(self, job: AsyncJob) -> Path:
        assert self._folder is not None
        return self._folder / f"{job.key}.job"


def _sync(folder: Path) -> None:
    """Return when the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
