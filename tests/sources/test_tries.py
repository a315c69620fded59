from collections.abc import Iterator

import pytest

from lmi.errors import ModelUnusable, SourceUnreachable
from lmi.sources.amounts import readable
from lmi.sources.fetches import FetchReport
from lmi.sources.job import Damaged, MayPass, Progress, attempt

QUICK = (0.0, 0.0)


class Results:
    def __init__(self, *results: object) -> None:
        self._results: Iterator[object] = iter(results)
        self.num_calls = 0

    def __call__(self) -> object:
        self.num_calls += 1
        result = next(self._results)
        if isinstance(result, Exception):
            raise result

        return result


def damaged() -> Damaged:
    return Damaged("a.json", wanted=1, found=2)


def test_what_passes_is_tried_again_until_it_succeeds() -> None:
    results = Results(MayPass("busy"), MayPass("busy"), "here")
    assert attempt(results, "a/b", QUICK) == "here"


def test_what_does_not_pass_in_time_is_unreachable_with_its_last_cause() -> None:
    results = Results(MayPass("busy"), MayPass("slow"), MayPass("gone"), "here")
    with pytest.raises(SourceUnreachable, match=r"a/b: gone \(3 tries\)") as raised:
        attempt(results, "a/b", QUICK)

    assert (raised.value.exit_code, results.num_calls) == (6, 3)


def test_a_try_that_comes_farther_begins_the_delays_anew() -> None:
    results = Results(*[MayPass("busy")] * 6, "here")
    assert attempt(results, "a/b", QUICK, reached=lambda: results.num_calls // 2) == "here"


def test_a_try_that_only_repeats_what_another_reached_does_not() -> None:
    results = Results(*[MayPass("busy")] * 6)
    with pytest.raises(SourceUnreachable):
        attempt(results, "a/b", QUICK, reached=lambda: results.num_calls % 2)

    assert results.num_calls == 3


def test_who_asks_to_be_left_alone_is_left_alone_within_reason() -> None:
    waited: list[float] = []
    results = Results(MayPass("busy", 20.0), MayPass("busy", 1e9), "here")
    assert attempt(results, "a/b", QUICK, wait=waited.append) == "here"
    assert waited == [20.0, 300.0]


def test_damage_is_mended_once() -> None:
    assert attempt(Results(damaged(), MayPass("busy"), "here"), "a/b", QUICK) == "here"
    with pytest.raises(ModelUnusable, match="a.json: wanted 1, found 2, twice"):
        attempt(Results(damaged(), damaged(), "here"), "a/b", QUICK)


def test_progress_counts_bytes_files_and_rate() -> None:
    now = [0.0]
    progress = Progress(clock=lambda: now[0])
    progress.begin("a/b", 100, 2)
    progress.report()
    now[0] = 2.0
    progress.add(50)
    progress.add(-10)
    progress.file_done()
    report = progress.report()

    assert (report.num_bytes, report.share, report.bytes_per_s, report.num_files) == (
        40,
        0.4,
        20.0,
        1,
    )
    assert str(report) == "download of a/b: 40%, 40 B of 100 B, 20 B/s, 1 of 2 files"

    progress.begin("a/b", 60, 1)
    assert progress.report().num_bytes == 0


@pytest.mark.parametrize(
    ("bytes_per_s", "said"),
    [
        (1.0, "download of a/b is slow: 1 B/s, 12 days for the 1.0 MB that are missing"),
        (2000.0, "download of a/b is slow: 2.0 kB/s, 8 minutes for the 1.0 MB that are missing"),
        (0.0, "download of a/b: no byte came lately, 1.0 MB are missing"),
        (20_000.0, None),
        (200_000.0, None),
    ],
)
def test_a_slow_download_says_its_speed_and_how_long_the_rest_takes(
    bytes_per_s: float, said: str | None
) -> None:
    report = FetchReport(
        source="a/b", num_bytes=5, total_bytes=1_000_005, total_files=1, bytes_per_s=bytes_per_s
    )
    assert report.slow_warning == said


def test_a_listing_that_comes_slowly_says_its_speed() -> None:
    report = FetchReport(source="a/b", num_bytes=50, bytes_per_s=1.0)
    assert str(report) == "download of a/b: waits for the list of its files, 50 B of it came, 1 B/s"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1500, "1.5 kB"), (64 << 30, "68.7 GB"), (3e12, "3.0 TB")]
)
def test_bytes_are_written_for_people(num_bytes: float, text: str) -> None:
    assert readable(num_bytes) == text
