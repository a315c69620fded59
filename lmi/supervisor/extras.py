"""Which extra of this package installs a library, as the metadata of the installed package says."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires

REQUIREMENT = re.compile(r"(?P<name>[\w.-]+).*; extra == ['\"](?P<extra>[\w-]+)['\"]")


def extra_with(library: str) -> str | None:
    """None for a library that no extra for users installs."""
    try:
        found = [REQUIREMENT.match(line) for line in requires("lmi") or ()]
    except PackageNotFoundError:  # run from its sources
        return None
    extras = {match["name"].replace("-", "_"): match["extra"] for match in found if match and match["extra"] != "dev"}
    return extras.get(library)
