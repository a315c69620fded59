"""A Docker daemon and a base image for a machine that has neither, without a registry of images.

The daemon is Debian's. It has its own socket and data, no bridge and no firewall rules, so it does
not affect the host, and its containers use the host's network. debootstrap makes the base from the
mirror in the machine's apt sources.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from image.build import Docker

PACKAGES = {"dockerd": "docker.io", "debootstrap": "debootstrap"}  # package by command
# Of docker.io; another one on PATH may lack BuildKit
CLIENT = "/usr/bin/docker"
BASE = "lmi-test-base"
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
START_S = 60.0
STOP_S = 30.0


def answers(docker: Docker) -> bool:
    return shutil.which(docker.client) is not None and docker.run("version").returncode == 0


@contextmanager
def own_docker(work: Path) -> Iterator[Docker]:
    """Run a daemon in the folder `work` until the block ends."""
    _install_packages()
    docker = Docker(CLIENT, f"unix://{work}/docker.sock", is_own=True)
    command = [
        "dockerd",
        f"--host={docker.host}",
        f"--data-root={work}/data",
        f"--exec-root={work}/exec",
    ]
    command += [f"--pidfile={work}/docker.pid", "--bridge=none", "--iptables=false"]
    with (work / "docker.log").open("ab") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    try:
        _wait_until_it_answers(docker, daemon, work / "docker.log")
        yield docker
    finally:
        # It stops its containers and its containerd
        daemon.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(STOP_S)

        with suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)

        daemon.wait()
        _unmount_below(work)


def own_base(docker: Docker, work: Path) -> str:
    """The name of an image with only the machine's Debian and Python. It is made once for each
    daemon.
    """
    if docker.run("image", "inspect", BASE).returncode == 0:
        return BASE

    codename, mirror = _release()
    print(f"base image: Debian {codename} by debootstrap", flush=True)
    root = work / "base"
    shutil.rmtree(root, ignore_errors=True)
    command = [
        "debootstrap",
        "--variant=minbase",
        f"--include={BASE_PACKAGES}",
        codename,
        str(root),
        mirror,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")

    pack = [
        "tar",
        "-C",
        str(root),
        "-c",
        "--exclude=./var/cache/apt/archives/*.deb",
        "--exclude=./var/lib/apt/lists/*",
        ".",
    ]
    with subprocess.Popen(pack, stdout=subprocess.PIPE) as tar:
        docker.run(
            "import", "--change", f"ENV PATH={PATH}", "-", BASE, stdin=tar.stdout, check=True
        )

    shutil.rmtree(root)
    return BASE


def _install_packages() -> None:
    missing = [package for command, package in PACKAGES.items() if shutil.which(command) is None]
    if not missing:
        return

    print(f"apt-get install {' '.join(missing)}", flush=True)
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
        done = subprocess.run(
            ["apt-get", "--quiet", *words], env=environ, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"apt-get {' '.join(words)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _wait_until_it_answers(docker: Docker, daemon: subprocess.Popen, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while docker.run("version").returncode:
        if daemon.poll() is not None or time.monotonic() > deadline_s:
            sys.exit("dockerd does not start:\n" + "\n".join(log.read_text().splitlines()[-15:]))

        time.sleep(0.2)


def _release() -> tuple[str, str]:
    """The codename of this Debian, and apt's mirror of it."""
    lines = Path("/etc/os-release").read_text().splitlines()
    codename = next(
        line.partition("=")[2].strip('"') for line in lines if line.startswith("VERSION_CODENAME=")
    )
    targets = subprocess.run(
        [
            "apt-get",
            "indextargets",
            "--format",
            "$(CODENAME) $(COMPONENT) $(SITE)",
            "Created-By: Packages",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    mirror = next(
        (line.split()[2] for line in targets if line.startswith(f"{codename} main ")), None
    )
    return codename, mirror or sys.exit(f"apt knows no mirror of {codename}")


def _unmount_below(work: Path) -> None:
    """Unmount what a killed daemon left mounted, the innermost first."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((mount for mount in mounts if mount.startswith(f"{work}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False)
