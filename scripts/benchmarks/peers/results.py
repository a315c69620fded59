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
    first: Figures = field(default_factory=dict)  # of one long prompt
    prefix: dict[str, Figures] = field(
        default_factory=dict
    )  # 32 requests that share tokens; cold, warm
    starts: dict[str, Start] = field(default_factory=dict)  # of the servers

    def ratio(
        self, group: str, case: tuple[int, int], own: str, peers: Iterable[str]
    ) -> float | None:
        """lmi's tokens/s over those of the fastest of these peers."""
        figures = self.speeds.get((group, *case), {})
        others = [figures[peer].tokens_per_s for peer in peers if peer in figures]
        return figures[own].tokens_per_s / max(others) if own in figures and others else None


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
            {(group, streams, prompt): own for group, streams, prompt, own in each.speeds},
            *(each.first, each.prefix, each.starts),
        )
        for name, each in stored.items()
    }


def add(file: Path, name: str, results: Results) -> None:
    """Put one shape into the file, in place of what it has of this shape."""
    found = load(file) | {name: results}
    stored = {
        shape: Stored(
            [(*case, figures) for case, figures in each.speeds.items()],
            each.first,
            each.prefix,
            each.starts,
        )
        for shape, each in found.items()
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(stored)))
    os.replace(part, file)
