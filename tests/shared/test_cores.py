import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lmi.shared import cores, linux
from lmi.shared.cores import Cores


def test_engines_get_the_last_cores_and_everything_else_the_first() -> None:
    assert Cores.divide([0, 1], 1, 1, 1) == Cores(((1,),), (0,))
    assert Cores.divide([2, 3, 5, 7, 8, 9], 2, 2, 2) == Cores(((5, 7), (8, 9)), (2, 3))


@pytest.mark.parametrize("num_threads, num_others", [(4, 1), (5, 1), (3, 2)])
def test_cores_are_divided_only_where_each_other_process_gets_one(num_threads: int, num_others: int) -> None:
    assert Cores.divide(range(4), 1, num_threads, num_others) is None


CLAIM = """
import sys
from lmi.shared import cores
wanted = cores.Cores(((1,),), (0,)) if sys.argv[2] == "some" else None
with cores.claimed(wanted, "\\0" + sys.argv[1]) as mine:
    print(mine is not None, flush=True)
    input()
"""


def test_one_server_of_a_machine_keeps_to_cores_until_it_is_gone() -> None:
    command = [sys.executable, "-c", CLAIM, f"lmi.test.{os.getpid()}", "some"]
    with start([*command[:-1], "none"]) as unbound, start(command) as first:
        assert says(unbound) == "False"
        assert says(first) == "True"
        with start(command) as second:
            assert says(second) == "False"
            second.kill()
        first.kill()
        unbound.kill()
    with start(command) as third:
        assert says(third) == "True"
        third.kill()


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_threads_that_run_and_those_that_they_start_keep_to_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    monkeypatch.setenv(cores.VARIABLE, str(core))
    release, seen = threading.Event(), []

    def wait_and_look() -> None:
        release.wait(60)
        seen.append(os.sched_getaffinity(0))
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(os.sched_getaffinity, 0).result())

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(wait_and_look)
        try:
            cores.keep()
            release.set()
            running.result(60)
        finally:
            linux.bind_threads(sorted(before))
    assert seen == [{core}, {core}]


def test_a_process_that_is_told_nothing_keeps_all_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cores.VARIABLE, raising=False)
    before = os.sched_getaffinity(0)
    cores.keep()
    assert os.sched_getaffinity(0) == before
