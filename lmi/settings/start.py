"""What a start finds: the texts that were given for options, and what else choices depend on."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lmi.settings.given import Given
from lmi.settings.handler import Handler, announced
from lmi.settings.properties import Properties
from lmi.shared.machine import Machine

Fetched = Mapping[str, Path]
"""The local folder of each source that was fetched, by its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartInputs:
    """What settings are resolved from. No step changes it."""

    # The folder that is served. None means that none was named: the demo is served.
    folder: Path | None = None
    # Whether the command line names `folder`.
    is_folder_asked: bool = False
    cwd: Path = Path()
    machine: Machine
    # The engines that are announced, by name.
    handlers: Mapping[str, Handler] = field(default_factory=announced)
    # The sources that a former result asked for.
    fetched: Fetched = field(default_factory=dict)
    # Folders of strangers. Secure mode searches them as it does those that were fetched.
    untrusted: Collection[Path] = ()

    properties: Properties = field(default_factory=Properties)
    environ: Mapping[str, str] = field(default_factory=dict)
    # The texts of the command line, by key.
    flags: Mapping[str, str] = field(default_factory=dict)
    # The file that a flag came from, by key.
    files: Mapping[str, str] = field(default_factory=dict)
    # A value that was given is left out if this returns False for it.
    counts: Callable[[Given], bool] = lambda value: True
