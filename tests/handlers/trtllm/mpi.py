"""Programs that start the ranks of an engine, for machines without TensorRT-LLM and without Open MPI.

`write_launcher` writes a `trtllm-llmapi-launch` that treats its command as the published script does (llmapi/, commits
cbe4c0ae and 020c89e6): split at spaces, in the background of rank 0, with its exit code lost, without MPI's variables.
The library's servers of the ranks, which end only when they are told, are processes that sleep. `write_mpirun` writes
an mpirun that treats its ranks as Open MPI 4 does. `write_ssh` writes an sshd that serves its port and nothing else,
and an ssh that runs commands for any other machine on this one.
"""

from __future__ import annotations

import sys
from pathlib import Path

LAUNCHER = """#!/bin/bash
set -e
task=${@:1}
export TLLM_SPAWN_PROXY_PROCESS=1 tllm_mpi_size=$OMPI_COMM_WORLD_SIZE
if [ "$OMPI_COMM_WORLD_RANK" -eq 0 ]; then
    (
        for name in $(compgen -e); do
            case $name in OMPI_* | PMIX_* | PMI_* | SLURM_* | MPI_* | UCX_*) unset "$name" ;; esac
        done
        $task
    ) &
fi
/bin/sleep 3600
"""

MPIRUN = """#!{python} -sP
# Each rank leads a process group and has no descriptor but 0, 1 and 2. If one ends with another code than 0, or if
# SIGTERM comes, all groups get SIGTERM, and after a second SIGKILL.
import os, signal, subprocess, sys, time

KILL_AFTER_S = 1.0

def start(rank, size, command):
    environ = {{**os.environ, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size)}}
    return subprocess.Popen(command, env=environ, process_group=0, stdin=subprocess.DEVNULL)

def to_all(ranks, signum):
    for rank in ranks:
        try:
            os.killpg(rank.pid, signum)
        except ProcessLookupError:
            pass

words = sys.argv[1:]
size = int(words[words.index("-n") + 1])
command = words[next(i for i, word in enumerate(words) if word.endswith("/trtllm-llmapi-launch")) :]
stops = []
signal.signal(signal.SIGTERM, lambda *_: stops.append(143))
ranks = [start(rank, size, command) for rank in range(size)]
while not stops and None in (codes := [rank.poll() for rank in ranks]):
    stops += [code % 256 for code in codes if code]
    time.sleep(0.02)
to_all(ranks, signal.SIGTERM)
deadline_s = time.monotonic() + KILL_AFTER_S
while None in [rank.poll() for rank in ranks] and time.monotonic() < deadline_s:
    time.sleep(0.02)
to_all(ranks, signal.SIGKILL)
sys.exit(stops[0] if stops else 0)
"""


SSHD = """#!{python} -sP
import pathlib, shutil, socket, sys
path = pathlib.Path(sys.argv[sys.argv.index("-f") + 1])
shutil.copy(path, "{seen}")
options = dict(line.split(" ", 1) for line in path.read_text().splitlines())
with socket.create_server(("", int(options["Port"]))) as server:
    while True:
        server.accept()[0].close()
"""

SSH = """#!/bin/bash
while [ "${1:0:1}" = - ]; do
    case $1 in -F) shift 2 ;; *) shift ;; esac
done
shift
exec /bin/sh -c "$*"
"""


def write_ssh(folder: Path, seen: Path) -> None:
    """Write both programs. `seen`: where sshd leaves a copy of its configuration."""
    _write(folder / "sshd", SSHD.format(python=sys.executable, seen=seen))
    _write(folder / "ssh", SSH)


def write_launcher(folder: Path) -> None:
    _write(folder / "trtllm-llmapi-launch", LAUNCHER)


def write_mpirun(folder: Path) -> None:
    _write(folder / "mpirun", MPIRUN.format(python=sys.executable))


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
