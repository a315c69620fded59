"""One source to fetch, and how patient its fetch is."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmi.shared.fetches import WantedSource
from lmi.sources.place import SPARE_BYTES
from lmi.sources.progress import Progress
from lmi.sources.tries import DELAYS_S


@dataclass(frozen=True, slots=True)
class FetchJob:
    wanted: WantedSource
    progress: Progress = field(default_factory=Progress)
    delays_s: tuple[float, ...] = DELAYS_S  # between tries
    spare_bytes: int = SPARE_BYTES  # of the disk, which stay free
