"""Fetches one source and returns its local folder."""

from __future__ import annotations

from importlib.util import find_spec

from lmi.errors import ModelUnusable
from lmi.shared.fetches import FetchedSource
from lmi.sources.archive import check_readable
from lmi.sources.files import check
from lmi.sources.job import FetchJob
from lmi.sources.source import HubModel, parse


def fetch(job: FetchJob) -> FetchedSource:
    """Fetch what is missing of a source and return its folder.

    Raises ModelUnusable, SecurityRefused or SourceUnreachable. All of them name the source.
    """
    wanted = job.wanted
    source = parse(wanted.source)
    job.progress.begin(source, 0, 0)
    if isinstance(source, HubModel):
        from lmi.sources.hub import HubFetch  # only here, because the client is large

        folder, revision = HubFetch(source, job).fetch()
    else:
        if find_spec("boto3") is None:
            raise ModelUnusable(f"{source}: S3 needs boto3, which is not installed: pip install boto3")
        check_readable(str(source))
        from lmi.sources.s3 import S3Fetch

        folder, revision = S3Fetch(source, job).fetch(), ""
    check(folder, name=wanted.source, allow_pickle=wanted.allow_pickle, is_adapter=wanted.is_adapter)
    return FetchedSource(source=wanted.source, folder=str(folder), revision=revision)
