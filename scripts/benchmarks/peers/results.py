"""What was measured of each shape, and the file that keeps it. A later run replaces the shapes that
it measures.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from scripts.benchmarks.peers.contest import Figure
from scripts.benchmarks.peers.worker import Start

# By contestant.
Figures = dict[str, Figure]


@dataclass
class Results:
    """The figures of one shape: by what was run, then by contestant."""

    # By group, number of streams, and tokens of a prompt.
    speeds: dict[tuple[str, int, int], Figures] = field(default_factory=dict)
    # Of one long prompt.
    first: Figures = field(default_factory=dict)
    # Of 32 requests that share tokens, by kind: cold or warm.
    prefix: dict[str, Figures] = field(default_factory=dict)
    # By server.
    starts: dict[str, Start] = field(default_factory=dict)
    # What the machine allows, as limits.cpp says.
    limits: dict[str, float] = field(default_factory=dict)

    def ratio(
        self, group: str, case: tuple[int, int], contestant: str, peers: Iterable[str]
    ) -> float | None:
        """Return a contestant's tokens/s over those of the fastest of these peers, or None if one
        side was not measured.
        """
        figures = self.speeds.get((group, *case), {})
        peer_speeds = [figures[peer].tokens_per_s for peer in peers if peer in figures]
        if contestant not in figures or not peer_speeds:
            return None

        return figures[contestant].tokens_per_s / max(peer_speeds)


class Stored(msgspec.Struct, frozen=True):
    """`Results` as JSON has them."""

    speeds: list[tuple[str, int, int, Figures]]
    first: Figures
    prefix: dict[str, Figures]
    starts: dict[str, Start] = {}
    limits: dict[str, float] = {}


def load(file: Path) -> dict[str, Results]:
    """Return the results by shape, or none if there is no file.

    Raises msgspec.DecodeError for a file of another form.
    """
    if not file.is_file():
        return {}

    results_of: dict[str, Results] = {}
    for name, stored in msgspec.json.decode(file.read_bytes(), type=dict[str, Stored]).items():
        speeds: dict[tuple[str, int, int], Figures] = {}
        for group, num_streams, num_prompt, figures in stored.speeds:
            speeds[group, num_streams, num_prompt] = figures

        results_of[name] = Results(
            speeds, stored.first, stored.prefix, stored.starts, stored.limits
        )

    return results_of


def add(file: Path, name: str, results: Results) -> None:
    """Put one shape into the file, in place of what it has of this shape."""
    results_of = load(file)
    results_of[name] = results
    stored: dict[str, Stored] = {}
    for shape, of_shape in results_of.items():
        speeds = [(*case, figures) for case, figures in of_shape.speeds.items()]
        stored[shape] = Stored(
            speeds, of_shape.first, of_shape.prefix, of_shape.starts, of_shape.limits
        )

    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(stored)))
    os.replace(part, file)
