"""Starts that fail. Whole servers are tested in tests/system/test_processes.py."""

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
from lmi.settings.resolve import Resolved
from lmi.shared.state import Block
from lmi.supervisor import supervisor

def attach(path):
    raise OSError(errno.ENOMEM, "Cannot allocate memory")

Block.attach = attach
server = ServerConfig(host="127.0.0.1", port=0, log_format="json")
config = Config(server=server, model=ModelConfig(path="/m", name="m"), engine=EngineConfig())
sys.exit(supervisor.run(Resolved(config), lambda fetched: Resolved(config)))
"""

CANNOT_SETTLE = """
import sys
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.settings.resolve import Resolved
from lmi.sources.fetches import FetchRequest
from lmi.supervisor import supervisor

def settle(fetched):
    raise OSError("stale file handle")

server = ServerConfig(host="127.0.0.1", port=0, log_format="json", frontend_workers=1)
config = Config(server=server, model=ModelConfig(path="/m", name="m"), engine=EngineConfig())
sys.exit(supervisor.run(Resolved(config, request=FetchRequest(sources=())), settle))
"""


def start(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )


def test_a_start_that_cannot_map_the_shared_block_says_so_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    done = start(CANNOT_MAP, tmp_path)
    assert "AttributeError" not in done.stderr
    words = json.loads(done.stderr)
    assert done.returncode == words["code"] == 1
    assert words["event"] == "failed" and "Cannot allocate memory" in words["message"]
    assert list(tmp_path.iterdir()) == []


def test_any_fault_of_the_settings_after_a_download_ends_the_start_with_its_last_words(
    tmp_path: Path,
) -> None:
    done = start(CANNOT_SETTLE, tmp_path)
    words = json.loads(done.stderr.splitlines()[-1])
    assert done.returncode == words["code"] == 1
    assert words["event"] == "failed" and words["message"] == "OSError: stale file handle"
    assert list(tmp_path.iterdir()) == []
