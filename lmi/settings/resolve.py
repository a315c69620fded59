"""Turns serving.properties, environment and command line into a Config, by the steps of
`step_order.py`.
"""

from collections.abc import Iterator, Mapping
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
    """The configuration, the source of each value, and what the operator should know."""

    config: Config
    settings: tuple[Setting, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    # Lines for a log at DEBUG.
    details: tuple[str, ...] = ()
    # The request for the remote sources that are missing. Without them the configuration is not
    # final.
    request: FetchRequest | None = None

    @classmethod
    def of(cls, resolution: Resolution) -> Self:
        """Return what the steps have written."""
        values = resolution.values
        # The options of the table in its order, then the others that were given.
        keys = [option.key for option in OPTIONS]
        keys += sorted(values.picked.keys() - set(keys))
        settings = tuple(Setting.of(values, key) for key in keys)

        notes = list(values.notes)
        for setting in settings:
            for rival in setting.shadowed:
                counts = f"{setting.option}: {setting.value} ({setting.source}) counts"
                notes.append(f"{counts}, not {rival}")

        config = resolution.config
        sources = tuple(WantedSource.of(source, config) for source in resolution.missing)
        return cls(
            config,
            settings,
            tuple(values.warnings),
            tuple(notes),
            tuple(values.details),
            request=FetchRequest(sources=sources) if sources else None,
        )


@contextmanager
def _paths_explained() -> Iterator[None]:
    """Turn the error of a path that cannot be looked at, because its name is too long or a folder
    on its way is closed to this user, into BadConfiguration.
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
    if text is not None and _is_source(text, cwd):
        if flags.get(MODEL, text) != text:
            raise BadConfiguration(
                f"{text} is to be served and {MODEL} is {flags[MODEL]}: allowed is one model"
            )

        return resolve(replace(start, flags={**flags, MODEL: text}))

    if text is not None and text.endswith(GGUF):
        file = cwd / local_path(text)
        if file.is_file():
            return resolve(replace(start, flags={**flags, MODEL: str(file.absolute())}))

    folder = find_folder(text, cwd)
    if folder is not None:
        start = replace(start, folder=folder, properties=read(folder / "serving.properties"))

    is_folder_asked = folder_text is not None or "load_models" in flags
    return resolve(replace(start, is_folder_asked=is_folder_asked))


def _is_source(text: str, cwd: Path) -> bool:
    """Return whether what is to be served is no folder here but a source, such as OWNER/NAME."""
    exists = (cwd / text).exists()
    return remote(text, exists_locally=exists, needs_owner=True) is not None


@_paths_explained()
def resolve(start: StartInputs) -> Resolved:
    """Settle every option, by the steps of `step_order.py`. Raises BadConfiguration with one
    line for each fault, or ModelUnusable if there is none.

    The result's `request` names the remote sources that are not in `start.fetched`. While some are
    missing, the settings are what is known without them.
    """
    resolution = Resolution(start, Values(start))
    run(FIRST_STEPS, resolution)
    run(further_steps(resolution.values), resolution)
    return Resolved.of(resolution)
