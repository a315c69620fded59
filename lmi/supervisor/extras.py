"""Finds the extra of this package that installs a library, in the metadata of the installed package."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires

REQUIREMENT = re.compile(r"(?P<name>[\w.-]+).*; extra == ['\"](?P<extra>[\w-]+)['\"]")


def extra_with(library: str) -> str | None:
    """Return the extra that installs `library`, or None if no extra for users does."""
    try:
        found = [REQUIREMENT.match(line) for line in requires("lmi") or ()]
    except PackageNotFoundError:  # lmi runs from its sources
        return None
    extras = {match["name"].replace("-", "_"): match["extra"] for match in found if match and match["extra"] != "dev"}
    return extras.get(library)
