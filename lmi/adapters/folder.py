"""The folder of the adapters that every engine of a model should have."""

import time
from pathlib import Path

import msgspec

from lmi.runtime import Runtime
from lmi.shared.desired_state import Entry, Folder, State, key


class Adapter(Entry, frozen=True, kw_only=True):
    """A LoRA adapter that every engine should have.

    `path` is the local folder of its files, and `src` the source that was named. A static one lies beside the model.
    `stamp` tells an entry from those that its name had before.
    """

    path: str
    stamp: int = msgspec.field(default_factory=time.monotonic_ns)
    src: str = ""
    preload: bool = True
    is_pinned: bool = False
    is_static: bool = False


def adapters_of(runtime: Runtime) -> Folder[Adapter]:
    """Return the folder of the model's adapters that should be loaded."""
    return Folder(runtime.path / "adapters" / key(runtime.config.model.name), Adapter)


def register_beside(runtime: Runtime) -> None:
    """Register the adapters that lie beside the model, so that every engine loads them before it is ready."""
    folder = adapters_of(runtime)
    for name, path in runtime.config.model.adapters.items():
        src = "/".join(Path(path).parts[-2:])  # as the model's author knows it
        folder.add(Adapter(name=name, path=path, src=src, is_static=True, state=State.READY))
