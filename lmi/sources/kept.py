"""What lies in the caches of this machine: models of the catalogue, repositories of the hub, what
came from S3, and what was made of GGUF files. `lmi list` shows it and `lmi rm` removes it.
"""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from lmi.errors import ModelUnusable
from lmi.sources.catalogue import CATALOGUE, PackagedModel
from lmi.sources.gguf.find import OPENED_PREFIX, OpenedFrom

HUB_PREFIX = "models--"
OF_STORE = "[0-9a-f]" * 64


class KeptModel(Struct, frozen=True):
    """A model, or an adapter, that was fetched, or the folder that was made of a GGUF file of
    somebody's own.
    """

    name: str
    """What fetched it: a name of the catalogue, an id of the hub, or a URL. Else the path of the
    GGUF file.
    """

    source: str
    """`catalogue`, `hub`, `s3`, `url` or `gguf`."""

    num_bytes: int
    folder: Path
    lock: Path
    opened: tuple["KeptModel", ...] = ()
    """What was made of the GGUF files among its own. It is counted with it, and goes with it."""

    def remove(self) -> None:
        """Remove its files. Raises ModelUnusable while a process fetches it.

        A server that has the files open keeps them until it ends.
        """
        self.lock.parent.mkdir(parents=True, exist_ok=True)
        with self.lock.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ModelUnusable(f"{self.name}: a process fetches it now") from None

            for model in self.opened:
                model.remove()

            shutil.rmtree(self.folder)


def kept_models(
    download_dir: Path, hub_cache: Path, catalogue: Mapping[str, PackagedModel] = CATALOGUE
) -> list[KeptModel]:
    """Return what lies in both caches, sorted by its name. A folder that was made of a GGUF file
    belongs to the model that has the file.
    """
    fetched_models: list[KeptModel] = []
    fetched_models += _of_catalogue(download_dir, catalogue)
    fetched_models += _of_hub(hub_cache)
    fetched_models += _of_urls(download_dir)

    models: list[KeptModel] = []
    opened_models = list(_of_gguf(download_dir))
    for model in fetched_models:
        folder = model.folder.absolute()
        opened_here = [file for file in opened_models if Path(file.name).is_relative_to(folder)]
        opened_models = [file for file in opened_models if file not in opened_here]
        num_bytes = model.num_bytes + sum(file.num_bytes for file in opened_here)
        models.append(replace(model, num_bytes=num_bytes, opened=tuple(opened_here)))

    models += opened_models
    return sorted(models, key=lambda model: model.name)


def _of_catalogue(
    download_dir: Path, catalogue: Mapping[str, PackagedModel]
) -> Iterator[KeptModel]:
    for model in catalogue.values():
        folder = model.kept(download_dir)
        if folder is not None:
            lock = folder.with_name(f"{folder.name}.lock")
            yield KeptModel(model.name, "catalogue", _size(folder), folder, lock)


def _of_hub(hub_cache: Path) -> Iterator[KeptModel]:
    for folder in hub_cache.glob(f"{HUB_PREFIX}*"):
        name = folder.name.removeprefix(HUB_PREFIX).replace("--", "/")
        lock = hub_cache / ".locks" / folder.name / "lmi.lock"
        yield KeptModel(name, "hub", _size(folder), folder, lock)


def _of_urls(download_dir: Path) -> Iterator[KeptModel]:
    for folder in download_dir.glob(OF_STORE):
        try:
            name = (folder / "url").read_text()
        except OSError:
            # An earlier version of lmi wrote no URL.
            name = f"s3:{folder.name[:12]}"

        source = "url" if name.startswith("http") else "s3"
        yield KeptModel(name, source, _size(folder), folder, folder.with_suffix(".lock"))


def _of_gguf(download_dir: Path) -> Iterator[KeptModel]:
    """Yield what was made of GGUF files, by the path of the file. What cannot be read has the name
    of its folder.
    """
    for folder in download_dir.glob(f"{OPENED_PREFIX}*"):
        if folder.suffix or not folder.is_dir():
            continue

        name = folder.name
        opened_from = OpenedFrom.read(folder)
        if opened_from is not None and opened_from.files:
            name = opened_from.files[0].path

        yield KeptModel(name, "gguf", _size(folder), folder, folder.with_suffix(".lock"))


def _size(folder: Path) -> int:
    """Return the bytes of the files below a folder, links not counted."""
    num_bytes = 0
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            if not path.is_symlink():
                num_bytes += path.stat().st_size

    return num_bytes


def not_kept(models: Iterable[KeptModel]) -> list[str]:
    """Return the names of the catalogue's models that are not among these."""
    names = {model.name for model in models}
    return [name for name in CATALOGUE if name not in names]
