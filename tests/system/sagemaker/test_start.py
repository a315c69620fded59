"""A container as SageMaker starts it: words, port, what its processes know, what it writes and what
it sends.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from tests import machine
from tests.served import launch
from tests.system.container import wait_until, write_model
from tests.system.sagemaker.entry_points import BIN, started
from tests.tiny_models import tiny_model
from tests.wheels import snapshot

CLONE_NEWNET = 0x40000000
NUM_PINGS = 100
SECRETS = {
    "HF_TOKEN": "canary-1",
    "AWS_ACCESS_KEY_ID": "canary-2",
    "AWS_SECRET_ACCESS_KEY": "canary-3",
    "AWS_SESSION_TOKEN": "canary-4",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/canary-5",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://169.254.170.23/canary-6",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN": "canary-7",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/canary-8",
}
FORMATTER = """
from djl_python.output_formatter import output_formatter

@output_formatter
def form(output):
    return "formed"
"""
T = TypeVar("T")


def refused(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A start that must end by itself."""
    command = [str(BIN / "lmi"), *words]
    return subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, timeout=60
    )


# Words and ports.


@pytest.mark.parametrize(
    "words", [[], ["serve"], ["--model-id", "."], ["djl-serving", "-s", "."]], ids=" ".join
)
def test_the_words_of_each_platform_start_a_server_on_the_port_that_sagemaker_gives(
    tmp_path: Path, words: list[str]
) -> None:
    with started(write_model(tmp_path / "model"), words) as server:
        server.wait_ready()
        assert server.generate(3).status == 200


def test_train_is_one_line_with_the_words_that_there_are() -> None:
    done = refused("train")
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert all(word in line for word in ("serve", "djl-serving", "config", "version"))


@pytest.mark.parametrize("port", ["0", "65536", "http"])
def test_a_port_that_is_none_is_named_with_its_variable(tmp_path: Path, port: str) -> None:
    done = refused("serve", str(write_model(tmp_path / "model")), SAGEMAKER_BIND_TO_PORT=port)
    assert done.returncode == 2
    assert "SAGEMAKER_BIND_TO_PORT" in done.stderr and f"'{port}'" in done.stderr
    assert json.loads(done.stderr.splitlines()[-1])["code"] == 2


@pytest.mark.parametrize("given", ["9005", "9005-9000", "0-9"])
def test_a_safe_range_that_is_none_is_named_with_its_variable(tmp_path: Path, given: str) -> None:
    done = refused("serve", str(write_model(tmp_path / "model")), SAGEMAKER_SAFE_PORT_RANGE=given)
    assert done.returncode == 2 and f"'{given}' (SAGEMAKER_SAFE_PORT_RANGE)" in done.stderr


def listening_ports(pids: list[int]) -> set[int]:
    """The TCP ports on which these processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(link) if link.is_symlink() else ""
            if target.startswith("socket:["):
                inodes.add(target[8:-1])

    ports = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))

    return ports


def test_no_process_listens_on_any_port_but_the_servers_own(tmp_path: Path) -> None:
    with launch(write_model(tmp_path / "model")) as server:
        server.wait_ready()
        assert listening_ports(server.pids()) == {server.port}


# What its processes know.


def test_no_child_has_a_secret_and_front_ends_and_engines_ask_no_hub(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.py").write_text(FORMATTER)
    with launch(folder, {**SECRETS, "HF_HUB_OFFLINE": "0", "AWS_REGION": "eu-west-1"}) as server:
        server.wait_ready()
        children = {pid: name(pid) for pid in server.pids() if pid != server.process.pid}
        assert {"lmi-engine-0", "lmi-code-0"} <= set(children.values()) and len(children) >= 4

        for pid, title in children.items():
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert not any(b"canary" in variable for variable in environ), title
            assert b"AWS_REGION=eu-west-1" in environ, title

            if not title.startswith("lmi-code"):
                assert {b"HF_HUB_OFFLINE=1", b"TRANSFORMERS_OFFLINE=1"} <= set(environ), title


def name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


# What it writes and what it sends.

# A network without anybody in it: whatever is not for this machine goes out at `out`, and is
# counted there.
ALONE = """
echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6
ip link set lo up
ip link add out type veth peer name nobody && ip link set nobody up && ip link set out up
ip addr add 10.255.255.1/24 dev out && ip route add default dev out
mount --bind "$MODEL" "$MODEL" && mount -o remount,ro,bind "$MODEL"
exec "$@"
"""


def can_be_alone() -> bool:
    script = ALONE.partition("mount")[0]
    done = subprocess.run(["unshare", "--net", "--mount", "sh", "-ec", script], capture_output=True)
    return done.returncode == 0


def inside(pid: int, call: Callable[[], T]) -> T:
    """Call a function in the network of a process. Only the calling thread enters it."""
    results: list[T] = []

    def enter() -> None:
        with open(f"/proc/{pid}/ns/net") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")

        results.append(call())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return results[0]


def packets_sent() -> int:
    """The packets that left through `out`, as the calling thread's network counts them."""
    [line] = [
        line
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines()
        if "out:" in line
    ]
    return int(line.partition(":")[2].split()[9])


