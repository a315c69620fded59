"""What people see of a load: a bar on a terminal, lines in the log elsewhere, and how long each
stage took.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import lmi.shared.log
from lmi.executor import Progress
from lmi.shared.sink import stream

# The least time between two lines.
LOG_S = 1.0

log = logging.getLogger("lmi.engine.worker")


class Stages:
    """Shows each report of a load, and counts the seconds of its stages."""

    def __init__(self, show: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._show = show
        self._stage = ""
        self._began_s = time.monotonic()

    def __call__(self, stage: str, share: float) -> None:
        if stage != self._stage:
            self.begin(stage)

        self._show(stage, share)

    def begin(self, stage: str) -> None:
        now = time.monotonic()
        last_stage = self._stage
        if last_stage:
            seconds_before = self.seconds.get(last_stage, 0.0)
            self.seconds[last_stage] = seconds_before + now - self._began_s

        self._stage = stage
        self._began_s = now


@contextmanager
def shown(*, has_bar: bool, format: str) -> Iterator[Stages]:
    """Show what a load reports in the block: on a bar, if the terminal is for one process that
    loads.
    """
    is_terminal = has_bar and format != "json" and os.isatty(lmi.shared.log.fd())
    if not is_terminal:
        stages = Stages(Lines())
        yield stages
    else:
        from rich.console import Console
        from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        console = Console(file=stream(lmi.shared.log.fd()))
        with Bar(*columns, console=console, transient=True) as bar:
            task = bar.add_task("import", total=1.0)

            def show(stage: str, share: float) -> None:
                bar.update(task, description=stage, completed=share)

            stages = Stages(show)
            yield stages

    stages.begin("")


class Lines:
    """A line for the beginning of a stage and for each tenth of it, where the last line is old
    enough.
    """

    def __init__(self) -> None:
        self._stage = ""
        self._tenth = -1
        self._logged_s = 0.0

    def __call__(self, stage: str, share: float) -> None:
        now = time.monotonic()
        tenth = int(share * 10)
        is_new_tenth = tenth > self._tenth and now - self._logged_s >= LOG_S
        if stage != self._stage or is_new_tenth:
            self._stage = stage
            self._tenth = tenth
            self._logged_s = now
            log.info("loading: %s %d %%", stage, tenth * 10)
