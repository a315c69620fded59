"""Turns serving.properties, environment variables and the command line into a Config.

`step_order.py` lists the steps, each of which fills in a part of one `Resolution`.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from lmi.errors import BadConfiguration, shorten
from lmi.settings.config import Config
from lmi.settings.kinds import local_path
from lmi.settings.properties import read
from lmi.settings.served_folder import find_folder, named_folder
from lmi.settings.shown import Setting
from lmi.settings.start import Fetched, StartInputs
from lmi.settings.step_order import FIRST_STEPS, further_steps
from lmi.settings.steps import Resolution, run
from lmi.settings.table import MODEL, OPTIONS
from lmi.settings.values import Values
from lmi.shared.machine import Machine
from lmi.sources.fetches import FetchRequest, WantedSource
from lmi.sources.source import GGUF, remote


@dataclass(frozen=True, slots=True)
class Resolved:
    """The configuration of a server, and what `lmi config` and the log tell of it."""

    config: Config
    # The value of each option, and where it came from.
    settings: tuple[Setting, ...] = ()
    # What the operator should know.
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    # Lines for a log at DEBUG.
    details: tuple[str, ...] = ()
    # The remote sources that are not here yet. Until they are fetched the configuration is not
    # final. None: all are here.
    request: FetchRequest | None = None

    @classmethod
    def of(cls, resolution: Resolution) -> Self:
        """Return what the steps have written."""
        values = resolution.values
        # The options of the table in its order, then the others that were given.
        keys = [option.key for option in OPTIONS]
        keys += sorted(values.picked.keys() - set(keys))
        settings = tuple(Setting.of(values, key) for key in keys)

        config = resolution.config
        missing = tuple(WantedSource.of(source, config) for source in resolution.missing)
        return cls(
            config=config,
            settings=settings,
            warnings=tuple(values.warnings),
            notes=(*values.notes, *_notes_on_rivals(settings)),
            details=tuple(values.details),
            request=FetchRequest(sources=missing) if missing else None,
        )


def _notes_on_rivals(settings: Iterable[Setting]) -> list[str]:
    """Return a note for each value that was given and does not count, because another one of its
    option does.
    """
    notes = []
    for setting in settings:
        for rival in setting.shadowed:
            counts = f"{setting.option}: {setting.value} ({setting.source}) counts"
            notes.append(f"{counts}, not {rival}")

    return notes


@contextmanager
def _paths_explained() -> Iterator[None]:
    """Raise BadConfiguration for a path that cannot be looked at: its name is too long, or a folder
    on its way is closed to this user.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise

        path = shorten(str(error.filename))
        raise BadConfiguration(f"{path} cannot be read: {error.strerror}") from error


@_paths_explained()
def resolve_folder(
    folder_text: str | None,
    environ: Mapping[str, str],
    flags: Mapping[str, str],
    cwd: Path | None = None,
    fetched: Fetched | None = None,
    files: Mapping[str, str] | None = None,
) -> Resolved:
    """Return the settings that `lmi serve FOLDER_TEXT` runs with. Raises BadConfiguration or
    ModelUnusable.

    `fetched` has the folders of the sources that a former result asked for. `files` has the files
    that flags came from, by key.
    """
    cwd = cwd or Path.cwd()
    start = StartInputs(
        cwd=cwd,
        machine=Machine.here(environ),
        fetched=fetched or {},
        environ=environ,
        flags=flags,
        files=files or {},
    )

    text = folder_text or named_folder(environ, flags, cwd)
    model = None if text is None else _model_named(text, flags, cwd)
    if model is not None:
        return resolve(replace(start, flags={**flags, MODEL: model}))

    folder = find_folder(text, cwd)
    if folder is not None:
        start = replace(start, folder=folder, properties=read(folder / "serving.properties"))

    is_folder_asked = folder_text is not None or "load_models" in flags
    return resolve(replace(start, is_folder_asked=is_folder_asked))


def _model_named(text: str, flags: Mapping[str, str], cwd: Path) -> str | None:
    """Return the value of option.model_id that a text stands for in place of a folder: a source,
    such as OWNER/NAME, or a GGUF file. None if it names no such thing.

    Raises BadConfiguration for a source if the flags name another model.
    """
    exists = (cwd / text).exists()
    if remote(text, exists_locally=exists, needs_owner=True) is not None:
        if flags.get(MODEL, text) != text:
            raise BadConfiguration(
                f"{text} is to be served and {MODEL} is {flags[MODEL]}: allowed is one model"
            )

        return text

    if text.endswith(GGUF):
        file = cwd / local_path(text)
        if file.is_file():
            return str(file.absolute())

    return None


@_paths_explained()
def resolve(start: StartInputs) -> Resolved:
    """Return the settings of a start. Raises BadConfiguration with a line for each fault, or
    ModelUnusable.

    The result's `request` names the remote sources that `start.fetched` lacks. Until they are
    fetched, the settings are what is known without them.
    """
    resolution = Resolution(start, Values(start))
    run(FIRST_STEPS, resolution)
    run(further_steps(resolution.values), resolution)
    return Resolved.of(resolution)
