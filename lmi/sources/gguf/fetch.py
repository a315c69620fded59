"""Opens a GGUF file into a folder of the download folder, where the next start finds it."""

import logging
import shutil
from pathlib import Path

from lmi.sources.fetches import write
from lmi.sources.gguf.find import OpenedFrom, folder_of_file, kept_folder
from lmi.sources.gguf.folder import open_into
from lmi.sources.job import FetchJob
from lmi.sources.place import Place
from lmi.sources.source import OPENED_GGUF

BYTES_OF_FOLDER = 64 << 20

log = logging.getLogger(__name__)


def open_file(file: Path, job: FetchJob) -> Path:
    """Return the folder that is made of a file. Only one process makes it at a time.

    Raises ModelUnusable for a file that is broken or of a kind that is not read, and for a disk
    that is full.
    """
    download_dir = Path(job.wanted.download_dir).absolute()
    folder = folder_of_file(file, download_dir)
    place = Place(download_dir, "SERVING_DOWNLOAD_DIR", file, spare_bytes=0)
    with place.only_one(folder.with_suffix(".lock")):
        if kept_folder(file, download_dir) is None:
            with place.writing(BYTES_OF_FOLDER):
                _open(file, folder)

    return folder


def _open(file: Path, folder: Path) -> None:
    opened_from = OpenedFrom.of(file)
    new_folder = folder.with_suffix(".new")
    shutil.rmtree(new_folder, ignore_errors=True)
    new_folder.mkdir(parents=True)
    open_into(file, new_folder)
    write(new_folder / OPENED_GGUF, opened_from)

    shutil.rmtree(folder, ignore_errors=True)
    new_folder.rename(folder)
