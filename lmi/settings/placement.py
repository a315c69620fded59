"""Puts the folders that remote sources were fetched to in the place of these sources.

Settings are resolved twice for a remote model: before the fetch, so that faults show at once, and
after it.
"""

from pathlib import Path

from msgspec.structs import replace

from lmi.errors import ModelUnusable
from lmi.settings.gguf_choice import check_engine, is_gguf, opened_folder, with_files
from lmi.settings.given import ENVIRONMENT, PLATFORM, Given, Rank
from lmi.settings.kinds import local_path
from lmi.settings.served_folder import DEMO
from lmi.settings.start import StartInputs
from lmi.settings.steps import Resolution
from lmi.settings.table import DRAFT, MODEL
from lmi.settings.values import Values
from lmi.sources.catalogue import CATALOGUE
from lmi.sources.place import default_download_dir
from lmi.sources.source import GgufSource, HubModel, fault, parse, remote


def place(resolution: Resolution) -> None:
    """Replace remote sources by the folders that they were fetched to. Finds the sources that are
    not fetched yet, and the folders that GGUF files were opened to before.

    If the served folder holds a whole model, a source that only a variable of the environment names
    does not count, and a warning says so.
    """
    start = resolution.start
    values = resolution.values
    is_whole = start.folder is not None and fault(start.folder) is None
    givens = _without_models_of_images(resolution.givens, values, is_whole)
    givens = with_files(givens, start)

    first_ranks = _first_ranks(givens)
    names_model = MODEL in first_ranks and first_ranks[MODEL].layer < ENVIRONMENT
    placed: list[Given] = []
    fetched = dict(start.fetched)
    missing: dict[str, None] = {}
    for entry in givens:
        if not _needs_process(entry, start):
            placed.append(entry)
            continue

        if entry.text not in fetched:
            opened = _opened_before(entry, givens, start)
            if opened is not None:
                fetched[entry.text] = opened

        if is_whole and not names_model and entry.key == MODEL:
            values.warn(
                f"{entry.assignment}: the model in {start.folder} is served and this is not "
                f"fetched; remove {entry.source} to serve the folder without this warning, or take "
                f"the model out of the folder to serve the other"
            )
            continue

        if entry.rank == first_ranks[entry.key]:
            if entry.text in fetched:
                entry = replace(entry, text=str(fetched[entry.text]))
            else:
                missing[entry.text] = None

        placed.append(entry)

    resolution.givens = placed
    resolution.fetched = fetched
    resolution.missing = tuple(missing)


def _first_ranks(givens: list[Given]) -> dict[str, Rank]:
    """Return the rank that counts of each key."""
    first_ranks: dict[str, Rank] = {}
    for entry in givens:
        first_ranks[entry.key] = min(entry.rank, first_ranks.get(entry.key, entry.rank))

    return first_ranks


def _needs_process(entry: Given, start: StartInputs) -> bool:
    """Return whether a process must make the model's folder first: by fetching a remote source, or
    by opening a GGUF file.
    """
    if entry.key not in (MODEL, DRAFT) or entry.text == DEMO:
        return False

    if entry.key == MODEL and is_gguf(entry.text):
        return Path(entry.text).is_file()

    path = local_path(entry.text)
    bases = (start.folder or start.cwd, start.cwd)
    exists_locally = any((base / path).is_dir() for base in bases)
    try:
        return remote(path, exists_locally=exists_locally) is not None
    except ModelUnusable as error:
        raise ModelUnusable(f"{error} ({entry.source})") from None


def _opened_before(entry: Given, givens: list[Given], start: StartInputs) -> Path | None:
    """Return the folder that a GGUF file, which may be one of the catalogue, was opened to before.
    None: it was not, or it is no such file.
    """
    if entry.text not in CATALOGUE and not is_gguf(entry.text):
        return None

    candidates = [candidate for candidate in givens if candidate.key == "download_dir"]
    if candidates:
        first = min(candidates, key=lambda candidate: candidate.rank)
        download_dir = start.cwd / first.text
    else:
        download_dir = default_download_dir(start.environ)

    return opened_folder(entry.text, download_dir.absolute())


def _without_models_of_images(givens: list[Given], values: Values, is_whole: bool) -> list[Given]:
    """Return `givens` without the models that variables of AWS's images name, if the command line
    names another one: by a folder that holds a whole model, or whose serving.properties names one.
    """
    start = values.start
    is_in_file = any(entry.key == MODEL and entry.is_from_file for entry in givens)
    if not start.is_folder_asked or not (is_whole or is_in_file):
        return givens

    of_images: list[Given] = []
    for entry in givens:
        if entry.key == MODEL and entry.rank.layer == PLATFORM:
            of_images.append(entry)

    for entry in of_images:
        values.warn(
            f"{entry.assignment}: has no effect beside {start.folder}, which the command line names"
        )

    return [entry for entry in givens if entry not in of_images]


def check_sources(resolution: Resolution) -> None:
    """Refuse a GGUF file that the engine does not read.

    User code waits neither for a model of a hub nor for a GGUF file, since it loads them itself, as
    with the reference.
    """
    missing = resolution.missing
    if not resolution.is_user_code:
        check_engine(missing, resolution.chosen_engine)
        return

    resolution.missing = tuple(
        text for text in missing if not isinstance(parse(text), HubModel | GgufSource)
    )
