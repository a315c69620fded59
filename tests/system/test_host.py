"""Faults of the machine under a server: its clock jumps, and its memory runs out."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.machine import wait_until
from tests.served import launch
from tests.system.container import ENGINES, ROOT, write_model

CLOCK = Path(__file__).parent / "clock"
DAY_S = 86_400
GROUP_BYTES = 512 << 20  # the server without work takes half of it
IN_GROUP = ["sh", "-c", 'echo $$ >"$GROUP/cgroup.procs" && exec "$@"', "sh"]


def test_a_clock_that_jumps_ends_no_request_and_no_process(tmp_path: Path) -> None:
    """Timeouts are shorter than the jumps, forward and then back."""
    clock = tmp_path / "clock"
    clock.write_text("0")
    paths = ":".join(map(str, (CLOCK, ENGINES, ROOT)))
    options = {"option.echo_step_ms": 20, "predict_timeout": 600, "step_timeout": 600, "frontend_workers": 2}
    folder = write_model(tmp_path / "model", **options)
    with (
        launch(folder, {"PYTHONPATH": paths, "LMI_TEST_CLOCK": str(clock)}) as server,
        ThreadPoolExecutor() as pool,
    ):
        server.wait_ready()
        server.wait_for_front_ends(2)
        processes = server.pids()
        answer = pool.submit(server.generate, 400)
        wait_until(lambda: server.metric("lmi_requests_running") == 1, "it runs")
        for offset_s in (400 * DAY_S, -400 * DAY_S):
            (tmp_path / "next").write_text(str(offset_s))
            (tmp_path / "next").replace(clock)
            num_steps = server.metric("lmi_engine_steps_total")
            wait_until(lambda num=num_steps: server.metric("lmi_engine_steps_total") > num + 50, "it goes on")
            assert server.ping() == 200
            assert server.generate(3).is_whole
        assert len(answer.result().lines) == 400
        assert server.pids() == processes
        years = {line["ts"][:4] for line in server.log_lines() if "ts" in line}
        assert len(years) > 1, "the clock did not jump at all"


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group inside that of this process, whose processes together may have GROUP_BYTES of memory."""
    found = re.search(r":memory:(/.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    folder = Path("/sys/fs/cgroup/memory" + (found[1] if found else "")) / f"lmi-test-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(GROUP_BYTES))
    except OSError:
        pytest.skip("this user may not make control groups of version 1")
    yield folder

    def is_removed() -> bool:
        with suppress(OSError):  # a process of it is not quite gone
            folder.rmdir()
        return not folder.exists()

    wait_until(is_removed, "the group is empty")


def test_where_memory_runs_out_only_the_engine_goes_and_its_end_says_so(tmp_path: Path, group: Path) -> None:
    folder = write_model(tmp_path / "model", **{"option.rolling_batch": "hungry"})
    with launch(folder, {"GROUP": str(group)}, IN_GROUP) as server:
        server.wait_ready()
        engine = server.pid("lmi-engine")
        others = [pid for pid in server.pids() if pid != engine]
        assert str(engine) in (group / "cgroup.procs").read_text().split()
        assert server.generate(5, prompt="all of it!").status == 503
        wait_until(lambda: server.pids("lmi-engine") not in ([], [engine]), "there is a new engine")
        wait_until(lambda: server.ping() == 200, "it is ready")
        assert server.generate(5).status == 200
        assert set(others) <= set(server.pids())
        assert "which the kernel also does when memory runs out" in server.log.read_text()
