"""Opens a GGUF file into a folder of the download folder, where the next start finds it."""

import logging
import shutil
from pathlib import Path

from lmi.sources.fetches import Place, write
from lmi.sources.gguf.find import OpenedFrom, folder_of_file, opened_before
from lmi.sources.gguf.folder import open_into
from lmi.sources.job import FetchJob
from lmi.sources.source import OPENED_GGUF

BYTES_OF_FOLDER = 64 << 20

log = logging.getLogger(__name__)


def open_file(file: Path, job: FetchJob) -> Path:
    """Return the folder that is made of a file, by one process at a time.

    Raises ModelUnusable for a file that is broken or not read, and a disk that is full.
    """
    download_dir = Path(job.wanted.download_dir).absolute()
    folder = folder_of_file(file, download_dir)
    place = Place(download_dir, "SERVING_DOWNLOAD_DIR", file, spare_bytes=0)
    with place.only_one(folder.with_suffix(".lock")):
        if opened_before(file, download_dir) is None:
            with place.writing(BYTES_OF_FOLDER):
                _open(file, folder)
    return folder


def _open(file: Path, folder: Path) -> None:
    made_of = OpenedFrom.of(file)
    new = folder.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    open_into(file, new)
    write(new / OPENED_GGUF, made_of)

    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
