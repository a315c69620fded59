"""Reads from a checkpoint whether Python code comes with it."""

from __future__ import annotations

import json
from pathlib import Path


def unrun_code(folder: Path) -> list[str]:
    """Return the line that a checkpoint's own code is not run, or no line if its config.json names no code."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):  # the engine says what is wrong with the file
        return []
    if not isinstance(config, dict) or not config.get("auto_map"):
        return []
    advice = "option.trust_remote_code=true runs it, if you trust it and the engine can"
    return [f"{file}: auto_map names Python code of the checkpoint, which is not run; {advice}"]
