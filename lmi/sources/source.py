"""Says what a text names as the source of a model or adapter.

    /opt/ml/model, ./model, file:///…   a local folder
    owner/name                          a repository of the hub; option.model_id may leave the
                                        owner out
    owner/name:Q4_K_M                   the GGUF model of a repository that has this word in its
                                        name
    owner/name/model.gguf               this GGUF file of a repository; owner/name:model.gguf too
    smollm2                             a model of the catalogue (`catalogue.py`)
    s3://bucket/prefix                  every object below `prefix/`
    s3://bucket/key.tar.gz              an archive; .tgz, .tar.bz2, .tar.zst and .tar too
    s3://bucket/model.gguf              a GGUF file
    https://host/model.gguf             a GGUF file of a web server; http:// too

It also says which files of a source are taken, and whether a folder with them holds a whole model
or adapter.
"""

import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import ClassVar, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from lmi.errors import ModelUnusable, SecurityRefused, shorten
from lmi.shared.gguf_file import parts_of
from lmi.shared.model_files import read_bounded
from lmi.sources.catalogue import CATALOGUE, PackagedModel
from lmi.sources.paths import shown

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
ARCHIVE_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.zst", ".tar")
# The hub's rule for names: letters, digits, "_", "-" and ".", of which the last two neither begin
# nor end a name. A name in .gguf is meant as a file.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
HUB_ID = re.compile(rf"(?=.{{1,96}}$)(?!.*(?:--|\.\.|\.git$|\.gguf$))(?:{_PART}/)?{_PART}")
# A GGUF model of a repository.
HUB_GGUF = re.compile(
    r"(?P<id>[^/:]+/[^/:]+)(?::(?P<word>[A-Za-z0-9_.-]{1,64})|[:/](?P<file>[^:]+\.gguf))"
)
KNOWN = (
    "a folder, owner/name of a hub, owner/name:Q4_K_M and owner/name/model.gguf for GGUF, "
    "s3://bucket/prefix, s3://bucket/model.gguf, s3://bucket/key.tar.gz (.tgz, .tar.bz2, "
    ".tar.zst, .tar), https://host/model.gguf"
)
# Which files are taken, and which are not although they match.
TAKEN = ("*.json", "*.txt", "*.model*", "*.spm", "*.jinja", "*.tiktoken", "*.safetensors")
NEVER = ("*.gguf", "*.onnx", "*.h5", "*.msgpack")
PICKLES = (".bin", ".pt", ".pth")
# The folder with the weights in the form of the authors' own library.
ORIGINAL = "original"
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
INDEX = ".index.json"
SAFETENSORS = ".safetensors"
GGUF = ".gguf"
# It lies in a folder that was made of a GGUF file.
OPENED_GGUF = "opened-gguf.json"
# A message names so many entries of a folder.
NAMES_SHOWN = 5

log = logging.getLogger(__name__)


class NoObjects(ModelUnusable):
    """A prefix of S3 has no objects."""


class HubModel(msgspec.Struct, frozen=True):
    """A repository of the hub, `owner/name`, or one of the GGUF models in it."""

    id: str
    gguf: str = ""
    """The path of a GGUF file, or a word of its name such as Q4_K_M."""

    def __str__(self) -> str:
        if not self.gguf:
            return self.id

        mark = "/" if self.gguf.endswith(GGUF) else ":"
        return f"{self.id}{mark}{self.gguf}"

    @property
    def names_gguf(self) -> bool:
        return bool(self.gguf)


class S3Model(msgspec.Struct, frozen=True):
    """A model in a bucket: an archive, a GGUF file, or every object whose key begins with `key`. In
    the last case `key` is empty, or ends in "/".
    """

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}".rstrip("/")

    @property
    def is_archive(self) -> bool:
        return self.key.lower().endswith(ARCHIVE_SUFFIXES)

    @property
    def names_gguf(self) -> bool:
        return self.key.endswith(GGUF)


class UrlPart(NamedTuple):
    """A file of a model at a web server."""

    name: str
    url: str


