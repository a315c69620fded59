"""The folder that the processes of one running server share.

The supervisor makes it with mode 0700, and children find it through one environment variable. It holds:

    config.json         the resolved settings, without option.env
    state               the shared block
    engine-N.sock       the socket of an engine
    code-N.sock         the socket of a process of user code
    engine-N.json       the report of a loaded engine, for the banner
    front-end-failure   why a front end cannot start
    adapters/H/H.json   an adapter that should be loaded; the H are hashes of the model's name and the adapter's
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from lmi.errors import StartError
from lmi.settings.config import Config, dump, load
from lmi.shared.desired_state import Adapter, Folder, State, key
from lmi.shared.state import Block, EngineRecord

ENVIRONMENT_NAME = "LMI_RUNTIME_DIR"


@dataclass(frozen=True, slots=True)
class Runtime:
    path: Path
    config: Config

    @classmethod
    def create(cls, config: Config) -> Runtime:
        """Make the folder. Raises StartError if it cannot be written, as on a full disk."""
        try:
            runtime = cls(Path(tempfile.mkdtemp(prefix="lmi-")), config)
        except OSError as error:
            raise StartError(f"no folder for temporary files (TMPDIR) can be written to: {error.strerror}") from error
        try:
            (runtime.path / "config.json").write_bytes(dump(_without_environ(config)))
            Block.create(runtime.path / "state", *runtime._num_records())
            runtime._register_adapters()
        except OSError as error:
            runtime.remove()
            raise StartError(f"{runtime.path} (TMPDIR chooses another place): {error.strerror}") from error
        return runtime

    @classmethod
    def from_environ(cls) -> Runtime:
        path = Path(os.environ[ENVIRONMENT_NAME])
        return cls(path, load((path / "config.json").read_bytes()))

    def attach(self) -> Block:
        """Map the shared block into this process."""
        return Block.attach(self.path / "state", *self._num_records())

    def _num_records(self) -> tuple[int, int, int]:
        return self.config.engine.num_engines, self.num_front_end_slots, self.config.num_formatters

    def user_code_records(self, block: Block) -> list[EngineRecord]:
        """Return the records of the processes that run user code, which are the engines' if it is the model."""
        return block.engines if self.config.is_user_code else block.formatters

    def user_code_socket(self, slot: int) -> str:
        return str(self.path / f"code-{slot}.sock")

    @property
    def num_front_end_slots(self) -> int:
        """Twice the workers, because those of a master that died finish their streams while the next ones start."""
        return 2 * self.config.server.frontend_workers

    def engine_socket(self, slot: int) -> str:
        return str(self.path / f"engine-{slot}.sock")

    def engine_report(self, slot: int) -> Path:
        return self.path / f"engine-{slot}.json"

    def adapters(self) -> Folder[Adapter]:
        """Return the folder of the model's adapters that should be loaded."""
        return Folder(self.path / "adapters" / key(self.config.model.name), Adapter)

    def _register_adapters(self) -> None:
        """Register the adapters beside the model, which every engine loads before it is ready."""
        folder = self.adapters()
        for name, path in self.config.model.adapters.items():
            folder.add(Adapter(name=name, path=path, src=path, is_static=True, state=State.READY))

    def front_end_failure(self) -> Path:
        return self.path / "front-end-failure"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _without_environ(config: Config) -> Config:
    """Remove option.env. Its processes have it in their environment, and a front end that reads the file needs none."""
    return replace(config, engine=replace(config.engine, environ={}))
