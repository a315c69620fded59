"""A further node of an engine that spans several machines: an sshd, over which mpirun on node 0 starts ranks.

The ranks begin and end with the engine on node 0. This module does not import tensorrt_llm.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from handlers.base.follower import Follower as BaseFollower
from handlers.lmi_trtllm.hosts import SSHD, Nodes, answers, found, write_identity
from lmi.errors import StartError
from lmi.executor import EngineInfo, Progress
from lmi.settings.config import EngineConfig
from lmi.shared import linux

START_S = 30.0
END_S = 2.0
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")  # to what mpirun starts here; sshd itself passes nothing on

log = logging.getLogger(__name__)


class Follower(BaseFollower):
    """A node whose sshd waits for node 0."""

    def __init__(self, model: str, config: EngineConfig, progress: Progress) -> None:
        progress("sshd", 0.0)
        nodes = Nodes.of(config)
        with ExitStack() as files:
            folder = Path(files.enter_context(tempfile.TemporaryDirectory(prefix="lmi-ssh-")))
            self._sshd = _serve(nodes, folder)
            self._files = files.pop_all()
        log.info("node %d waits for mpirun of node 0, %s", nodes.rank, nodes.addresses[0])
        super().__init__(_info(model, config), nodes.rank, len(nodes.addresses), nodes.addresses[0])

    def can_enqueue_requests(self) -> bool:
        return self._sshd.poll() is None

    def shutdown(self) -> None:
        self._is_closing.set()
        self._sshd.terminate()
        try:
            self._sshd.wait(END_S)
        except subprocess.TimeoutExpired:
            self._sshd.kill()
            self._sshd.wait()
        self._files.close()


def _environment() -> str:
    pairs = [f'"{name}={os.environ[name]}"' for name in PASSED_ON if os.environ.get(name)]
    return f"SetEnv {' '.join(pairs)}\n" if pairs else ""


def _serve(nodes: Nodes, folder: Path) -> subprocess.Popen[bytes]:
    """Start sshd with its files in `folder`. Raises StartError with the last line that it printed."""
    write_identity(nodes, folder)
    (folder / "config").write_text(SSHD.format(port=nodes.port, folder=folder) + _environment())
    path, parent = found("sshd", ["/usr/sbin", "/usr/local/sbin"]), os.getpid()
    with (folder / "log").open("wb") as output:
        sshd = subprocess.Popen(
            [path, "-D", "-e", "-f", str(folder / "config")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=lambda: linux.die_with_parent(parent, signal.SIGKILL),
        )
    if not _listens(sshd, nodes.port):
        sshd.kill()
        sshd.wait()
        lines = (folder / "log").read_text(errors="replace").splitlines()
        raise StartError(f"sshd does not listen on port {nodes.port}: {lines[-1] if lines else 'it says nothing'}")
    return sshd


def _listens(sshd: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until it takes connections. Returns False if it ends before that, or takes too long."""
    deadline_s = time.monotonic() + START_S
    while not answers("localhost", port):
        if sshd.poll() is not None or time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def _info(model: str, config: EngineConfig) -> EngineInfo:
    facts = json.loads(Path(model, "config.json").read_text())
    length = config.max_sequence_length or facts.get("max_position_embeddings", 1)
    return EngineInfo(
        name="trtllm", vocab_size=facts.get("vocab_size", 1), max_sequence_length=length, max_num_sequences=1
    )
