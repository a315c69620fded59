"""The folder of the models that should be loaded, where several come and go."""

import fcntl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import msgspec

from lmi.adapters.files import register_beside
from lmi.errors import Unavailable
from lmi.runtime import Runtime, ServerRuntime
from lmi.settings.config import Config
from lmi.shared.desired_state import Entry, Folder, State, is_abandoned
from lmi.shared.files import is_there

# So many entries are kept that only say why a load failed.
MAX_FAILED = 64
ENVIRON = "environ.json"


class Model(Entry, frozen=True, kw_only=True):
    """The entry of one model, by which front ends and the supervisor agree whether it is here."""

    # The folder of its processes, below the server's.
    folder: str
    # Where a client says that it is.
    url: str = ""
    # Why it is FAILED.
    reason: str = ""
    # The label of that error.
    cause: str = ""
    # The memory that it needs, while it loads.
    need_bytes: int = 0
    # When its load ended, since the epoch.
    settled_s: float = 0.0


class ModelFolder(Folder[Model]):
    """The models. Its changes are exact however many processes ask at once.

    A front end writes an entry when a client asks for a model, marks it READY when the model can be
    used, and removes it when a client asks for that. The supervisor starts the processes of each
    entry, and ends them when the entry is gone, is FAILED, or its writer died before it was done.
    So the entry says what should be, and the shared block of the model says what is. The supervisor
    changes only what nobody else will: it removes the entry of a writer that died, and marks a
    READY one FAILED whose processes are gone.
    """

    def __init__(self, server: ServerRuntime) -> None:
        super().__init__(server.path / "models", Model)
        self._server = server

    def register(self, name: str, make: Callable[[list[Model]], Model]) -> Model:
        """Write the entry that `make` returns when it gets all entries that are there. Nothing is
        written if it raises.
        """
        registered = self.change(name, lambda old: make(self.entries()))
        assert registered is not None

        failed = [entry for entry in self.entries() if entry.state is State.FAILED]
        failed.sort(key=lambda entry: entry.settled_s)
        for oldest in failed[:-MAX_FAILED]:
            self.withdraw(oldest)

        return registered

    def settle(
        self,
        entry: Model,
        state: State,
        reason: str = "",
        cause: str = "",
        flags: int = fcntl.LOCK_EX,
    ) -> bool:
        """Change the state of an entry. Returns False if it is no longer there."""
        new = msgspec.structs.replace(
            entry, state=state, reason=reason, cause=cause, settled_s=time.time()
        )

        def put(current: Model | None) -> Model | None:
            return new if is_same(current, entry) else current

        return self.change(entry.name, put, flags) is new

    def withdraw(self, entry: Model, flags: int = fcntl.LOCK_EX) -> None:
        """Remove an entry, unless another one has taken its name."""

        def put(current: Model | None) -> Model | None:
            return None if is_same(current, entry) else current

        self.change(entry.name, put, flags)

    def lose(self, entry: Model, reason: str) -> bool:
        """Mark an entry FAILED whose processes are gone, or remove it where the disk has no room to
        say so.

        Never waits for the lock. Returns False if somebody has it, and the caller tries again at
        its next look.
        """
        flags = fcntl.LOCK_EX | fcntl.LOCK_NB
        try:
            return self.settle(entry, State.FAILED, reason, Unavailable.label, flags)
        except BlockingIOError:
            return False
        except OSError:
            with suppress(OSError):
                self.withdraw(entry, flags)
                return True

        return False

    def sweep(self) -> list[Model]:
        """Remove the entries whose writer died before it was done, and return them. Never waits for
        the lock.
        """
        removed = []
        with suppress(OSError), self.lock(fcntl.LOCK_EX | fcntl.LOCK_NB):
            for path in self._path.glob("*.json"):
                entry = self._read(path)
                if entry is not None and is_abandoned(entry):
                    path.unlink(missing_ok=True)
                    removed.append(entry)

        return removed

    def holds(self, entry: Model) -> bool:
        """Return whether the entry is there, perhaps in another state."""
        return is_same(self.read(entry.name), entry)

    def add_folder(self, config: Config) -> Runtime:
        """Make the folder of a model's processes, with the option.env that the supervisor gives
        them.
        """
        runtime = self._server.add_model(config, register_beside)
        (runtime.path / ENVIRON).write_bytes(msgspec.json.encode(config.engine.environ))
        return runtime

    def has_folder(self, entry: Model) -> bool:
        return is_there(self._server.path / entry.folder)

    def runtime_of(self, entry: Model) -> Runtime:
        """Return the folder of a model's processes. Raises OSError if it has just been removed."""
        return Runtime.at(self._server.path / entry.folder)

    def runtime_with_environ(self, entry: Model) -> Runtime:
        """Return the folder of a model's processes as the supervisor starts them, by the server's
        own settings.

        A front end wrote the folder, and the settings of the server say as whom its processes run.
        """
        runtime = self.runtime_of(entry)
        encoded = (runtime.path / ENVIRON).read_bytes()
        environ = msgspec.json.decode(encoded, type=dict[str, str])

        engine = replace(runtime.config.engine, environ=environ)
        config = replace(runtime.config, server=self._server.config, engine=engine)
        return Runtime(runtime.path, config)


def is_same(current: Model | None, entry: Model) -> bool:
    """Return whether an entry is of the same load, perhaps in another state."""
    return current is not None and current.folder == entry.folder
