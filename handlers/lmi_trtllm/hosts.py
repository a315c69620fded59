"""The nodes of an engine that spans several machines, and how mpirun on node 0 reaches the others: over ssh.

Every node has the same private key, `option.ssh_key`. It is the identity of the client and of each server, so both
sides know each other without any other file. This module does not import tensorrt_llm.
"""

from __future__ import annotations

import ipaddress
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from handlers.lmi_trtllm.ranks import num_nodes, num_ranks, num_ranks_on_a_node
from lmi.errors import BadConfiguration, StartError
from lmi.settings.config import EngineConfig

OPTIONS = frozenset({"nnodes", "node_rank", "master_addr", "master_port", "worker_addr_format", "ssh_key"})
DEFAULT_PORT = 2222
CONNECT_S, AGAIN_S = 2.0, 0.5
SSH = """Host *
    Port {port}
    IdentityFile {folder}/key
    IdentitiesOnly yes
    BatchMode yes
    ConnectTimeout 10
    StrictHostKeyChecking yes
    UserKnownHostsFile {folder}/known_hosts
    LogLevel ERROR
"""
SSHD = """Port {port}
HostKey {folder}/key
AuthorizedKeysFile {folder}/authorized_keys
AuthenticationMethods publickey
UsePAM no
StrictModes no
PidFile none
PermitRootLogin prohibit-password
AllowTcpForwarding no
AllowAgentForwarding no
X11Forwarding no
LogLevel ERROR
"""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of one engine."""

    rank: int  # of this node
    addresses: tuple[str, ...]  # of all nodes, node 0 first
    port: int  # on which each further node's sshd listens
    key: str  # the path of the private key

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Read a configuration that `faults` does not refuse."""
        options = config.options
        leader = options.get("master_addr", "")
        form = options.get("worker_addr_format") or worker_format(leader)
        further = tuple(form % rank for rank in range(1, num_nodes(config)))
        port = int(options.get("master_port") or DEFAULT_PORT)
        return cls(rank_of(config), (leader, *further), port, options.get("ssh_key", ""))


def rank_of(config: EngineConfig) -> int:
    """The number of this node."""
    text = config.options.get("node_rank", "")
    return int(text) if text.isdecimal() else 0


def worker_format(leader: str) -> str:
    """Return how a LeaderWorkerSet names the pods of the group that `leader` leads, with %d for a pod's number."""
    name, dot, rest = leader.replace("%", "%%").partition(".")
    return f"{name}-%d{dot}{rest}"


def faults(config: EngineConfig) -> Mapping[str, str]:
    """Return each option that several nodes cannot run with, and the values that are allowed."""
    nodes, options = num_nodes(config), config.options
    if not (options.get("nnodes") or "1").isdecimal():
        return {"option.nnodes": "a whole number"}
    if nodes == 1:
        return {}
    found = _own_faults(options, nodes)
    if num_ranks(config) % nodes:
        found["option.tensor_parallel_degree"] = f"a number of ranks that {nodes} nodes divide evenly (option.nnodes)"
    if config.num_engines > 1:
        found["maxWorkers"] = "1 where the engine spans several nodes"
    return found | _address_faults(options)


def _own_faults(options: Mapping[str, str], nodes: int) -> dict[str, str]:
    found = {}
    rank, port = options.get("node_rank", "0"), options.get("master_port") or str(DEFAULT_PORT)
    if not rank.isdecimal() or int(rank) >= nodes:
        found["option.node_rank"] = f"0 to {nodes - 1}"
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        found["option.master_port"] = "1 to 65535"
    if not options.get("ssh_key"):
        found["option.ssh_key"] = "the path of a private key that every node has, with which mpirun reaches the nodes"
    return found


def _address_faults(options: Mapping[str, str]) -> dict[str, str]:
    leader, form = options.get("master_addr", ""), options.get("worker_addr_format", "")
    if not leader:
        return {"option.master_addr": "the address of node 0"}
    if form and form.count("%") + form.count("%d") != 2:
        return {"option.worker_addr_format": "an address with one %d, which stands for the number of a node"}
    with suppress(ValueError):
        if not form and ipaddress.ip_address(leader):
            return {
                "option.worker_addr_format": "the form of the other nodes' addresses, with %d, as node 0 has no name"
            }
    return {}


def options(config: EngineConfig, folder: Path, beat: Callable[[], None]) -> list[str]:
    """Return mpirun's options, once every node takes connections. Files for ssh go to `folder`.

    Raises StartError that names the nodes which are missing when nine tenths of the time for a start are over.
    """
    nodes, each = Nodes.of(config), num_ranks_on_a_node(config)
    write_identity(nodes, folder)
    (folder / "config").write_text(SSH.format(port=nodes.port, folder=folder))
    wait_for(nodes, time.monotonic() + 0.9 * config.model_loading_timeout_s, beat)
    places = ",".join(f"{address}:{each}" for address in ("localhost", *nodes.addresses[1:]))
    # A node that is lost without a word is noticed after some twenty seconds; the default is minutes.
    keep_alive = ("oob_tcp_keepalive_time", "10", "oob_tcp_keepalive_intvl", "5", "oob_tcp_keepalive_probes", "2")
    pairs = ("plm_rsh_args", f"-F {folder}/config", *keep_alive)
    mca = [word for name, value in zip(pairs[::2], pairs[1::2], strict=True) for word in ("--mca", name, value)]
    return ["--host", places, *mca]


def write_identity(nodes: Nodes, folder: Path) -> None:
    """Write the key and what each side must know of the other into `folder`. Raises BadConfiguration for a bad key."""
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        key = Path(nodes.key).read_bytes()
    except OSError as error:
        raise BadConfiguration(f"option.ssh_key={nodes.key}: {error.strerror}") from error
    (folder / "key").touch(0o600)  # ssh refuses a key that others may read, as those of a Kubernetes secret
    (folder / "key").write_bytes(key)
    public = subprocess.run(
        [found("ssh-keygen"), "-y", "-P", "", "-f", str(folder / "key")], capture_output=True, text=True, check=False
    )
    if public.returncode != 0:
        raise BadConfiguration(f"option.ssh_key={nodes.key} is not a private key without a password")
    (folder / "authorized_keys").write_text(public.stdout)
    (folder / "known_hosts").write_text(f"* {public.stdout}")


def wait_for(nodes: Nodes, deadline_s: float, beat: Callable[[], None]) -> None:
    """Wait until each further node takes connections. Raises StartError that names those that do not."""
    missing = list(nodes.addresses[1:])
    while missing := [address for address in missing if not answers(address, nodes.port)]:
        beat()
        if time.monotonic() > deadline_s:
            raise StartError(f"nodes that do not answer on port {nodes.port}: {', '.join(missing)}")
        time.sleep(AGAIN_S)


def answers(address: str, port: int) -> bool:
    """Return whether a server listens there."""
    with suppress(OSError), socket.create_connection((address, port), CONNECT_S):
        return True
    return False


def found(program: str, folders: Sequence[str] = ()) -> str:
    """Return the path of a program in PATH or `folders`. Raises BadConfiguration if it is not installed."""
    path = shutil.which(program) or shutil.which(program, path=":".join(folders))
    if path is None:
        raise BadConfiguration(f"an engine with several ranks needs {program}, which is not installed here")
    return path
