"""The preparation of a process for vLLM, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.vllm

PREPARE = """
import os
from multiprocessing import resource_tracker
from handlers.lmi_vllm import process_setup
process_setup.prepare()
print(os.getpgrp() == os.getpid(), os.getpgid(resource_tracker._resource_tracker._pid) == os.getpgrp())
"""  # noqa: E501


@pytest.mark.parametrize(
    ("place", "outcome"),
    [
        (
            {"start_new_session": True},
            "True True",
        ),  # as the first process of a container: it cannot leave its group
        ({"process_group": 0}, "True False"),  # as the engine of a server
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