class UrlModel(msgspec.Struct, frozen=True):
    """A GGUF file of a web server. Of a split model it is the first."""

    url: str
    names_gguf: ClassVar = True

    def __str__(self) -> str:
        """The URL without the secrets that its user and its query may be."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def parts(self) -> list[UrlPart]:
        """Return the files of the model, in their order."""
        parts = urlsplit(self.url)
        folder, _, last = parts.path.rpartition("/")
        files: list[UrlPart] = []
        for file in parts_of(Path(last)):
            url = parts._replace(path=f"{folder}/{file.name}", fragment="").geturl()
            files.append(UrlPart(unquote(file.name), url))

        return files


class GgufSource(msgspec.Struct, frozen=True):
    """A GGUF file of this machine, of which a folder is made. Of a split model it is the first."""

    file: Path
    names_gguf: ClassVar = True

    def __str__(self) -> str:
        return str(self.file)


RemoteSource = HubModel | S3Model | UrlModel | PackagedModel


def remote(text: str, *, exists_locally: bool, needs_owner: bool = False) -> RemoteSource | None:
    """Return the remote source that `text` names, or None if it names a local folder. Raises
    ModelUnusable for a scheme that is not known.

    A folder of that name (`exists_locally`) goes before a model of the catalogue, and that before a
    repository of the hub. With `needs_owner` a single word is no repository, as for the folder that
    `lmi serve` gets.
    """
    if exists_locally or text.startswith("file:"):
        return None

    if text in CATALOGUE:
        return CATALOGUE[text]

    scheme = SCHEME.match(text)
    if scheme is None:
        return _hub_model(text, needs_owner)

    if scheme[1].lower() in ("http", "https"):
        return _url_model(text)

    if scheme[1].lower() != "s3":
        raise ModelUnusable(
            f"{shorten(text)}: no source has the scheme {scheme[0]}; there are {KNOWN}"
        )

    return _s3_model(text)


def _s3_model(text: str) -> S3Model:
    """Return what a text that begins with s3:// names. Raises ModelUnusable without a bucket."""
    bucket, _, key = text[len("s3://") :].partition("/")
    if not bucket:
        raise ModelUnusable(f"{shorten(text)}: names no bucket; the form is s3://bucket/prefix")

    model = S3Model(bucket, key)
    if model.is_archive or model.names_gguf:
        return model

    prefix = key.rstrip("/")
    return S3Model(bucket, f"{prefix}/" if prefix else "")


def _url_model(text: str) -> UrlModel:
    """Return what a URL names. Raises ModelUnusable unless it is a GGUF file."""
    try:
        path = urlsplit(text).path
    except ValueError as error:
        raise ModelUnusable(f"{shorten(text)}: {error}") from None

    if not path.endswith(GGUF):
        raise ModelUnusable(
            f"{shorten(text)}: of a web server lmi takes a GGUF file, whose path ends in {GGUF}; "
            f"there are {KNOWN}"
        )

    return UrlModel(text)


def _hub_model(text: str, needs_owner: bool) -> HubModel | None:
    """Return what a text names at a hub, or None if it is no name there."""
    has_owner = "/" in text
    if HUB_ID.fullmatch(text) and (has_owner or not needs_owner):
        return HubModel(text)

    match = HUB_GGUF.fullmatch(text)
    if match is None or not HUB_ID.fullmatch(match["id"]):
        return None

    return HubModel(match["id"], gguf=match["word"] or match["file"])


def parse(text: str) -> RemoteSource | GgufSource:
    """Return the source that `text` names, which may be the absolute path of a GGUF file. Raises
    ModelUnusable if it names none.
    """
    if text.startswith("/") and text.endswith(GGUF):
        return GgufSource(Path(text))

    source = remote(text, exists_locally=False)
    if source is None:
        raise ModelUnusable(f"{shorten(text)}: no such source; there are {KNOWN}")

    return source


def chosen(
    paths: Iterable[str], *, allow_pickle: bool = False, trust_remote_code: bool = False
) -> list[str]:
    """Return the paths that are taken, sorted. Each folder is judged by itself.

    Pickles are taken only from a folder without safetensors. Weights of the authors' own library
    (`consolidated*`) are not taken if the same weights lie beside them as `model*.safetensors`.
    """
    paths_by_folder: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        paths_by_folder[str(PurePosixPath(path).parent)].append(path)

    chosen_paths: list[str] = []
    for siblings in paths_by_folder.values():
        patterns = [*TAKEN]
        if trust_remote_code:
            patterns.append("*.py")

        if allow_pickle and not any(path.endswith(SAFETENSORS) for path in siblings):
            patterns += [f"*{suffix}" for suffix in PICKLES]

        never = [*NEVER]
        if any(_matches(path, "model*.safetensors") for path in siblings):
            never.append("consolidated*")

        for path in siblings:
            is_original = PurePosixPath(path).parts[0] == ORIGINAL
            if _matches(path, *patterns) and not _matches(path, *never) and not is_original:
                chosen_paths.append(path)

    return sorted(chosen_paths)


def _matches(path: str, *patterns: str) -> bool:
    """Return whether the last name of a path matches one of the patterns."""
    name = PurePosixPath(path).name
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class _Index(msgspec.Struct):
    """An index of weights, which lie in several files."""

    # The file of each tensor.
    weight_map: dict[str, str]


