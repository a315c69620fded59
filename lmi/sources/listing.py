"""Chooses which files of a hub's or a bucket's listing are taken, before a byte of them is fetched.

A listing without other weights than GGUF is one of GGUF models, of which one is taken: the named
one, or else as llama-server chooses of a hub's, that of Q4_K_M or the first. A split model is one
model.
"""

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from lmi.errors import ModelUnusable
from lmi.settings.handler import announced
from lmi.shared.gguf_file import first_part, parts_of
from lmi.sources.fetches import WantedSource
from lmi.sources.gguf.find import NO_MODEL
from lmi.sources.paths import check_path, shown
from lmi.sources.source import (
    GGUF,
    PICKLES,
    SAFETENSORS,
    HubModel,
    chosen,
    config_fault,
    listed,
    refuse_pickles,
    warn_of_properties,
)

USUAL_WORD = "Q4_K_M"
# A repository has a file for each of some 25 quantisations.
MODELS_SHOWN = 30


def taken(source: object, listing: Iterable[str], wanted_source: WantedSource) -> list[str]:
    """Return which paths of a source's listing are taken: those of a GGUF model in their order, or
    else all that belong to a model in safetensors, or simply all.

    Raises ModelUnusable or SecurityRefused for a listing that has no such model, or that the
    options refuse, and what `check_path` raises for what is taken.
    """
    subject = str(source)
    paths = list(listing)
    if wanted_source.takes_all:
        for path in paths:
            check_path(subject, path)

        return paths

    top = [path for path in paths if "/" not in path]
    chosen_paths = gguf_paths(source, paths, is_adapter=wanted_source.is_adapter)
    if chosen_paths:
        check_engine(subject, wanted_source)
    else:
        names = sorted({path.partition("/")[0] for path in paths})
        reason = config_fault(names, wanted_source.is_adapter)
        if reason is not None:
            raise ModelUnusable(f"{subject}: {reason}")

        refuse_pickles(subject, top, allow_pickle=wanted_source.allow_pickle)
        chosen_paths = chosen(
            paths,
            allow_pickle=wanted_source.allow_pickle,
            trust_remote_code=wanted_source.trust_remote_code,
        )

    warn_of_properties(subject, top)
    for path in chosen_paths:
        check_path(subject, path)

    return chosen_paths


def gguf_paths(source: object, paths: list[str], *, is_adapter: bool = False) -> list[str]:
    """Return the paths of the GGUF model that a source means, in their order, or none where it
    means another model.

    Raises ModelUnusable, with the names of those that are there, if the named one is not, or if
    one of several must be named.
    """
    models = _first_paths(paths)
    word = source.gguf if isinstance(source, HubModel) else ""
    if word:
        first = _named(source, word, models, paths)
    elif is_adapter or not models or _has_other_weights(paths):
        return []
    elif len(models) == 1:
        first = models[0]
    elif isinstance(source, HubModel):
        usual = [path for path in models if _has_word(path, USUAL_WORD)]
        first = (usual or models)[0]
    else:
        raise ModelUnusable(
            f"{source}: it holds several models, name one of the files: {_shown(models)}"
        )

    parts = [str(part) for part in parts_of(Path(first))]
    missing = sorted(set(parts) - set(paths))
    if missing:
        raise ModelUnusable(f"{source}: it has no {shown(missing[0])}, a part of {shown(first)}")

    return parts


def _first_paths(paths: Iterable[str]) -> list[str]:
    """Return the first file of each GGUF model, sorted."""
    firsts = set()
    for path in paths:
        if path.endswith(GGUF) and not NO_MODEL.search(PurePosixPath(path).name):
            firsts.add(str(first_part(Path(path))))

    return sorted(firsts)


def _has_other_weights(paths: Iterable[str]) -> bool:
    top = [path for path in paths if "/" not in path]
    return any(path.endswith((SAFETENSORS, *PICKLES)) for path in top)


def _named(source: object, word: str, models: list[str], paths: list[str]) -> str:
    """Return the first file of the model that `word` names: a path, or a part of the file's name.
    Of several with that part it is the first.
    """
    if word.endswith(GGUF):
        first = str(first_part(Path(word)))
        fitting = [path for path in models if path == first]
    else:
        fitting = [path for path in models if _has_word(path, word)]

    if fitting:
        return fitting[0]

    if models:
        raise ModelUnusable(f"{source}: there is no such GGUF file, only {_shown(models)}")

    names = sorted({path.partition("/")[0] for path in paths})
    raise ModelUnusable(f"{source}: there is no GGUF file; the repository {listed(names)}")


def _has_word(path: str, word: str) -> bool:
    """Return whether the path of a file has a word that ends at a point, a hyphen or a slash,
    whatever the case. So Q4_K is not in Q4_K_M, nor Q4_0 in IQ4_0.
    """
    stem = path.removesuffix(GGUF)
    return re.search(rf"(?:^|[-._/]){re.escape(word)}(?=$|[-./])", stem, re.IGNORECASE) is not None


def _shown(models: list[str]) -> str:
    more = ", …" if len(models) > MODELS_SHOWN else ""
    return f"{', '.join(map(shown, models[:MODELS_SHOWN]))}{more}"


def check_engine(subject: str, wanted_source: WantedSource) -> None:
    """Raise ModelUnusable for GGUF files that the chosen engine does not read."""
    if wanted_source.reads_gguf:
        return

    readers = ", ".join(name for name, handler in announced().items() if handler.reads_gguf)
    raise ModelUnusable(
        f"{subject}: its weights are GGUF, which the chosen engine does not read; "
        f"option.rolling_batch may be {readers}"
    )
