"""Runs the models that the folder of desired state says there should be.

The supervisor compares the folder with the models that run at each turn of its loop. It only reads, so it waits for
nobody. The model that a server is started for is one of them, which the supervisor itself adds and which stays.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress

from lmi.models.folder import ModelFolder
from lmi.runtime import MODELS, ServerRuntime
from lmi.shared.desired_state import Model, State
from lmi.supervisor.model import RunningModel
from lmi.supervisor.stages import requirements

ORPHAN_S = 2.0  # that a new folder may be without an entry

log = logging.getLogger(__name__)


class RunningModels:
    """Every model of the server, by its folder."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._runtime = runtime
        self._folder = ModelFolder(runtime.path / MODELS, Model)
        self._models: dict[str, RunningModel] = {}

    def __iter__(self) -> Iterator[RunningModel]:
        return iter(list(self._models.values()))

    def add(self, model: RunningModel) -> None:
        """Run the model that the server was started for, and tell the front ends that it is here."""
        self._models[model.runtime.path.name] = model
        self._folder.add(model.entry())

    def look(self, now: float) -> None:
        """Start the models that should be there, end those that should not, and note which are ready."""
        with suppress(OSError):  # a folder that cannot be read now, as without a descriptor for it, changes nothing
            entries = self._folder.entries()
            wanted = {entry.folder: entry for entry in entries if entry.state is not State.FAILED}
            for folder in wanted.keys() - self._models.keys():
                self._start(wanted[folder])
            for folder, model in list(self._models.items()):
                model.look(now, is_wanted=folder in wanted or model.ends_server)
                if model.is_over:
                    model.close()
                    del self._models[folder]
            self._tidy(entries)

    def _tidy(self, entries: list[Model]) -> None:
        """Remove what is left of loads that were given up before they began here, or whose front end died."""
        if len(entries) < len(self._folder.version()):
            for entry in self._folder.sweep():
                log.info("model %s is not loaded: the front end that loaded it died", entry.name)
        states = {entry.folder: entry.state for entry in entries}
        for path in self._runtime.path.iterdir():
            folder = path.name
            with suppress(FileNotFoundError):  # removed a moment ago
                if folder.isdecimal() and folder not in self._models:
                    is_given_up = folder not in states and time.time() - path.stat().st_mtime > ORPHAN_S
                    if is_given_up or states.get(folder) is State.FAILED:
                        self._discard(folder)

    def _discard(self, folder: str) -> None:
        shutil.rmtree(self._runtime.path / folder, ignore_errors=True)

    def _start(self, entry: Model) -> None:
        if not self._runtime.has_folder(entry):  # it was given up before
            return
        try:
            runtime = self._runtime.model(entry).with_environ()
            first = requirements(runtime.config, runtime)  # which a server of one model has before there is a model
            self._models[entry.folder] = RunningModel(runtime, first=first)
        except Exception:  # its folder cannot be read or mapped; without it front ends see that the load failed
            log.exception("model %s cannot be started", entry.name)
            self._discard(entry.folder)
            return
        log.info("model %s loads from %s", entry.name, entry.url)
