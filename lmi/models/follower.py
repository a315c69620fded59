"""Runs the models that the folder of desired state says there should be. It waits for no lock, and
so for nobody.
"""

import logging
import os
import shutil
import signal
import time
from contextlib import nullcontext, suppress
from pathlib import Path

from lmi.models.folder import Model, ModelFolder
from lmi.runtime import ENVIRONMENT_NAME, Runtime, ServerRuntime
from lmi.settings.user import User
from lmi.shared import processes
from lmi.shared.desired_state import State
from lmi.shared.state import Phase
from lmi.supervisor.child import Child
from lmi.supervisor.restarts import KILL_S
from lmi.supervisor.running_model import RunningModel
from lmi.supervisor.stages import requirements

# A new folder may be without an entry for so long.
ORPHAN_S = 2.0
# For requests that run when their model is unloaded.
UNLOAD_S = 30.0
# For a request that a front end took just before it saw that the model is gone.
NOTICE_S = 0.2

LOST = "its processes are gone, because its entry or its folder was away for a while; load it again"

log = logging.getLogger(__name__)


class ModelFollower:
    """Keeps `models` as the folder says. The supervisor looks at each of them after it."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._runtime = runtime
        self._folder = ModelFolder(runtime)
        self.models: list[PassingModel] = []

    def look(self) -> None:
        """Forget the models that are over, start those that should be there, and note which should
        not.
        """
        self.models[:] = [model for model in self.models if not model.is_over]
        snapshot = self._folder.snapshot()
        entries = snapshot.entries

        by_folder = {entry.folder: entry for entry in entries if entry.state is not State.FAILED}
        for model in self.models:
            model.is_wanted = model.folder in by_folder

        for folder in by_folder.keys() - {model.folder for model in self.models}:
            self._start(by_folder[folder])

        # Without a version, a folder may belong to an entry that cannot be read now.
        if snapshot.version is not None:
            with suppress(OSError):
                self._tidy(entries, num_files=len(snapshot.version))

    def _tidy(self, entries: list[Model], num_files: int) -> None:
        """Remove what is left of loads that were given up before they began here, or whose front
        end died.

        `num_files` is the number of all entries, also of those that do not count.
        """
        if len(entries) < num_files:
            for entry in self._folder.sweep():
                log.info("model %s is not loaded: the front end that loaded it died", entry.name)

        states = {entry.folder: entry.state for entry in entries}
        running = {model.folder for model in self.models}
        for path in self._runtime.path.iterdir():
            folder = path.name
            if not folder.isdecimal() or folder in running:
                continue

            if folder in states:
                is_over = states[folder] is State.FAILED
            else:
                is_over = _is_orphan(path)

            if is_over:
                shutil.rmtree(path, ignore_errors=True)

    def _start(self, entry: Model) -> None:
        """Start the processes of a model, unless its folder is gone or cannot be read."""
        if not self._folder.has_folder(entry):
            # One that is not READY was given up before, which its front end sees.
            is_ready = entry.state is State.READY
            if is_ready and self._folder.lose(entry, LOST):
                log.error("model %s failed: %s", entry.name, LOST)

            return

        try:
            runtime = self._folder.runtime_with_environ(entry)
            # A server of one model has this before there is a model.
            first = requirements(runtime.config, runtime)
            self.models.append(PassingModel(runtime, first=first))
        except Exception:
            # Its folder cannot be read or mapped; without it front ends see that the load failed.
            log.exception("model %s cannot be started", entry.name)
            shutil.rmtree(self._runtime.path / entry.folder, ignore_errors=True)
            return

        log.info("model %s loads from %s", entry.name, entry.url)


def _is_orphan(path: Path) -> bool:
    """Return whether a folder without an entry is too old to be about to get one."""
    try:
        changed_s = path.stat().st_mtime
    except FileNotFoundError:
        # It was removed a moment ago.
        return False

    return changed_s < time.time() - ORPHAN_S


class PassingModel(RunningModel):
    """One of several models, from its load to the end of its processes, when it removes its folder
    for all to see.
    """

    def __init__(self, runtime: Runtime, first: Child | None = None) -> None:
        """Its processes start after the child `first` is done."""
        super().__init__(runtime)
        self.folder = runtime.path.name
        # Whether its entry is there.
        self.is_wanted = True
        # When it ends: its processes, and what they started, also in other sessions.
        self.left: set[int] = set()
        self._started_s = time.monotonic()
        # When its entry was gone.
        self._unwanted_s: float | None = None
        # When its processes were told to end.
        self._ended_s: float | None = None
        for child in self.children:
            child.waits_for = first

        if first is not None:
            self.children.insert(0, first)

        for child in self.children:
            child.name = f"{child.name} of {self.config.model.name}"

    def look(self, now: float) -> None:
        """Take the next step of its life: it is ready, it ends, it is over."""
        if not self.is_wanted and self._unwanted_s is None:
            self._unwanted_s = now
            for child in self.children:
                child.is_retired = True

        if self._ended_s is not None:
            # The system uses the numbers of the others again.
            self.left = self._still_left(self.left)
            if now - self._ended_s >= KILL_S:
                for pid in self.left:
                    processes.send(pid, signal.SIGKILL)

        elif self._unwanted_s is not None:
            if self._may_end(now - self._unwanted_s):
                self._end(now)

        elif self._phase == Phase.LOADING and self.is_ready:
            load_s = now - self._started_s
            log.info("model %s is ready after %.1f s", self.config.model.name, load_s)
            self._enter(Phase.READY)

        if self.is_over:
            for child in self.children:
                child.close()

            self.runtime.remove()
            log.info("model %s is unloaded", self.config.model.name)

    def _may_end(self, unwanted_s: float) -> bool:
        """Return whether no front end has a request for it any more, or UNLOAD_S are over."""
        records = [
            record
            for record in self.block.frontends
            if record.pid and processes.is_alive(record.pid)
        ]
        has_requests = any(record.num_in_flight for record in records)
        is_idle = unwanted_s >= NOTICE_S and not has_requests
        return is_idle or self._phase != Phase.READY or unwanted_s >= UNLOAD_S

    def give_up(self, reason: str, now: float) -> bool:
        """End its processes after a failure. The other models and the server go on."""
        log.error("model %s failed: %s", self.config.model.name, reason)
        self._enter(Phase.FAILED, reason)
        self._end(now)
        return True

    @property
    def is_over(self) -> bool:
        """Whether nothing is left of it: no process, no process that one of its processes started,
        and no entry.
        """
        is_ended = self._ended_s is not None and not any(child.pid for child in self.children)
        return is_ended and self._unwanted_s is not None and not self.left

    def _end(self, now: float) -> None:
        self._ended_s = now
        pids = {child.pid for child in self.children if child.pid is not None}
        self.left = self._still_left(pids)
        for child in self.children:
            child.is_retired = True
            child.send(signal.SIGTERM)

    def _still_left(self, pids: set[int]) -> set[int]:
        """Return which of these processes are left, with what they started and what the model's
        environment shows.
        """
        variable = f"{ENVIRONMENT_NAME}={self.runtime.path}"
        pids = pids.union(processes.descendants(*pids))
        user = self.config.server.user
        return {
            pid
            for pid in processes.descendants(os.getpid())
            if pid in pids or _has_variable(pid, variable, user)
        }


def _has_variable(pid: int, variable: str, user: User | None) -> bool:
    """Return whether a process, perhaps of the user, was started with `NAME=TEXT` in its
    environment.
    """
    environ = Path(f"/proc/{pid}/environ")
    # An OSError: it has ended, or root may not look into it, as in a container.
    with suppress(OSError):
        return variable.encode() in environ.read_bytes().split(b"\0")

    with suppress(OSError), user.acting() if user else nullcontext():
        return variable.encode() in environ.read_bytes().split(b"\0")

    return False
