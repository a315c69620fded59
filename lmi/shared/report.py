"""The report of a loaded engine, which its process writes once and the supervisor reads for the banner."""

from __future__ import annotations

from pathlib import Path

import msgspec

from lmi.shared.files import write_whole


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a loaded engine that the supervisor shows to people."""

    engine: str
    device: str = ""
    dtype: str = ""
    kernels: str = ""  # what computes, where the engine has a choice
    max_sequence_length: int | None = None  # tokens; None for user code, whose limit is not known
    max_num_sequences: int = 1
    stages_s: dict[str, float]  # seconds by stage, in order


def write_report(path: Path, report: LoadReport) -> None:
    if path.exists():
        return  # an earlier process of this slot wrote it, perhaps before the disk was full
    write_whole(path, msgspec.json.encode(report))


def read_report(path: Path) -> LoadReport:
    return msgspec.json.decode(path.read_bytes(), type=LoadReport)
