"""The folders that the processes of one running server share: the server's, and in it one for each
model.

Only the server's users can open them. Front ends find the first and engines the second through one
environment variable. Each holds the settings as JSON and a block of the records of the processes
that have these settings.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import msgspec

from lmi.errors import StartError
from lmi.settings.config import Config, ServerConfig
from lmi.shared.files import write_whole
from lmi.shared.state import Block

ENVIRONMENT_NAME = "LMI_RUNTIME_DIR"
URL = "url"
MODEL = "model"

C = TypeVar("C", Config, ServerConfig)


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a loaded engine that the supervisor shows to people."""

    engine: str
    device: str = ""
    dtype: str = ""
    # What computes, where the engine has a choice.
    kernels: str = ""
    # In tokens. None for user code, whose limit is not known.
    max_sequence_length: int | None = None
    max_num_sequences: int = 1
    # Whether it gives embeddings, and no text.
    gives_embeddings: bool = False
    # The seconds of each stage, in order.
    stages_s: dict[str, float]


class RuntimeFolder(msgspec.Struct, Generic[C], frozen=True):
    """A folder with settings, and with a block of the records of the processes that have these
    settings.
    """

    path: Path
    config: C
    kind: ClassVar[type[Any]]
    # The name of the file of settings.
    settings: ClassVar[str]

    @classmethod
    def create(
        cls,
        config: C,
        path: Path | None = None,
        prepare: Callable[[Self], None] = lambda runtime: None,
    ) -> Self:
        """Fill an empty folder, or a new one. Raises StartError if it cannot be written, as on a
        full disk.
        """
        try:
            runtime = cls(path or Path(tempfile.mkdtemp(prefix="lmi-")), config)
        except OSError as error:
            raise StartError(
                f"no folder for temporary files (TMPDIR) can be written to: {error.strerror}"
            ) from error

        try:
            runtime._fill()
            prepare(runtime)
            runtime._share()
        except OSError as error:
            runtime.remove()
            raise cannot_write(runtime.path, error) from error

        return runtime

    @classmethod
    def from_environ(cls) -> Self:
        return cls.at(Path(os.environ[ENVIRONMENT_NAME]))

    @classmethod
    def at(cls, path: Path) -> Self:
        return cls(path, msgspec.json.decode((path / cls.settings).read_bytes(), type=cls.kind))

    def attach(self) -> Block:
        """Map the shared block into this process. Raises StartError."""
        state = self.path / "state"
        try:
            return Block.attach(state)
        except OSError as error:
            raise StartError(f"{state} cannot be mapped into memory: {error.strerror}") from error

    def _share(self) -> None:
        """Let the user of front ends write all but the settings, and remove only what that user
        made.
        """
        server = self.config.server if isinstance(self.config, Config) else self.config
        user = server.user
        if user is None or os.geteuid() != 0:
            return

        for path in (*self.path.rglob("*"), self.path):
            if path.is_dir():
                mode = 0o770
            elif path.name == self.settings:
                mode = 0o640
            else:
                mode = 0o660

            os.chown(path, -1, user.gid)
            path.chmod(mode)

        self.path.chmod(0o1770)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _fill(self) -> None:
        """Write the settings and make the block."""
        raise NotImplementedError


class ServerRuntime(RuntimeFolder[ServerConfig], frozen=True):
    kind = ServerConfig
    settings = "server.json"

    def _fill(self) -> None:
        (self.path / self.settings).write_bytes(msgspec.json.encode(self.config))
        Block.create(self.path / "state", 0, _num_front_end_slots(self.config))

    @contextmanager
    def running(self, url: str) -> Iterator[None]:
        """Show that the server of this folder runs, and where. The kernel frees the lock, even
        after SIGKILL.
        """
        new = self.path / f"{URL}.new"
        with open(new, "w+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(url)
            file.flush()
            # No other server sees it without its lock.
            new.rename(self.path / URL)
            yield

    def front_end_failure(self) -> Path:
        return self.path / "front-end-failure"

    def gateway_key(self) -> Path:
        """Return the file with the digest of the key that this server's gateway sends."""
        return self.path / "gateway-key"

    def fetches(self) -> Path:
        """Return the folder of the sources that front ends wait for. It may not be there yet."""
        return self.path / "fetches"

    def show_model(self, model: Runtime) -> None:
        """Let front ends find the model that this server was started for. Raises StartError if the
        disk is full.
        """
        try:
            write_whole(self.path / MODEL, model.path.name.encode())
        except OSError as error:
            raise cannot_write(self.path / MODEL, error) from error

    def shown_model(self) -> Runtime | None:
        """Return the model that this server was started for, or None while it is not here. Raises
        StartError.
        """
        try:
            name = (self.path / MODEL).read_text()
        except FileNotFoundError:
            return None

        try:
            return Runtime.at(self.path / name)
        except OSError as error:
            raise StartError(f"{error.filename} cannot be read: {error.strerror}") from error

    def add_model(
        self, config: Config, prepare: Callable[[Runtime], None] = lambda model: None
    ) -> Runtime:
        """Make the folder of a model, where `prepare` writes too. Raises StartError if it cannot be
        written.
        """
        for number in count(1):
            path = self.path / str(number)
            try:
                path.mkdir()
            except FileExistsError:
                continue
            except OSError as error:
                raise cannot_write(path, error) from error

            return Runtime.create(config, path, prepare)

        raise AssertionError("count never ends")


class Runtime(RuntimeFolder[Config], frozen=True):
    """The folder of one model's processes."""

    kind = Config
    settings = "config.json"

    def engine_socket(self, slot: int) -> str:
        return str(self.path / f"engine-{slot}.sock")

    def write_report(self, slot: int, report: LoadReport) -> None:
        path = self.path / f"engine-{slot}.json"
        # An earlier process of this slot may have written it, perhaps before the disk was full.
        if not path.exists():
            write_whole(path, msgspec.json.encode(report))

    def read_report(self, slot: int) -> LoadReport:
        path = self.path / f"engine-{slot}.json"
        return msgspec.json.decode(path.read_bytes(), type=LoadReport)

    @property
    def sessions_path(self) -> Path:
        return Path(self.config.server.sessions_path or self.path / "sessions")

    def _fill(self) -> None:
        """Write the settings without option.env, which only the model's processes need, in their
        environment.
        """
        config = self.config
        bare = replace(config, engine=replace(config.engine, environ={}))
        (self.path / self.settings).write_bytes(msgspec.json.encode(bare))
        num_frontends = _num_front_end_slots(config.server)
        Block.create(
            self.path / "state", config.engine.num_engines, num_frontends, config.num_formatters
        )


def _num_front_end_slots(config: ServerConfig) -> int:
    """Twice the workers, because those of a master that died finish their streams while the next
    ones start.
    """
    return 2 * config.frontend_workers


def cannot_write(path: Path, error: OSError) -> StartError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return StartError(
            f"{path}: {error.strerror}: a process has at most {limit} (`ulimit -n`, RLIMIT_NOFILE)"
        )

    return StartError(f"{path} (TMPDIR chooses another place): {error.strerror}")
