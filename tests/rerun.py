"""A test that fails is run once more: by itself, after all others, in a process of its own.

scripts/test loads this plugin (`-p tests.rerun`). The last lines of a run name the tests that
failed twice and those that passed the second time, `flaky`, each with the reason of its first
failure. A few failures may be bad luck; more than MAX_LUCK are not, nor is a worker that crashed, a
file that cannot be collected or a run that was stopped. Then nothing is run again, and the run
fails.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

MAX_LUCK = 10


class Rerun:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.failed: list[str] = []
        self.flaky: list[str] = []
        # The first line of each first failure
        self.reasons: dict[str, str] = {}
        self.is_luck = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.is_luck &= not report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
            crash = getattr(report.longrepr, "reprcrash", None)
            self.reasons[report.nodeid] = (
                crash.message if crash else report.longreprtext
            ).partition("\n")[0]
            # Of a crash it is none of these
            self.is_luck &= report.when in (
                "setup",
                "call",
                "teardown",
            )

    # The workers and their fixtures have ended
    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        is_whole = (
            exitstatus == pytest.ExitCode.TESTS_FAILED
            and not session.shouldfail
            and not session.shouldstop
        )
        if is_whole and self.is_luck and len(self.failed) <= MAX_LUCK:
            self.flaky = [test_id for test_id in self.failed if self._passes(test_id)]
            self.failed = [test_id for test_id in self.failed if test_id not in self.flaky]
            if not self.failed:
                session.exitstatus = pytest.ExitCode.OK

    def _passes(self, nodeid: str) -> bool:
        """Run one test in a process of its own. What it says is shown if it fails again."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", nodeid]
        run = subprocess.run(command, cwd=self.config.rootpath, capture_output=True, text=True)
        terminal = self.config.get_terminal_writer()
        terminal.line()
        terminal.sep("=", f"once more, by itself: {nodeid}")
        terminal.line("it passed" if run.returncode == 0 else run.stdout + run.stderr)
        return run.returncode == 0

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Count a flaky test as flaky, after the report of its failure and before the last line."""
        for kind in ("failed", "error"):
            reports = terminalreporter.stats.pop(kind, [])
            for report in reports:
                terminalreporter.stats.setdefault(
                    "flaky" if report.nodeid in self.flaky else kind, []
                ).append(report)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        terminal = config.get_terminal_writer()
        for heading, tests in (
            ("flaky: failed, then passed by itself", self.flaky),
            ("failed", self.failed),
        ):
            if tests:
                terminal.sep("=", heading)
                terminal.line("\n".join(f"{test} - {self.reasons[test]}" for test in tests))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Rerun(config))
