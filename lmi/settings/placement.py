"""Puts the folders that remote sources were fetched to in the place of these sources.

Settings are resolved twice for a remote model: before the fetch, so that faults show at once, and
after it.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lmi.errors import ModelUnusable
from lmi.settings.gguf_choice import is_gguf, opened_folder, with_files
from lmi.settings.given import ENVIRONMENT, FILE, PLATFORM, Given
from lmi.settings.kinds import local_path
from lmi.settings.served_folder import DEMO
from lmi.settings.table import DRAFT, MODEL
from lmi.settings.values import Values
from lmi.sources.catalogue import CATALOGUE
from lmi.sources.fetches import default_download_dir
from lmi.sources.source import fault, remote

Fetched = Mapping[str, Path]
"""The local folder of each source that was fetched, by its text."""


def place(givens: list[Given], values: Values) -> tuple[list[Given], tuple[str, ...]]:
    """Replace remote sources by the folders that they were fetched to. Returns the given values,
    and the sources that are not fetched yet.

    Notes in `values.fetched` the folder that a GGUF file was opened to before. An id from the
    environment does not count beside a whole model in the served folder, and a warning says so.
    """
    is_whole = values.folder is not None and fault(values.folder) is None
    givens = with_files(_without_models_of_images(givens, values, is_whole), values)
    first_ranks: dict[str, tuple[int, int]] = {}
    for entry in givens:
        first_ranks[entry.key] = min(entry.rank, first_ranks.get(entry.key, entry.rank))

    names_model = MODEL in first_ranks and first_ranks[MODEL][0] < ENVIRONMENT
    placed: list[Given] = []
    missing: dict[str, None] = {}
    for entry in givens:
        if not _needs_process(entry, values):
            placed.append(entry)
            continue

        _find_in_cache(entry, givens, values)
        if is_whole and not names_model and entry.key == MODEL:
            values.warn(
                f"{entry.said}: the model in {values.folder} is served and this is not fetched; "
                f"remove {entry.source} "
                "to serve the folder without this warning, or take the model out of the folder to "
                "serve the other"
            )
            continue

        if entry.rank == first_ranks[entry.key]:
            if entry.text in values.fetched:
                entry = replace(entry, text=str(values.fetched[entry.text]))
            else:
                missing[entry.text] = None

        placed.append(entry)

    return placed, tuple(missing)


def _needs_process(entry: Given, values: Values) -> bool:
    """Return whether a process must make the model's folder first: fetch a remote source, or open
    a GGUF file, also one that lies here.
    """
    if entry.key not in (MODEL, DRAFT) or entry.text == DEMO:
        return False

    if entry.key == MODEL and is_gguf(entry.text):
        return Path(entry.text).is_file()

    path = local_path(entry.text)
    is_here = any((base / path).is_dir() for base in (values.folder or values.cwd, values.cwd))
    try:
        return remote(path, exists_locally=is_here) is not None
    except ModelUnusable as error:
        raise ModelUnusable(f"{error} ({entry.source})") from None


def _find_in_cache(entry: Given, givens: list[Given], values: Values) -> None:
    """Note the folder that a GGUF file, also one of the catalogue, was opened to before, so that no
    process opens it again.
    """
    is_file = entry.text in CATALOGUE or is_gguf(entry.text)
    if not is_file or entry.text in values.fetched:
        return

    candidates = [candidate for candidate in givens if candidate.key == "download_dir"]
    if candidates:
        first = min(candidates, key=lambda candidate: candidate.rank)
        download_dir = values.cwd / first.text
    else:
        download_dir = default_download_dir(values.environ)

    folder = opened_folder(entry.text, download_dir.absolute())
    if folder is not None:
        values.fetched = {**values.fetched, entry.text: folder}


def _without_models_of_images(givens: list[Given], values: Values, is_whole: bool) -> list[Given]:
    """Return `givens` without the models that variables of AWS's images name, if the command line
    names another.

    The command line names one by a folder that holds a whole model, or whose serving.properties has
    option.model_id.
    """
    is_in_file = any(entry.key == MODEL and entry.rank[0] == FILE for entry in givens)
    if not values.is_folder_asked or not (is_whole or is_in_file):
        return givens

    of_images = [entry for entry in givens if entry.key == MODEL and entry.rank[0] == PLATFORM]
    for entry in of_images:
        values.warn(
            f"{entry.said}: has no effect beside {values.folder}, which the command line names"
        )

    return [entry for entry in givens if entry not in of_images]
