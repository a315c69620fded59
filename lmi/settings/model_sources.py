"""Finds the models that options name elsewhere, and puts the folders that they were fetched to in their place.

Settings are resolved twice for a remote model: before the fetch, so that faults show at once, and after it, with the
model's own files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lmi.errors import ModelUnusable
from lmi.settings.model_folder import DEMO
from lmi.settings.model_urls import local_path
from lmi.settings.sources import ENVIRONMENT, Given, Problems
from lmi.sources.files import is_complete
from lmi.sources.source import ARCHIVE_SUFFIXES, HubModel, is_remote, parse

MODEL, DRAFT = "option.model_id", "option.speculative_draft_model"

Fetched = Mapping[str, Path]
"""The local folder of each source that was fetched, by its text."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The givens with local folders in place of remote sources, as far as those were fetched."""

    givens: list[Given]
    missing: tuple[str, ...]  # remote sources that were not fetched yet


def is_remote_folder(asked: str, cwd: Path) -> bool:
    """Return whether the folder of `lmi serve` is a remote source. A word without `/` never is.

    Raises ModelUnusable for a scheme that is not known.
    """
    return is_remote(asked, exists_locally=(cwd / asked).exists(), needs_owner=True)


def place(givens: list[Given], folder: Path | None, cwd: Path, fetched: Fetched, problems: Problems) -> Placed:
    """Replace remote sources by the folders that they were fetched to.

    An id from the environment does not count beside a whole model in `folder`, and a warning says so.
    """
    if folder is not None and is_complete(folder):
        givens = list(_without_ids_of_environment(givens, folder, cwd, problems))
    missing: dict[str, None] = {}
    placed = []
    for given in givens:
        if _is_remote(given, folder, cwd) and _counts(given, givens):
            if given.text not in fetched:
                missing[given.text] = None
            else:
                given = replace(given, text=str(fetched[given.text]))
        placed.append(given)
    return Placed(placed, tuple(missing))


def left_to_code(missing: tuple[str, ...]) -> tuple[str, ...]:
    """Return what is fetched for user code that is the model. It loads a hub's id itself, as with the reference."""
    return tuple(text for text in missing if not isinstance(parse(text), HubModel))


def source_name(text: str) -> str:
    """Return the last part of a remote source, without the suffix of an archive: what its model is called."""
    name = text.rstrip("/").rpartition("/")[2]
    return next((name.removesuffix(suffix) for suffix in ARCHIVE_SUFFIXES if name.endswith(suffix)), name)


def _counts(given: Given, givens: list[Given]) -> bool:
    return given.rank == min(other.rank for other in givens if other.key == given.key)


def _is_remote(given: Given, folder: Path | None, cwd: Path) -> bool:
    if given.key not in (MODEL, DRAFT) or given.text == DEMO:
        return False
    path = local_path(given.text)
    try:
        return is_remote(path, exists_locally=any((base / path).is_dir() for base in (folder or cwd, cwd)))
    except ModelUnusable as error:
        raise ModelUnusable(f"{error} ({given.source})") from None


def _without_ids_of_environment(givens: list[Given], folder: Path, cwd: Path, problems: Problems) -> Iterator[Given]:
    is_served_elsewhere = any(given.key == MODEL and given.rank[0] < ENVIRONMENT for given in givens)
    for given in givens:
        is_from_environment = given.key == MODEL and given.rank[0] >= ENVIRONMENT
        if is_served_elsewhere or not is_from_environment or not _is_remote(given, folder, cwd):
            yield given
        else:
            problems.warnings.append(
                f"{given.said}: the model in {folder} is served and this is not fetched; remove {given.source} "
                "to serve the folder without this warning, or take the model out of the folder to serve the other"
            )
