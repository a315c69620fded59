"""The paths that files of a source may have, and how messages show them.

A hub, a bucket or an archive may list any text as a path.
"""

import os
import re

from lmi.errors import ModelUnusable, SecurityRefused, shorten

# Characters that end a line or turn its direction.
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
MAX_PATH_BYTES = 1024
# The bytes of each name in a path. File systems allow 255, of which a file that is half written
# needs some.
MAX_NAME_BYTES = 240
# The most names in a path. Each folder costs a call inside a call when they are removed.
MAX_FOLDERS = 32


def check_path(subject: str, path: str) -> None:
    """Raise SecurityRefused for a path that leaves its folder or has control characters, and
    ModelUnusable for one that is longer or deeper than a model needs.
    """
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in path:
        raise SecurityRefused(f"{subject}: {shown(path)} is not a path inside it")

    if CONTROLS.search(path):
        raise SecurityRefused(f"{subject}: the path {shorten(path)} has control characters")

    longest = max(len(os.fsencode(part)) for part in parts)
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES or longest > MAX_NAME_BYTES or len(parts) > MAX_FOLDERS:
        limits = (
            f"{MAX_PATH_BYTES} bytes, {MAX_NAME_BYTES} in each of its names, and "
            f"{MAX_FOLDERS} names"
        )
        size = f"has {num_bytes} bytes, {longest} in its longest name, and {len(parts)} names"
        raise ModelUnusable(
            f"{subject}: the path {shorten(path)} {size}; a path has at most {limits}"
        )


def shown(name: str) -> str:
    """Return a name for a message: as it is, or quoted if it is long or cannot be printed."""
    if name.isprintable() and len(name) <= MAX_NAME_BYTES:
        return name

    return shorten(name)
