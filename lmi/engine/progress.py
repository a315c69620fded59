"""What people see of a load: a bar on a terminal, lines in the log elsewhere."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import lmi.shared.log
from lmi.executor import Progress
from lmi.shared.sink import stream

LOG_S = 1.0  # the least time between two lines

log = logging.getLogger("lmi.engine.worker")


@contextmanager
def shown(*, has_bar: bool, format: str) -> Iterator[Progress]:
    """Give what shows the progress: a bar, if the terminal has one process that loads, until the load is over."""
    if not (has_bar and format != "json" and os.isatty(lmi.shared.log.fd())):
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Bar(*columns, console=Console(file=stream(lmi.shared.log.fd())), transient=True) as bar:
        task = bar.add_task("import", total=1.0)
        yield lambda stage, share: bar.update(task, description=stage, completed=share)


class Lines:
    """A line for each tenth of a stage, where the last line is old enough."""

    def __init__(self) -> None:
        self._stage, self._tenth, self._logged_s = "", -1, 0.0

    def __call__(self, stage: str, share: float) -> None:
        if stage != self._stage:
            self._stage, self._tenth, self._logged_s = stage, -1, 0.0
        now, tenth = time.monotonic(), int(share * 10)
        if tenth > self._tenth and now - self._logged_s >= LOG_S:
            self._tenth, self._logged_s = tenth, now
            log.info("loading: %s %d %%", stage, tenth * 10)
