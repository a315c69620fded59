"""The startup log with the loggers that vLLM writes to, but without vLLM."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from handlers.lmi_vllm import vllm_log
from handlers.lmi_vllm.vllm_log import REPORTING_FAILURE, STAGES, StartupLog
from tests.system.container import wait_until

MODEL_RUNNER = "vllm.v1.worker.cpu_model_runner"
CACHE = "vllm.v1.core.kv_cache_utils"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartupLog]:
    monkeypatch.setenv(vllm_log.START, "")
    yield StartupLog.new()
    for name in (*vllm_log.BEGINS, *REPORTING_FAILURE):
        logging.getLogger(name).filters.clear()
        logging.getLogger(name).setLevel(logging.NOTSET)


def listening(name: str) -> logging.Logger:
    vllm_log.listen()
    logging.getLogger(name).setLevel(logging.INFO)
    return logging.getLogger(name)


def test_stages_are_told_in_their_order_and_none_is_left_out(begun: StartupLog) -> None:
    stages: list[str] = []
    runner = listening(MODEL_RUNNER)
    cache = logging.getLogger(CACHE)
    cache.setLevel(logging.INFO)
    with begun.reported_to(lambda stage, share: stages.append(stage)):
        runner.info("starts")
        wait_until(lambda: stages == ["weights"], "the first is told")
        # Stages between were not reported
        cache.info("has so many blocks")
        wait_until(lambda: stages == list(STAGES), "the others are")
        runner.info("says more")
        time.sleep(2 * vllm_log.LOOK_S)

    assert stages == list(STAGES) and begun.is_started


def test_the_first_failure_is_the_cause_and_is_not_logged_twice(
    begun: StartupLog, caplog: pytest.LogCaptureFixture
) -> None:
    logger = listening(REPORTING_FAILURE[0])
    for error in (ValueError("the\ncause"), RuntimeError("what followed")):
        try:
            raise error
        except Exception:
            logger.exception("failed to start")

    assert begun.cause == "ValueError: the\\ncause"
    assert not caplog.records

    begun.write(vllm_log.STARTED)
    try:
        raise RuntimeError("later")
    except RuntimeError:
        logger.exception("failed")

    assert len(caplog.records) == 1 and begun.cause == "ValueError: the\\ncause"


def test_a_process_that_was_started_from_here_writes_to_the_same_journal(begun: StartupLog) -> None:
    program = (
        "from handlers.lmi_vllm.vllm_log import StartupLog; "
        "StartupLog.current().write('failed X: far away')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert begun.cause == "X: far away"
