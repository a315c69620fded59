"""One process reads the shared block while another writes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lmi.shared.state import Block, Phase


def make_block(tmp_path: Path) -> Block:
    return Block.create(tmp_path / "state", num_engines=2, num_frontends=3)


def test_another_process_reads_what_one_wrote(tmp_path: Path) -> None:
    block = make_block(tmp_path)
    block.engines[1].phase = Phase.READY
    block.engines[1].stage = "weights"
    block.engines[1].progress = 0.25
    code = (
        "import sys; from pathlib import Path; from lmi.shared.state import Block\n"
        "e = Block.attach(Path(sys.argv[1])).engines[1]; print(e.phase, e.stage, e.progress)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "state")],
        capture_output=True,
        text=True,
        check=True,
    )

    assert out.stdout == "2 weights 0.25\n"


def test_the_block_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    make_block(tmp_path)
    assert os.stat(tmp_path / "state").st_mode & 0o777 == 0o600


def test_the_block_has_its_room_on_the_disk_from_the_start(tmp_path: Path) -> None:
    """On a full disk, a write to a page of a sparse file would kill the writer with SIGBUS."""
    make_block(tmp_path)
    stat = os.stat(tmp_path / "state")
    assert stat.st_blocks * 512 >= stat.st_size > 0


def test_records_do_not_overlap(tmp_path: Path) -> None:
    block = make_block(tmp_path)
    records = [block.supervisor, *block.engines, *block.frontends]
    for number, record in enumerate(records, start=1):
        block.ints[record.base : record.base + record.num_words] = memoryview(
            (number.to_bytes(8, "little")) * record.num_words
        ).cast("q")

    assert [record.pid for record in records] == [1, 2, 3, 4, 5, 6]
    assert len(block.raw) == (3 + sum(record.num_words for record in records)) * 8
    assert block.ints[:3].tolist() == [2, 3, 0]


def test_a_claimed_slot_keeps_totals_and_clears_gauges(tmp_path: Path) -> None:
    record = make_block(tmp_path).frontends[0]
    record.num_in_flight = 7
    record.num_prompt_tokens = 11
    record.num_requests.add("424")
    record.claim()
    assert (record.num_in_flight, record.num_prompt_tokens, record.pid) == (0, 11, os.getpid())
    assert dict(record.num_requests.items())["424"] == 1


def test_an_unknown_label_counts_as_other(tmp_path: Path) -> None:
    record = make_block(tmp_path).frontends[0]
    record.num_requests.add("418")
    assert dict(record.num_requests.items())["other"] == 1


def test_a_histogram_counts_each_value_under_its_bound(tmp_path: Path) -> None:
    view = make_block(tmp_path).frontends[2].time_to_first_token_s
    view.observe(0.001)
    view.observe(0.002)
    view.observe(9999.0)
    assert (view.counts[0], view.counts[1], view.counts[-1]) == (1, 1, 1)
    assert abs(view.sum - 9999.003) < 1e-9


def test_text_is_cut_to_its_place(tmp_path: Path) -> None:
    engine = make_block(tmp_path).engines[0]
    engine.stage = "ä" * 100
    assert engine.stage == "ä" * 31
    engine.stage = "/models/\udcff"
    assert engine.stage == "/models/?"
    assert engine.progress == 0.0
