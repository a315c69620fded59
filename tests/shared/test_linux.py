"""Children started by hand: which die with which, their exit codes and their names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmi.shared import processes, signals
from tests.descriptors import FIRST_REFUSED, many_descriptors

ROOT = Path(__file__).parents[2]


def run_python(code: str) -> str:
    """Run code in a separate process, since the test process has threads and must not fork."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_signal_is_lost_between_the_start_of_a_child_and_that_of_its_program() -> None:
    code = """
import os, signal
from lmi.shared import linux, signals
pipe = signals.SignalPipe()
codes = []
for _ in range(20):
    pid = linux.spawn(["/bin/sleep", "60"], {})
    os.kill(pid, signal.SIGTERM)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(set(codes))
"""
    assert run_python(code) == "{-15}"


def test_a_child_is_ended_by_no_signal_but_those_that_wish_it_and_by_faults() -> None:
    code = """
import os, signal
from lmi.shared import linux, signals
pipe = signals.SignalPipe()
pid = linux.spawn(["/bin/grep", "SigIgn", "/proc/self/status"], {})
os.waitpid(pid, 0)
"""
    ignored = int(run_python(code).split()[1], 16)
    ignored_signals = {signum for signum in signal.valid_signals() if ignored >> (signum - 1) & 1}
    default_signals = {"SIGTERM", "SIGINT", "SIGQUIT", "SIGKILL", "SIGSTOP", "SIGPIPE", "SIGXFSZ"}
    default_signals |= {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGSYS", "SIGTRAP"}
    default_signals |= {"SIGCHLD", "SIGCONT", "SIGURG", "SIGWINCH"}

    assert {signal.Signals(signum).name for signum in signal.valid_signals() - ignored_signals} - {
        "SIGXFSZ"
    } == default_signals - {"SIGXFSZ"}


def test_a_process_that_may_not_fork_still_hears_its_signals() -> None:
    code = """
import os, signal
from lmi.shared import linux, signals
def refuse():
    raise BlockingIOError(11, "Resource temporarily unavailable")
os.fork = refuse
pipe = signals.SignalPipe()
try:
    linux.spawn(["/bin/true"], {})
except OSError as error:
    os.kill(os.getpid(), signal.SIGTERM)
    print(error.errno, [signum.name for signum in pipe.wait(60)])
"""
    assert run_python(code) == "11 ['SIGTERM']"


def test_a_child_gets_its_own_group_environment_folder_and_score() -> None:
    script = "import os; print(os.getpgid(0) == os.getpid(), os.environ['A'], os.getcwd())"
    script += "; print(open('/proc/self/oom_score_adj').read())"
    code = f"""
import os, signal, sys
from lmi.shared import linux
argv = [sys.executable, "-c", {script!r}]
pid = linux.spawn(argv, {{"A": "b"}}, oom_score=300, folder="/")
print(os.waitpid(pid, 0)[1])
"""
    assert run_python(code).split() == ["True", "b", "/", "300", "0"]


def test_a_program_that_does_not_exist_is_a_child_that_exits_127() -> None:
    code = """
import os, signal
from lmi.shared import linux
pid = linux.spawn(["/no/such/program"], {})
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert run_python(code) == "127"


def test_a_child_dies_when_its_parent_is_killed() -> None:
    code = """
import os, signal, sys, time
from lmi.shared import linux
pid = linux.spawn(["/bin/sleep", "60"], {})
print(pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=60
    )
    assert done.returncode == -signal.SIGKILL

    deadline_s = time.monotonic() + 60
    while processes.is_alive(int(done.stdout)):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    code = """
import os, signal
from lmi.shared import linux, processes
if os.fork() == 0:
    linux.die_with_parent(1 << 30, signal.SIGKILL)
    os._exit(0)
print(processes.describe_exit(os.waitstatus_to_exitcode(os.wait()[1])))
"""
    assert run_python(code).startswith("was killed by SIGKILL")


def test_orphans_are_adopted_and_reaped() -> None:
    code = """
import os, time
from lmi.shared import linux, processes
linux.adopt_orphans()
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(0.3)
        os._exit(7)
    os._exit(3)
codes = []
deadline = time.monotonic() + 60
while len(codes) < 2 and time.monotonic() < deadline:
    codes += [code for _, code in processes.reap()]
    time.sleep(0.01)
print(codes, processes.children())
"""
    assert run_python(code) == "[3, 7] []"


def test_the_end_of_a_process_is_seen_whatever_the_number_of_its_descriptor() -> None:
    with many_descriptors(), subprocess.Popen(["/bin/sleep", "60"]) as child:
        descriptor = os.pidfd_open(child.pid)
        assert descriptor >= FIRST_REFUSED
        assert not signals.is_any_readable([descriptor])
        child.kill()
        assert signals.is_any_readable([descriptor], timeout_s=60)
        os.close(descriptor)


def test_signals_and_output_are_waited_for_whatever_the_numbers_of_their_descriptors() -> None:
    code = """
import os, signal
from lmi.shared import signals
from tests.descriptors import FIRST_REFUSED, many_descriptors
with many_descriptors():
    pipe = signals.SignalPipe()
    reader, writer = os.pipe()
    print(reader >= FIRST_REFUSED, pipe.wait(0, [reader]))
    os.kill(os.getpid(), signal.SIGUSR1)
    print([signum.name for signum in pipe.wait(60, [reader])])
    os.write(writer, b"a line")
    print(pipe.wait(60, [reader]), os.read(reader, 10))
"""
    assert run_python(code).splitlines() == ["True []", "['SIGUSR1']", "[] b'a line'"]


def test_the_children_of_this_process_are_found() -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as child:
        assert child.pid in processes.children()
        child.kill()


def test_the_descendants_of_a_process_are_found_whichever_thread_started_them() -> None:
    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["/bin/sh", "-c", "/bin/sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True
        )

    with ThreadPoolExecutor(1) as other_thread, other_thread.submit(start).result() as child:
        assert child.stdout is not None

        grandchild = int(child.stdout.readline())
        assert processes.descendants(child.pid) == [grandchild]
        assert {child.pid, grandchild} <= set(processes.descendants(os.getpid()))

        os.kill(grandchild, signal.SIGKILL)

    assert processes.descendants(child.pid) == []


def test_a_signal_to_a_process_that_is_gone_is_no_fault() -> None:
    with subprocess.Popen(["/bin/true"]) as child:
        child.wait()

    processes.send(child.pid, signal.SIGTERM)
    assert not processes.is_alive(child.pid)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "exited with code 3"),
        (-15, "was killed by SIGTERM"),
        (-9, "was killed by SIGKILL, which the kernel also"),
        (-40, "was killed by signal 40"),
    ],
)
def test_an_exit_is_told_in_words(code: int, words: str) -> None:
    assert processes.describe_exit(code).startswith(words)