def fault(folder: Path, *, is_adapter: bool = False) -> str | None:
    """Return what `folder` lacks to be a whole model or adapter, or None if it is whole: if it has
    a configuration, and one file of weights or all files that an index names.
    """
    if not folder.is_dir():
        return "is not a folder" if folder.exists() else "does not exist"

    names = sorted(entry.name for entry in folder.iterdir())
    weights = names
    if is_adapter:
        weights = [name for name in names if name.startswith("adapter_model.")]

    missing_config = config_fault(names, is_adapter)
    if missing_config is not None:
        return missing_config

    return _weights_fault(folder, weights, names)


def check(
    folder: Path, *, name: str = "", allow_pickle: bool = False, is_adapter: bool = False
) -> None:
    """Raise ModelUnusable if the folder is not whole, or SecurityRefused if all its weights are
    pickled and that is not allowed. Messages begin with `name`, or with the folder's path.
    """
    subject = name or str(folder)
    reason = fault(folder, is_adapter=is_adapter)
    if reason is not None:
        raise ModelUnusable(f"{subject}: {reason}")

    names = [entry.name for entry in folder.iterdir()]
    refuse_pickles(subject, names, allow_pickle=allow_pickle)


def warn_of_properties(subject: str, names: Iterable[str]) -> None:
    """Warn if a remote source brings options, because they do not count."""
    if "serving.properties" in names:
        log.warning("%s: its serving.properties is not read, only the server's own is", subject)


def refuse_pickles(subject: str, names: Iterable[str], *, allow_pickle: bool) -> None:
    """Raise SecurityRefused if all weights among the names of a folder are pickled and that is not
    allowed.
    """
    names = list(names)
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    if pickles and not allow_pickle and not any(name.endswith(SAFETENSORS) for name in names):
        raise SecurityRefused(
            f"{subject}: {shown(pickles[0])} is pickled, which can run code, and there are no "
            "*.safetensors; option.allow_pickle=true loads it if you trust it"
        )


def descended(folder: Path) -> Path:
    """Return the folder inside `folder` if that holds nothing else, as many archives are packed, or
    else `folder`.
    """
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    if len(entries) == 1 and entries[0].is_dir():
        return entries[0]

    return folder


def config_fault(names: list[str], is_adapter: bool) -> str | None:
    """Return the fault of a folder with these names that it has no configuration, or None if it has
    one.
    """
    config = ADAPTER_CONFIG if is_adapter else CONFIG
    if config in names:
        return None

    kind = "an adapter" if is_adapter else "a model"
    return f"{listed(names)}; {kind} has {config}"


def _weights_fault(folder: Path, weights: list[str], names: list[str]) -> str | None:
    """Return what keeps the weights from being whole, or None. Safetensors count before pickles,
    and an index before single files; of several indexes one has to be whole.
    """
    for suffixes in ((SAFETENSORS,), PICKLES):
        index_suffixes = tuple(suffix + INDEX for suffix in suffixes)
        indexes = [name for name in weights if name.endswith(index_suffixes)]
        if indexes:
            faults = [_index_fault(folder, index) for index in indexes]
            return None if None in faults else faults[0]

        if any(name.endswith(suffixes) for name in weights):
            return None

    if OPENED_GGUF in names:
        return None

    return f"{listed(names)}; no weights are there (*{SAFETENSORS})"


def _index_fault(folder: Path, index: str) -> str | None:
    """Return what is wrong with an index, or None if all its files are there."""
    try:
        data = read_bounded(folder / index)
        shards = set(msgspec.json.decode(data, type=_Index).weight_map.values())
    except (OSError, ValueError) as error:
        return f"{index} is not an index of weights: {error}"

    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    if not missing:
        return None

    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"has no {shown(missing[0])}{more}, which {index} names"


def unreadable(folder: Path) -> Path | None:
    """Return a file of a model, or its folder, that the effective user of this process may not
    read. None: it may read them all.
    """
    if not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
        return folder

    patterns = [*TAKEN, f"*{GGUF}"]
    patterns += [f"*{suffix}" for suffix in PICKLES]
    for file in sorted(folder.iterdir()):
        if _matches(file.name, *patterns) and not _is_readable(file):
            return file

    return None


def _is_readable(file: Path) -> bool:
    """Return whether this process may read a file. A link that leads nowhere counts as readable."""
    try:
        os.stat(file)
    except FileNotFoundError:
        return True
    except OSError:
        return False

    return os.access(file, os.R_OK, effective_ids=True)


def listed(names: list[str]) -> str:
    """Return what a folder with these entries holds, for a message about it."""
    if not names:
        return "is empty"

    more = ", …" if len(names) > NAMES_SHOWN else ""
    return f"holds {', '.join(map(shown, names[:NAMES_SHOWN]))}{more}"
