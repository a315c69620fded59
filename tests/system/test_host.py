"""A fault of the machine under a server: its clock jumps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.machine import wait_until
from tests.served import launch
from tests.system.container import ENGINES, ROOT, write_model

CLOCK = Path(__file__).parent / "clock"
DAY_S = 86_400


def test_a_clock_that_jumps_ends_no_request_and_no_process(tmp_path: Path) -> None:
    """Timeouts are shorter than the jumps, forward and then back."""
    clock = tmp_path / "clock"
    clock.write_text("0")
    paths = ":".join(map(str, (CLOCK, ENGINES, ROOT)))
    options = {
        "option.echo_step_ms": 20,
        "predict_timeout": 600,
        "step_timeout": 600,
        "frontend_workers": 2,
    }
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
            wait_until(
                lambda num=num_steps: server.metric("lmi_engine_steps_total") > num + 50,
                "it goes on",
            )

            assert server.ping() == 200
            assert server.generate(3).is_whole

        assert len(answer.result().lines) == 400
        assert server.pids() == processes

        years = {line["ts"][:4] for line in server.log_lines() if "ts" in line}
        assert len(years) > 1, "the clock did not jump at all"
