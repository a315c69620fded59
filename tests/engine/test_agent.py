"""An engine process that mpirun starts, with Open MPI where it is installed, and with a stand-in for it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lmi.engine.agent import received
from lmi.runtime import ENVIRONMENT_NAME, Runtime
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.shared.state import EngineRecord
from tests.handlers.trtllm.mpi import write_launcher, write_mpirun
from tests.system.container import wait_until

pytestmark = pytest.mark.timeout(300)

NUM_RANKS = 3
OPEN_MPI = shutil.which("mpirun")
ENGINE = """
import os, signal, sys, time
def stop(*_):
    print("drained", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR2, lambda *_: print("stacks", flush=True))
OF_MPI = any(name.startswith(("MPI", "OMPI_", "PMI")) for name in os.environ)
os.write(int(os.environ["LMI_LOG_FD"]), b"a line of the log\\n")
print("cwd", os.getcwd(), "ranks", os.environ["tllm_mpi_size"], OF_MPI, flush=True)
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
while True:
    time.sleep(0.05)
"""


@dataclass
class Agent:
    """An agent and what it has started, which all inherit a mark."""

    folder: Path
    runtime: Runtime
    path: str
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self, *engine_words: str, slot: int = 0) -> subprocess.Popen[bytes]:
        (self.folder / "engine.py").write_text(ENGINE)
        words = [sys.executable, "-P", "-m", "lmi.engine.agent", "--slot", str(slot), "--"]
        words += [sys.executable, str(self.folder / "engine.py")]
        environ = {**os.environ, ENVIRONMENT_NAME: str(self.runtime.path), "PATH": self.path, "MARK": self.mark}
        with self.output.open("wb") as output, self.log.open("wb") as log:
            fd = os.dup(log.fileno())
            try:
                return subprocess.Popen(
                    [*words, *engine_words],
                    env={**environ, "LMI_LOG_FD": str(fd)},
                    stdout=output,
                    stderr=output,
                    pass_fds=[fd],
                    start_new_session=True,
                    cwd=self.folder,
                )
            finally:
                os.close(fd)

    @property
    def output(self) -> Path:
        return self.folder / "output"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def record(self) -> EngineRecord:
        return self.runtime.attach().engines[0]

    def pids(self, part: str = "") -> list[int]:
        """The processes whose command has `part`, but those that have ended."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_ours = f"MARK={self.mark}".encode() in (path / "environ").read_bytes()
                if is_ours and part in (path / "cmdline").read_text().replace("\0", " "):
                    found.append(int(path.name))
        return found

    def engine(self) -> int:
        """The engine process, once it runs."""
        wait_until(lambda: "cwd" in self.output.read_text(), "the engine runs")
        wait_until(lambda: len(self.pids("/bin/sleep")) == NUM_RANKS, "every rank runs")
        [pid] = [pid for pid in self.pids(f"{sys.executable} {self.folder}/engine.py") if pid not in self._others()]
        return pid

    def _others(self) -> list[int]:
        return [*self.pids("far_end"), *self.pids("lmi.engine.agent"), *self.pids("trtllm-llmapi-launch")]


@pytest.fixture(
    params=["stand-in", pytest.param("open mpi", marks=pytest.mark.skipif(not OPEN_MPI, reason="no mpirun"))]
)
def agent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Agent]:
    programs, folder = tmp_path / "bin", tmp_path / "runtime"
    programs.mkdir()
    folder.mkdir()
    write_launcher(programs)
    if request.param == "stand-in":
        write_mpirun(programs)
    model = ModelConfig(path=str(tmp_path), name="m")
    engine = EngineConfig(handler="trtllm", tensor_parallel_degree=NUM_RANKS, num_engines=2, device_ids=("4", "5", "6"))
    config = Config(server=ServerConfig(log_format="json"), model=model, engine=engine)
    agent = Agent(tmp_path, Runtime.create(config, folder), f"{programs}:{os.environ['PATH']}")
    yield agent
    left = agent.pids()
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, "every test ends with no process left"


def test_the_agent_ends_as_its_engine_ends(agent: Agent) -> None:
    process = agent.start("4")
    assert process.wait(60) == 4
    assert agent.output.read_text().startswith(f"cwd {agent.folder} ranks {NUM_RANKS} False\n")
    assert agent.log.read_text() == "a line of the log\n"


def test_the_death_of_the_engine_is_that_of_the_agent(agent: Agent) -> None:
    process = agent.start()
    os.kill(agent.engine(), signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL


def test_only_the_engine_gets_the_signals_and_it_ends_in_its_time(agent: Agent) -> None:
    process = agent.start()
    agent.engine()
    process.send_signal(signal.SIGUSR2)
    wait_until(lambda: "stacks" in agent.output.read_text(), "the engine writes its stacks")
    process.terminate()
    assert process.wait(60) == 0
    assert agent.output.read_text().count("drained") == 1


def test_a_signal_that_came_too_late_does_not_hide_how_the_engine_ended() -> None:
    ours, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, far:
        ours.setblocking(False)
        assert received(ours) is None
        ours.send(bytes([signal.SIGTERM]))
        far.send(b"7")
        far.close()
        assert [received(ours), received(ours)] == [b"7", b""]


@pytest.mark.parametrize("part", ["/bin/sleep", "mpirun"])
def test_a_rank_or_mpirun_that_dies_ends_the_engine(agent: Agent, part: str) -> None:
    process = agent.start()
    agent.engine()
    found = [pid for pid in agent.pids(part) if pid != process.pid]
    victims = found if part == "/bin/sleep" else [pid for pid in found if os.getsid(pid) == pid]
    os.kill(victims[-1], signal.SIGKILL)
    assert process.wait(60) == 1
    assert re.fullmatch("mpirun .* while the engine ran", agent.record.reason)
    assert "drained" not in agent.output.read_text(), "an engine without ranks has nothing to finish"


def test_what_a_killed_agent_leaves_is_killed(agent: Agent) -> None:
    process = agent.start()
    agent.engine()
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    wait_until(lambda: not agent.pids(), "no process is left")


def test_engines_are_launched_one_after_another(agent: Agent) -> None:
    first = agent.start()
    agent.engine()
    second = agent.start(slot=1)
    records = agent.runtime.attach().engines
    wait_until(lambda: records[1].stage == "turn", "the second one is there")
    assert len(agent.pids("/bin/sleep")) == NUM_RANKS
    records[0].stage = "weights"
    wait_until(lambda: len(agent.pids("/bin/sleep")) == 2 * NUM_RANKS, "it is launched while the first one loads")
    first.terminate()
    second.terminate()
    assert first.wait(60) == 0
    second.wait(60)
