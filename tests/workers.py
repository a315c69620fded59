"""Run tests in several processes: `-p tests.workers --workers N`, as scripts/test does.

The tests are collected once. Then this process forks its workers, which have all that was imported,
and gives each of them part after part: tests that share servers or engines, or a file (see
tests/parts.py). A worker sends its reports back, and this process shows them as if it had run
the tests itself. A worker that dies has failed the test that it ran; another one goes on.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import sys
import traceback
from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest

from lmi.shared.linux import die_with_parent
from tests.parts import part_of

# What a worker sends: the place of the test that it begins, a report of it, or that it wants a
# part.
BEGINS = "begins"
REPORT = "report"
WANTS = "wants a part"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="run the tests in N processes (0: in this one)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("workers"):
        config.pluginmanager.register(Workers(config), "workers")


@dataclass(eq=False)
class Worker:
    """A process that runs tests, as the process sees it that forked it."""

    number: int
    pid: int
    # Readable when it has ended
    pidfd: int
    connection: Connection
    # The places of the tests that it was given and that it has not begun
    places: deque[int] = field(default_factory=deque)
    # Of the test that it runs
    place: int | None = None


class Workers:
    """The workers of a run, and the parts that none of them has begun."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.workers: list[Worker] = []
        self.parts: deque[list[int]] = deque()
        self.num_started = 0

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests, in place of pytest's own loop."""
        if session.testsfailed or self.config.option.collectonly:
            return None

        self.session = session
        self.parts.extend(self._parts())
        # A folder for the folders of all workers
        self.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        num_workers = min(self.config.getoption("workers"), len(self.parts))
        for _ in range(num_workers):
            self._start()

        while self.workers:
            self._serve(wait(self._to_watch()))

        if session.shouldfail:
            raise session.Failed(session.shouldfail)

        return True

    def _parts(self) -> Iterable[list[int]]:
        """The places of the tests of each part, in the order of the first ones."""
        parts = defaultdict(list)
        for place, item in enumerate(self.session.items):
            parts[part_of(item.nodeid)].append(place)

        return parts.values()

    def _start(self, places: Iterable[int] = ()) -> None:
        """Fork a worker, with tests to begin with."""
        here, there = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        number = self.num_started
        self.num_started += 1
        pid = os.fork()
        if pid == 0:
            for worker in self.workers:
                worker.connection.close()
                os.close(worker.pidfd)

            here.close()
            work(self.session, there, number, deque(places))

        there.close()
        self.workers.append(Worker(number, pid, os.pidfd_open(pid), here, deque(places)))

    def _to_watch(self) -> list[Connection | int]:
        return [handle for worker in self.workers for handle in (worker.connection, worker.pidfd)]

    def _serve(self, ready: list[Any]) -> None:
        """Take what workers have sent, and the end of those that have ended."""
        for worker in list(self.workers):
            is_open = True
            # All that it sent before it ended
            while is_open and (worker.connection in ready or worker.pidfd in ready):
                is_open = self._take_message(worker)
                if not is_open or not worker.connection.poll():
                    break

            if worker.pidfd in ready:
                self._end(worker)

    def _take_message(self, worker: Worker) -> bool:
        """Returns whether there was one."""
        try:
            if not worker.connection.poll():
                return False

            kind, content = worker.connection.recv()
        except (EOFError, OSError):
            return False

        if kind == WANTS:
            is_over = self.session.shouldfail or self.session.shouldstop
            part = self.parts.popleft() if self.parts and not is_over else []
            worker.places.extend(part)
            with suppress(OSError):
                worker.connection.send(part)
        elif kind == BEGINS:
            worker.place = content
            worker.places.remove(content)
        else:
            self._show(content)

        return True

    def _show(self, content: dict[str, Any]) -> None:
        report = self.config.hook.pytest_report_from_serializable(config=self.config, data=content)
        self.config.hook.pytest_runtest_logreport(report=report)

    def _end(self, worker: Worker) -> None:
        """A worker has ended. If it was killed, another one takes what it had."""
        self.workers.remove(worker)
        worker.connection.close()
        os.close(worker.pidfd)
        _, status = os.waitpid(worker.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return

        if worker.place is not None:
            item = self.session.items[worker.place]
            message = f"worker {worker.number} ended with {code} while it ran {item.nodeid}"
            report = pytest.TestReport(
                item.nodeid,
                item.location,
                {},
                "failed",
                message,
                "crash",  # type: ignore[arg-type]
            )
            self.config.hook.pytest_runtest_logreport(report=report)

        if not self.session.shouldfail and not self.session.shouldstop:
            if worker.places or self.parts:
                self._start(worker.places)


def work(
    session: pytest.Session, connection: Connection, number: int, places: deque[int]
) -> NoReturn:
    """Run tests in this process, which was forked for it, until there are no more."""
    code = 1
    try:
        die_with_parent(os.getppid(), signal.SIGTERM)
        # What the parent registered is the parent's
        atexit._clear()
        prepare(session.config, number)
        session.config.pluginmanager.register(Reports(session.config, connection))
        run_tests(session, connection, places)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            session._setupstate.teardown_exact(None)
        with suppress(BaseException):
            atexit._run_exitfuncs()

        os._exit(code)


def prepare(config: pytest.Config, number: int) -> None:
    """Make what the workers may not share with each other: names, files, the terminal."""
    random.seed()
    if "torch" in sys.modules:
        # Of this thread only: the others have as many from the start
        sys.modules["torch"].set_num_threads(len(os.sched_getaffinity(0)))

    for name in ("terminalreporter", "terminalprogress-plugin", "workers"):
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)

    capture = config.pluginmanager.get_plugin("capturemanager")
    if capture is not None:
        capture.stop_global_capturing()
        capture.start_global_capturing()

    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"worker-{number}"
    factory._basetemp.mkdir(mode=0o700)


def run_tests(session: pytest.Session, connection: Connection, places: deque[int]) -> None:
    """Begin the next part before the last test of one ends: what both share stays."""

    def take() -> None:
        connection.send((WANTS, None))
        places.extend(connection.recv())

    if not places:
        take()

    while places and not session.shouldfail and not session.shouldstop:
        place = places.popleft()
        connection.send((BEGINS, place))
        if not places:
            take()

        item = session.items[place]
        next_item = session.items[places[0]] if places else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)


class Reports:
    """Sends the reports of a worker to the process that shows them."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config = config
        self.connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        content = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send((REPORT, content))
