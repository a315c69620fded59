"""What was measured of each shape, and the file that keeps it. A later run replaces the shapes that
it measures.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from scripts.benchmarks.peers.contest import Figure, Start

Figures = dict[str, Figure]  # by contestant


@dataclass
class Results:
    """The figures of one shape: by what was run, then by contestant."""

    speeds: dict[tuple[str, int, int], Figures] = field(
        default_factory=dict
    )  # group, streams, prompt
    # Of one long prompt
    first: Figures = field(default_factory=dict)
    # 32 requests that share tokens; cold, warm
    prefix: dict[str, Figures] = field(default_factory=dict)
    starts: dict[str, Start] = field(default_factory=dict)  # of the servers

    def ratio(
        self, group: str, case: tuple[int, int], contestant: str, peers: Iterable[str]
    ) -> float | None:
        """lmi's tokens/s over those of the fastest of these peers."""
        figures = self.speeds.get((group, *case), {})
        peer_speeds = [figures[peer].tokens_per_s for peer in peers if peer in figures]
        return (
            figures[contestant].tokens_per_s / max(peer_speeds)
            if contestant in figures and peer_speeds
            else None
        )


class Stored(msgspec.Struct, frozen=True):
    """`Results` as JSON has them."""

    speeds: list[tuple[str, int, int, Figures]]
    first: Figures
    prefix: dict[str, Figures]
    starts: dict[str, Start] = {}


def load(file: Path) -> dict[str, Results]:
    """Results by shape; empty if there is no file. Raises msgspec.DecodeError for a file of another
    form.
    """
    if not file.is_file():
        return {}

    stored = msgspec.json.decode(file.read_bytes(), type=dict[str, Stored])
    return {
        name: Results(
            {
                (group, streams, prompt): contestant
                for group, streams, prompt, contestant in shape_results.speeds
            },
            *(shape_results.first, shape_results.prefix, shape_results.starts),
        )
        for name, shape_results in stored.items()
    }


def add(file: Path, name: str, results: Results) -> None:
    """Put one shape into the file, in place of what it has of this shape."""
    results_of = load(file) | {name: results}
    stored = {
        shape: Stored(
            [(*case, figures) for case, figures in shape_results.speeds.items()],
            shape_results.first,
            shape_results.prefix,
            shape_results.starts,
        )
        for shape, shape_results in results_of.items()
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(stored)))
    os.replace(part, file)
