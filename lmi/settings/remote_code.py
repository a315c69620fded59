"""Reads from a checkpoint whether Python code comes with it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path


def unrun_code(folder: Path) -> str | None:
    """Return the line that a checkpoint's own code is not run, or None if its config.json names no code."""
    file = folder / "config.json"
    with suppress(OSError, ValueError):  # the engine says what is wrong with the file
        config = json.loads(file.read_bytes())
        if isinstance(config, dict) and config.get("auto_map"):
            return (
                f"{file}: auto_map names Python code of the checkpoint, which is not run; "
                "option.trust_remote_code=true runs it, if you trust it and the engine can"
            )
    return None