def send_one_packet() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"anybody?", ("192.0.2.1", 53))


def test_a_complete_model_is_served_without_a_packet_and_without_a_write(tmp_path: Path) -> None:
    """The model's folder is read-only too, so that a write fails even where nothing of it would be
    seen later.
    """
    if os.geteuid() != 0 or not can_be_alone():
        pytest.skip("a network of one's own needs privileges that this machine does not give")

    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    before = snapshot(folder)
    alone = ["unshare", "--net", "--mount", "sh", "-ec", ALONE, "sh"]
    environ = {"MODEL": str(folder), "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hub")}
    with launch(folder, environ, alone) as server:
        pid = server.process.pid
        wait_until(
            lambda: Path(f"/proc/{pid}/comm").read_text() != "unshare\n", "it is in its network"
        )
        wait_until(
            lambda: inside(pid, server.ping) == 200 or server.process.poll() is not None,
            "it is ready",
            180,
        )
        answer = inside(pid, lambda: server.generate(3))

        assert answer.status == 200 and answer.body
        assert inside(pid, packets_sent) == 0

        inside(pid, send_one_packet)
        wait_until(lambda: inside(pid, packets_sent) > 0, "a packet is counted")
        server.signal(signal.SIGTERM)

        assert server.wait() == 0

    assert snapshot(folder) == before


def test_user_code_leaves_nothing_in_the_models_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.py").write_text(FORMATTER)
    before = snapshot(folder)
    with launch(folder) as server:
        server.wait_ready()
        assert server.post({"inputs": "a", "parameters": {"max_new_tokens": 1}}).body == b"formed\n"

    assert snapshot(folder) == before


# Ping.


def own_time_of(call: Callable[[], object]) -> float:
    """The seconds that a call takes, without those in which processes waited for a core."""
    started_s = machine.own_s()
    call()
    return machine.own_s() - started_s


def test_ping_is_answered_under_load_and_with_a_stopped_engine(tmp_path: Path) -> None:
    """Every answer comes within 2 s. 99 of 100 come within 50 ms, in one of three rounds on a busy
    machine.
    """
    folder = write_model(tmp_path / "model", **{"option.echo_step_ms": 20, "frontend_workers": 2})
    with launch(folder) as server, ThreadPoolExecutor(64) as pool:
        server.wait_ready()
        for _ in range(64):
            pool.submit(server.generate, 100_000)

        wait_until(lambda: server.metric("lmi_requests_running") >= 32, "the requests run")
        os.kill(server.pid("lmi-engine"), signal.SIGSTOP)
        rounds = []
        while len(rounds) < 3 and not any(seconds <= 0.05 for seconds in rounds):
            times = sorted(own_time_of(server.ping) for _ in range(NUM_PINGS))
            assert times[-1] < 2
            rounds.append(times[NUM_PINGS * 99 // 100 - 1])

        assert min(rounds) <= 0.05, rounds

        # The clients of the stopped engine end with it
        server.kill()
