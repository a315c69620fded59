"""Chooses which files of a hub's repository or of a prefix in S3 are taken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from lmi.errors import SecurityRefused

TAKEN = ("*.json", "*.txt", "*.model*", "*.spm", "*.jinja", "*.tiktoken", "*.safetensors")
NEVER = ("*.gguf", "*.onnx", "*.h5", "*.msgpack")
PICKLES = ("*.bin", "*.pt", "*.pth")
WEIGHTS = "*.safetensors"
ORIGINAL = "original"  # the folder with the weights in the form of the authors' own library


def chosen(paths: Iterable[str], *, allow_pickle: bool = False, trust_remote_code: bool = False) -> list[str]:
    """Return the paths that are taken, sorted. Each folder is judged separately.

    Pickles are taken only from a folder without safetensors. Weights of the authors' own library (`consolidated*`)
    are not taken where the same weights lie beside them as `model*.safetensors`.
    """
    folders: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        folders[str(PurePosixPath(path).parent)].append(path)
    taken = (_of_folder(each, allow_pickle, trust_remote_code) for each in folders.values())
    return sorted(path for found in taken for path in found if PurePosixPath(path).parts[0] != ORIGINAL)


def check_inside(subject: str, paths: Iterable[str]) -> None:
    """Raise SecurityRefused for a path that leaves its folder. A hub or bucket may list any text as a path."""
    for path in paths:
        if any(part in ("", ".", "..") for part in path.split("/")) or "\0" in path:
            raise SecurityRefused(f"{subject}: {path} is not a path inside it")


def only_pickles(names: Iterable[str]) -> list[str]:
    """Return the pickled weights among the names of one folder, sorted, if it has no others."""
    names = list(names)
    return [] if any(_is(name, WEIGHTS) for name in names) else sorted(name for name in names if _is(name, *PICKLES))


def _of_folder(paths: list[str], allow_pickle: bool, trust_remote_code: bool) -> list[str]:
    patterns = list(TAKEN)
    if allow_pickle and not any(_is(path, WEIGHTS) for path in paths):
        patterns += PICKLES
    if trust_remote_code:
        patterns.append("*.py")
    never = [*NEVER, "consolidated*"] if any(_is(path, "model*.safetensors") for path in paths) else NEVER
    return [path for path in paths if _is(path, *patterns) and not _is(path, *never)]


def _is(path: str, *patterns: str) -> bool:
    name = PurePosixPath(path).name
    return any(fnmatchcase(name, pattern) for pattern in patterns)
