"""Tells how far a fetch is: other processes by a file, people by a bar or by lines of the log."""

import logging
import threading
import time
from pathlib import Path
from typing import Self

from rich import progress as bars
from rich.console import Console

import lmi.shared.log
from lmi.shared.sink import stream
from lmi.sources.fetches import FetchReport, write
from lmi.sources.job import Progress

# Seconds between two writings of the file with the progress.
REPORT_S = 0.5
# Seconds between two lines of the log.
LOG_S = 10.0
# So many lines pass before a slow download is a warning, and between two warnings.
SLOW_LINES = 3

# The log names the process that fetches, whichever of its modules writes.
log = logging.getLogger("lmi.sources.worker")


class Reporter:
    """A context in which a thread tells of the progress. With `has_bar` people see a bar on a
    terminal, else a line of the log every `log_s`.
    """

    def __init__(self, progress: Progress, file: Path, *, has_bar: bool, log_s: float) -> None:
        self._progress = progress
        self._file = file
        self._has_bar = has_bar
        self._log_s = log_s

        self._bar = bars.Progress(
            "{task.description}",
            bars.BarColumn(),
            bars.DownloadColumn(),
            bars.TransferSpeedColumn(),
            bars.TimeRemainingColumn(),
            console=Console(file=stream(lmi.shared.log.fd())),
            transient=True,
            disable=not has_bar,
        )
        self._task = self._bar.add_task("", total=None, visible=False)

        # What the file has.
        self._written_report: FetchReport | None = None
        self._last_log_s = 0.0
        self._last_warning_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def __enter__(self) -> Self:
        self._bar.start()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._over.set()
        self._thread.join()
        self._bar.stop()

    def _run(self) -> None:
        now = time.monotonic()
        self._last_log_s = now
        self._last_warning_s = now

        is_last = False
        while not is_last:
            is_last = self._over.wait(REPORT_S)
            report = self._progress.report()
            self._write(report)
            self._draw(report)
            if not self._has_bar:
                self._log(report)

    def _write(self, report: FetchReport) -> None:
        if report == self._written_report:
            return

        try:
            write(self._file, report)
            self._written_report = report
        except OSError as error:
            # The disk may be full, which the fetch itself says.
            log.debug("%s cannot be written: %s", self._file, error)

    def _draw(self, report: FetchReport) -> None:
        description = f"{report.stage} {report.source} {report.num_files}/{report.total_files}"
        self._bar.update(
            self._task,
            description=description,
            completed=report.num_bytes,
            total=report.total_bytes or None,
            visible=True,
        )

    def _log(self, report: FetchReport) -> None:
        if report.source and time.monotonic() - self._last_log_s >= self._log_s:
            self._last_log_s = time.monotonic()
            log.info("%s", report)

        warning_s = SLOW_LINES * self._log_s
        if report.slow_warning is not None and time.monotonic() - self._last_warning_s >= warning_s:
            self._last_warning_s = time.monotonic()
            log.warning("%s", report.slow_warning)
