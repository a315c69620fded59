"""The preparation of a process for vLLM, in processes of their own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from handlers.lmi_vllm import process_setup

pytestmark = pytest.mark.vllm

PREPARE = """
import os
from multiprocessing import resource_tracker
from handlers.lmi_vllm import process_setup
process_setup.prepare()
print(os.getpgrp() == os.getpid(), os.getpgid(resource_tracker._resource_tracker._pid) == os.getpgrp())
"""  # noqa: E501
SPAWN = """
import gc, multiprocessing
from concurrent.futures import ProcessPoolExecutor
from handlers.lmi_vllm import process_setup
process_setup.prepare()
with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
    print(gc.get_threshold()[0], pool.submit(gc.get_threshold).result()[0])
"""


# As the first process of a container: it cannot leave its group
@pytest.mark.parametrize(
    ("place", "outcome"),
    [
        (
            {"start_new_session": True},
            "True True",
        ),
        # As the engine of a server
        ({"process_group": 0}, "True False"),
        ({}, "False True"),
    ],
    ids=("session", "group", "member"),
)
def test_the_tracker_of_shared_memory_starts_outside_of_the_group_where_that_is_possible(
    place: dict[str, int | bool], outcome: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PREPARE],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=120,
        **place,
    )
    assert done.stdout.strip() == outcome, done.stderr


def test_a_spawned_process_seldom_looks_for_garbage_since_it_imports_vllm() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPAWN], capture_output=True, text=True, env=os.environ, timeout=120
    )
    here, spawned = map(int, done.stdout.split())
    assert spawned == process_setup.OBJECTS_BEFORE_COLLECTION > here, done.stderr


def test_an_import_without_garbage_leaves_the_collector_as_it_was() -> None:
    with process_setup.collecting_no_garbage():
        assert not gc.isenabled()
        with process_setup.collecting_no_garbage():
            assert not gc.isenabled()

        assert not gc.isenabled()

    assert gc.isenabled()


def test_a_further_engine_of_a_process_reads_the_variables_of_vllm_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process_setup.hide_foreign_builds()
    from vllm import envs

    process_setup.forget_variables()
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "1000")
    # As each engine does once it runs
    envs.enable_envs_cache()
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "2000")
    assert envs.VLLM_MAX_IMAGE_PIXELS == 1000

    process_setup.forget_variables()
    assert envs.VLLM_MAX_IMAGE_PIXELS == 2000
