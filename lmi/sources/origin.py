"""Where a file of this machine was fetched from: traces in its path, and beside it."""

import re
from pathlib import Path

# The cache of a hub's client.
OF_CACHE = re.compile(r"/models--[^/]+/snapshots/[^/]+/")
# What a hub's client notes in a folder that it fills with a repository.
HUB_NOTES = ".cache/huggingface/download"
# A folder of `s3.py: Store`.
OF_STORE = re.compile("[0-9a-f]{64}")


def came_from(file: Path) -> str:
    """Return where a file was fetched from, by this server or another client of a hub, or "" if
    nothing shows it.

    The path of a file in the cache of a hub or in this server's own store shows it. A hub's client
    that fills any other folder leaves a note for each file there.
    """
    path = file.parent.resolve() / file.name
    if not file.is_file():
        return ""

    if OF_CACHE.search(str(path)):
        return "a hub"

    for folder in path.parents:
        note = folder / HUB_NOTES / path.relative_to(folder)
        if note.with_name(f"{note.name}.metadata").is_file():
            return "a hub"

        store = folder.parent
        is_model_of_store = folder.name == "model" and OF_STORE.fullmatch(store.name)
        if is_model_of_store and (store / "blobs").is_dir():
            return "a bucket"

    return ""
