"""The command and the environment of an engine with several ranks, and the nodes of one that spans several machines."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from handlers.lmi_trtllm import hosts
from handlers.lmi_trtllm.about import HANDLER
from handlers.lmi_trtllm.hosts import Nodes
from handlers.lmi_trtllm.multinode import Follower
from lmi.errors import BadConfiguration, StartError, Unavailable
from lmi.executor import Request
from lmi.settings.config import EngineConfig
from tests.handlers.trtllm.mpi import write_launcher, write_mpirun, write_ssh
from tests.system.container import free_port

ENGINE = [sys.executable, "-P", "-m", "lmi.engine.worker", "--slot", "1"]


def config(**options: str) -> EngineConfig:
    return EngineConfig(handler="trtllm", tensor_parallel_degree=4, pipeline_parallel_degree=2, options=options)


def nodes(num: int = 2, rank: int = 0, leader: str = "lmi-0.lmi.ns", **options: str) -> EngineConfig:
    return config(nnodes=str(num), node_rank=str(rank), master_addr=leader, **{"ssh_key": "/keys/id", **options})


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    write_launcher(folder)
    write_mpirun(folder)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    path.chmod(0o644)  # as Kubernetes mounts a secret
    return str(path)


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def command(one: EngineConfig, folder: Path, own: list[str] = ENGINE) -> Sequence[str]:
    launcher = HANDLER.launcher(one)
    assert launcher is not None
    return launcher(own, folder, lambda: None)


def test_only_an_engine_with_several_ranks_is_started_by_another_program() -> None:
    assert HANDLER.launcher(EngineConfig()) is None
    assert HANDLER.launcher(nodes(rank=1)) is None, "node 0 starts the ranks of the others"
    assert HANDLER.launcher(config()) is not None


def test_mpirun_starts_every_rank_under_the_launcher_without_binding_it_to_cores(
    programs: Path, tmp_path: Path
) -> None:
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "16"]
    words = [f"{programs}/mpirun", *options, f"{programs}/trtllm-llmapi-launch", *ENGINE]
    assert command(config(context_parallel_size="2"), tmp_path) == words


@pytest.mark.parametrize("word", ["/a path/python", "/opt/python*", "", "[x]"])
def test_words_that_the_launcher_would_change_are_refused(programs: Path, tmp_path: Path, word: str) -> None:
    with pytest.raises(BadConfiguration, match="trtllm-llmapi-launch splits words"):
        command(config(), tmp_path, [word])


def test_a_missing_launcher_is_named(programs: Path, tmp_path: Path) -> None:
    (programs / "trtllm-llmapi-launch").unlink()
    with pytest.raises(BadConfiguration, match="needs trtllm-llmapi-launch, which is not installed here"):
        command(config(), tmp_path)


def test_ranks_see_the_gpus_of_their_engine_and_use_no_network_on_one_machine() -> None:
    two = EngineConfig(tensor_parallel_degree=2, num_engines=2, device_ids=("4", "5", "6", "7"))
    variables = HANDLER.environment(two, {"OMPI_MCA_oob_tcp_if_include": "eth0"}, 1, "")
    assert variables["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert variables["OMPI_MCA_btl_tcp_if_include"] == "lo"
    assert "OMPI_MCA_oob_tcp_if_include" not in variables, "the operator's value counts"
    assert not [name for name in HANDLER.environment(nodes(), {}, 0, "") if "tcp_if_include" in name]


@pytest.mark.parametrize(
    ("leader", "options", "further"),
    [
        ("lmi-0.lmi.ns", {}, "lmi-0-1.lmi.ns"),  # as a LeaderWorkerSet names its pods
        ("lmi-0", {}, "lmi-0-1"),
        ("10.0.0.1", {"worker_addr_format": "10.0.0.1%d"}, "10.0.0.11"),
    ],
)
def test_the_addresses_of_further_nodes_follow_from_that_of_node_0(
    leader: str, options: dict[str, str], further: str
) -> None:
    found = Nodes.of(nodes(leader=leader, **options))
    assert (found.addresses, found.port) == ((leader, further), hosts.DEFAULT_PORT)


@pytest.mark.parametrize(
    ("wrong", "key", "allowed"),
    [
        (nodes(3), "option.tensor_parallel_degree", "a number of ranks that 3 nodes divide evenly"),
        (nodes(rank=2), "option.node_rank", "0 to 1"),
        (nodes(master_port="ssh"), "option.master_port", "1 to 65535"),
        (config(nnodes="two"), "option.nnodes", "a whole number"),
        (nodes(ssh_key=""), "option.ssh_key", "a private key that every node has"),
        (nodes(leader=""), "option.master_addr", "the address of node 0"),
        (nodes(leader="10.0.0.1"), "option.worker_addr_format", "as node 0 has no name"),
        (nodes(worker_addr_format="node-%s"), "option.worker_addr_format", "with one %d"),
    ],
)
def test_nodes_that_cannot_work_together_are_refused_with_the_reason(
    wrong: EngineConfig, key: str, allowed: str
) -> None:
    faults = HANDLER.check(wrong)
    assert list(faults) == [key] and allowed in faults[key]
    assert HANDLER.check(nodes()) == {}


@needs_ssh
def test_mpirun_places_the_ranks_when_every_node_answers(
    programs: Path, key: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    one = nodes(ssh_key=key, worker_addr_format="127.0.0.%d", master_port=str(port))
    words = command(one, tmp_path)
    assert words[words.index("--host") + 1] == "localhost:4,127.0.0.1:4"
    exported = [name for option, name in zip(words, words[1:], strict=False) if option == "-x"]
    assert {"PATH", "NCCL_DEBUG"} <= set(exported)
    folder = tmp_path / "ssh"
    assert words[words.index("plm_rsh_args") + 1] == f"-F {folder}/config"
    seen = subprocess.run(["ssh", "-F", f"{folder}/config", "-G", "node"], capture_output=True, text=True, check=True)
    assert {f"port {port}", f"identityfile {folder}/key", "stricthostkeychecking true"} <= set(seen.stdout.splitlines())
    assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600
    assert (folder / "known_hosts").read_text().startswith("* ssh-ed25519 ")


@needs_ssh
def test_a_node_that_does_not_answer_is_named_when_the_time_is_over(key: str, port: int, tmp_path: Path) -> None:
    beats: list[float] = []
    far = Nodes(0, ("localhost", "127.0.0.1", "node.invalid"), port, key)
    with pytest.raises(StartError, match=f"nodes that do not answer on port {port}: node.invalid$"):
        hosts.wait_for(far, time.monotonic() + 0.1, lambda: beats.append(time.monotonic()))
    assert beats, "the wait is shown as progress"


@needs_ssh
def test_a_file_that_is_no_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("hello\n")
    with pytest.raises(BadConfiguration, match="is not a private key without a password"):
        hosts.write_identity(Nodes(0, ("a",), 1, str(tmp_path / "id")), tmp_path / "ssh")
    with pytest.raises(BadConfiguration, match="ssh_key=/nowhere: No such file"):
        hosts.write_identity(Nodes(0, ("a",), 1, "/nowhere"), tmp_path / "ssh")


@needs_ssh
def test_a_further_node_serves_ssh_and_refuses_requests(programs: Path, key: str, tmp_path: Path) -> None:
    write_ssh(programs, tmp_path / "seen")
    (tmp_path / "config.json").write_text('{"vocab_size": 9, "max_position_embeddings": 64}')
    one = nodes(rank=1, ssh_key=key, master_port=str(free_port()))
    with Follower(str(tmp_path), one, lambda stage, share: None) as follower:
        assert follower.can_enqueue_requests() and follower.await_responses(timeout_s=0) == []
        with pytest.raises(Unavailable, match="node 1 of 2 and takes no requests; node 0, lmi-0.lmi.ns, does"):
            follower.enqueue_request(Request(input_token_ids=(1,), max_tokens=1))
        seen = (tmp_path / "seen").read_text()
        assert "AuthenticationMethods publickey\n" in seen and f'"PATH={os.environ["PATH"]}"' in seen
        folder = Path(seen.split("HostKey ")[1].split("/key")[0])
        assert (folder / "key").read_bytes() == Path(key).read_bytes()
        follower._sshd.kill()
        follower._sshd.wait(60)
        assert not follower.can_enqueue_requests(), "the supervisor then starts it again"
    assert not folder.exists(), "the key is not left"


@needs_ssh
def test_an_sshd_that_ends_is_explained(programs: Path, key: str, tmp_path: Path) -> None:
    (programs / "sshd").write_text("#!/bin/sh\necho 'Missing privilege separation directory' >&2; exit 255\n")
    (programs / "sshd").chmod(0o755)
    with pytest.raises(StartError, match="sshd does not listen on port .*: Missing privilege separation directory"):
        Follower(str(tmp_path), nodes(rank=1, ssh_key=key, master_port="1"), lambda stage, share: None)
