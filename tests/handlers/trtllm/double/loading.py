"""Makes a double importable for a while, and our adapter anew on top of it."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.handlers.trtllm.double.package import write_double

PACKAGES = ("tensorrt_llm", "handlers.lmi_trtllm")

# The modules of each double that is open; the last one's are importable
_loaded: list[dict[str, ModuleType]] = []


@contextmanager
def double(profile: str) -> Iterator[Any]:
    """Import `handlers.lmi_trtllm.executor` over a double. Yields its class of executors.

    Several may be open. The last one that was opened is what `tensorrt_llm` means.
    """
    with loaded(profile):
        yield importlib.import_module("handlers.lmi_trtllm.executor").TrtllmExecutor


@contextmanager
def loaded(profile: str) -> Iterator[Path]:
    """Make a double importable, and forget our adapter's modules meanwhile. Yields the double's
    folder.
    """
    with tempfile.TemporaryDirectory(prefix="lmi-trtllm-double-") as folder:
        write_double(Path(folder), profile)
        if not _loaded:
            _loaded.append(_taken())
        else:
            _loaded[-1] |= _taken()

        modules: dict[str, ModuleType] = {}
        _loaded.append(modules)
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield Path(folder)
        finally:
            sys.path.remove(folder)
            importlib.invalidate_caches()
            _close(modules)


def _close(modules: dict[str, ModuleType]) -> None:
    if _loaded[-1] is modules:
        _taken()
        _loaded.pop()
        _put(_loaded[-1])
    else:
        _loaded[:] = [modules_loaded for modules_loaded in _loaded if modules_loaded is not modules]

    # What was there before any double
    if len(_loaded) == 1:
        _loaded.clear()


def _taken() -> dict[str, ModuleType]:
    """The modules of both packages, which are not importable any more."""
    names = [
        name
        for name in sys.modules
        if name.startswith(tuple(f"{package}." for package in PACKAGES)) or name in PACKAGES
    ]
    parent = sys.modules.get("handlers")
    if parent is not None and hasattr(parent, "lmi_trtllm"):
        del parent.lmi_trtllm

    return {name: sys.modules.pop(name) for name in names}


def _put(modules: dict[str, ModuleType]) -> None:
    sys.modules.update(modules)
    if "handlers.lmi_trtllm" in modules:
        sys.modules["handlers"].lmi_trtllm = modules["handlers.lmi_trtllm"]  # type: ignore[attr-defined]
