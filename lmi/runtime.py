"""The folder that the processes of one running server share.

Made by the supervisor with mode 0700: `config.json` (the resolved settings), `state` (the shared block) and one
`engine-N.sock` for each engine. Children find it through one environment variable.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lmi.config import Config, dump, load
from lmi.state import Block

ENVIRONMENT_NAME = "LMI_RUNTIME_DIR"


@dataclass(frozen=True, slots=True)
class Runtime:
    path: Path
    config: Config

    @classmethod
    def create(cls, config: Config) -> Runtime:
        path = Path(tempfile.mkdtemp(prefix="lmi-"))
        (path / "config.json").write_bytes(dump(config))
        Block.create(path / "state", config.engine.num_engines, config.server.frontend_workers)
        return cls(path, config)

    @classmethod
    def from_environ(cls) -> Runtime:
        path = Path(os.environ[ENVIRONMENT_NAME])
        return cls(path, load((path / "config.json").read_bytes()))

    def attach(self) -> Block:
        """Map the shared block into this process."""
        return Block.attach(self.path / "state", self.config.engine.num_engines, self.config.server.frontend_workers)

    def engine_socket(self, slot: int) -> str:
        return str(self.path / f"engine-{slot}.sock")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
