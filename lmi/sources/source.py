"""Says what a text names as the source of a model or adapter.

/opt/ml/model, ./model, file:///…   a local folder
owner/name                          a repository of the hub; option.model_id may leave the owner out
s3://bucket/prefix                  every object below `prefix/`
s3://bucket/key.tar.gz              an archive; .tgz, .tar.bz2, .tar.zst and .tar too
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lmi.errors import ModelUnusable, shorten

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
ARCHIVE_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.zst", ".tar")
# The hub's rule for names: letters, digits, "_", "-" and ".", of which the last two neither begin nor end a name. A
# name in .gguf is meant as a file.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
HUB_ID = re.compile(rf"(?=.{{1,96}}$)(?!.*(?:--|\.\.|\.git$|\.gguf$))(?:{_PART}/)?{_PART}")
KNOWN = "a folder, owner/name of a hub, s3://bucket/prefix, s3://bucket/key.tar.gz (.tgz, .tar.bz2, .tar.zst, .tar)"


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository of the hub, `owner/name`."""

    id: str

    def __str__(self) -> str:
        return self.id


@dataclass(frozen=True, slots=True)
class S3Model:
    """An archive of a bucket, or every object whose key begins with `key`, which ends in "/" unless it is empty."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}".rstrip("/")

    @property
    def is_archive(self) -> bool:
        return self.key.lower().endswith(ARCHIVE_SUFFIXES)


RemoteSource = HubModel | S3Model


def remote(text: str, *, exists_locally: bool, needs_owner: bool = False) -> RemoteSource | None:
    """Return the remote source that `text` names, or None if it names a local folder.

    `exists_locally` is whether there is a folder of this name, which beats a hub id. `needs_owner` is true for the
    folder of `lmi serve`, where a single word is never an id. Raises ModelUnusable for a scheme that is not known.
    """
    if exists_locally or text.startswith("file:"):
        return None
    if (scheme := SCHEME.match(text)) is not None:
        return _with_scheme(text, scheme[1])
    if HUB_ID.fullmatch(text) and ("/" in text or not needs_owner):
        return HubModel(text)
    return None


def parse(text: str) -> RemoteSource:
    """Return the remote source that `text` names. Raises ModelUnusable if it names none."""
    source = remote(text, exists_locally=False)
    if source is None:
        raise ModelUnusable(f"{shorten(text)}: no such source; there are {KNOWN}")
    return source


def _with_scheme(text: str, scheme: str) -> S3Model:
    if scheme.lower() != "s3":
        raise ModelUnusable(f"{shorten(text)}: no source has the scheme {scheme}://; there are {KNOWN}")
    bucket, _, key = text[len("s3://") :].partition("/")
    if not bucket:
        raise ModelUnusable(f"{shorten(text)}: names no bucket; the form is s3://bucket/prefix")
    prefix = key.rstrip("/")
    return S3Model(bucket, key if key.lower().endswith(ARCHIVE_SUFFIXES) else f"{prefix}/" * bool(prefix))
