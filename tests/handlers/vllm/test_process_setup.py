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
