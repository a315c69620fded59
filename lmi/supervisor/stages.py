"""What happens before a model's processes start: its source is fetched, then its requirements are installed.

Each stage is a child that ends by itself. The supervisor runs it until its child is done, then asks for the next one.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from lmi.errors import StartError
from lmi.runtime import Runtime, ServerRuntime, cannot_write
from lmi.settings.config import Config, ServerConfig
from lmi.settings.model_choice import Fetched
from lmi.settings.resolve import Resolved
from lmi.shared.linux import SUPERVISOR_PID
from lmi.shared.state import SupervisorRecord
from lmi.sources import fetches
from lmi.sources.fetches import FetchReport
from lmi.supervisor.child import Child, ChildKind
from lmi.supervisor.kinds import environ_of_child
from lmi.supervisor.restarts import RestartTable

MAX_DEATHS = 3  # of one stage by signals or faults of ours; each try goes on where the last one ended

Settle = Callable[[Fetched], Resolved]
"""Resolves the settings again, with the folders of the sources that were fetched."""

log = logging.getLogger(__name__)


class Stage(Child):
    """A child that does one thing and reports in `folder`. It has the secrets. `words` are its module and command."""

    def __init__(self, title: str, folder: Path, config: ServerConfig, *words: str) -> None:
        log_words = ["--log-level", config.log_level, "--log-format", config.log_format]
        kind = ChildKind(
            title=title,
            argv=lambda slot: [sys.executable, "-P", "-m", *words, *log_words],
            environ=lambda slot: environ_of_child(os.environ) | {SUPERVISOR_PID: str(os.getpid())},
            output_logger="libraries",
            restarts=lambda: RestartTable(MAX_DEATHS, window_s=float("inf")),
            fatal=self.fatal,
            lost_label=StartError.label,
            is_one_shot=True,
        )
        super().__init__(kind)
        self.folder = folder

    def fatal(self, code: int, why: str) -> StartError | None:
        """Return the error that an exit means if another start cannot mend it."""
        return fetches.failure(self.folder)

    def show_in(self, record: SupervisorRecord) -> None:
        """Write how far the stage is to where `/ping` reads it."""
        report = fetches.read(self.folder / fetches.PROGRESS, FetchReport)
        record.stage = self.name
        record.progress = 0.0 if report is None else report.share


def stages(resolved: Resolved, settle: Settle, runtime: ServerRuntime) -> Iterator[Stage | Config]:
    """Yield each stage of a start that is needed, then the settings of the model, unless clients name the models.

    Raises StartError for settings that the fetched files make impossible.
    """
    if runtime.config.multi_model:
        return
    if resolved.request is not None:
        folder = _new_folder(runtime, "download")
        fetches.write(folder / fetches.REQUEST, resolved.request)
        log.info("fetching %s", ", ".join(wanted.source for wanted in resolved.request.sources))
        yield Stage("download", folder, resolved.config.server, *fetch_words(folder))
        if (folders := fetches.result(folder)) is None:
            raise StartError(f"the fetch process left no {fetches.RESULT}")
        resolved = settle(folders)
        say(resolved)
    if (stage := requirements(resolved.config, runtime)) is not None:
        yield stage
    yield resolved.config


def fetch_words(folder: Path) -> tuple[str, ...]:
    """Return the module and the command of a process that fetches what the request in a folder names."""
    return "lmi.sources.worker", str(folder / fetches.REQUEST), str(folder)


def requirements(config: Config, runtime: ServerRuntime | Runtime) -> Stage | None:
    """Return the stage that installs what the model's code needs, or None if it is there. It reports in `runtime`."""
    wanted = config.requirements
    if wanted is None or Path(wanted.folder).is_dir():
        return None
    folder = _new_folder(runtime, "requirements")
    places = ["--file", wanted.file, "--folder", wanted.folder, "--state", str(folder)]
    log.info("installing what %s names", wanted.file)
    return Stage("requirements", folder, config.server, "lmi.user_code.requirements", *places)


def say(resolved: Resolved) -> None:
    told = {logging.DEBUG: resolved.details, logging.INFO: resolved.notes, logging.WARNING: resolved.warnings}
    for level, texts in told.items():
        for text in texts:
            log.log(level, "%s", text)


def _new_folder(runtime: ServerRuntime | Runtime, name: str) -> Path:
    folder = runtime.path / name
    try:
        folder.mkdir()
    except OSError as error:
        raise cannot_write(folder, error) from error
    return folder
