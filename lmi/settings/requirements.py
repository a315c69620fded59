"""Finds the requirements.txt of a model, and chooses the folder that what it names is installed in.

The folder's name is a hash of the file, of the wheels in a folder `requirements` beside it and of Python's version, so
that a later start finds it complete. `lmi/user_code/requirements.py` installs. Source: the behaviour of djl-serving.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

from lmi.errors import ModelUnusable
from lmi.settings.config import Config, RequirementsConfig, UserCodeConfig
from lmi.settings.sources import Problems
from lmi.settings.values import Values

NAME, WHEELS = "requirements.txt", "requirements"
SWITCH, TRUST = "option.install_requirements", "option.trust_remote_code"


def choose_requirements(
    values: Values, code: UserCodeConfig | None, folders: Iterable[Path], problems: Problems
) -> RequirementsConfig | None:
    """Return what is installed for the model's own code, or None. `folders` may hold the file."""
    beside = [Path(code.path).parent] if code is not None else []
    file = next((folder / NAME for folder in (*beside, *folders) if (folder / NAME).is_file()), None)
    if file is None:
        return None
    if not values.final(SWITCH):
        problems.notes.append(f"{file}: not installed, by {values.how_given(SWITCH).said}")
        return None
    if code is None and not values.final(TRUST):
        problems.notes.append(f"{file}: not installed, since no code of the model runs ({TRUST}=false)")
        return None
    return RequirementsConfig(file=str(file.resolve()), folder=str(_folder(file, values.final("download_dir"))))


def is_complete(requirements: RequirementsConfig) -> bool:
    """Return whether nothing has to be installed."""
    return Path(requirements.folder).is_dir()


def with_installed(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that put what was installed first on the path of a process, or none if nothing was."""
    if config.requirements is None:
        return {}
    return {"PYTHONPATH": ":".join(filter(None, (config.requirements.folder, environ.get("PYTHONPATH"))))}


def _folder(file: Path, download_dir: str) -> Path:
    wheels = file.parent / WHEELS
    try:
        names = sorted(entry.name for entry in wheels.iterdir()) if wheels.is_dir() else []
        parts = [file.read_bytes(), *map(os.fsencode, names)]
    except OSError as error:
        raise ModelUnusable(f"{file}: cannot be read: {error.strerror}") from None
    digest = hashlib.sha256(b"\0".join([platform.python_version().encode(), *parts])).hexdigest()
    return Path(download_dir) / "requirements" / digest
