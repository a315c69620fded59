"""A start that fails before there is a child. Whole servers are tested in tests/system/test_processes.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CANNOT_MAP = """
import errno, sys
from types import SimpleNamespace
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.settings.report import Resolved
from lmi.shared.state import Block
from lmi.supervisor import supervisor

def attach(path, *num_records):
    raise OSError(errno.ENOMEM, "Cannot allocate memory")

Block.attach = attach
server = ServerConfig(host="127.0.0.1", port=0, log_format="json")
config = Config(server=server, model=ModelConfig(path="/m", name="m"), engine=EngineConfig())
sys.exit(supervisor.run(Resolved(config), lambda fetched: Resolved(config)))
"""


def test_a_start_that_cannot_map_the_shared_block_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", CANNOT_MAP]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert "AttributeError" not in done.stderr
    words = json.loads(done.stderr)
    assert done.returncode == words["code"] == 1
    assert words["event"] == "failed" and "Cannot allocate memory" in words["message"]
    assert list(tmp_path.iterdir()) == []
