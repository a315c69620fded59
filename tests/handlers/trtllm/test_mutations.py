"""Each deliberate mistake in the adapter is found, and the adapter itself gives every scene its answer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.handlers.trtllm.mutations import MUTATIONS, STATIC, Gone, Mutation, Outcome, Run
from tests.handlers.trtllm.stubs import FOLDER

ROOT = Path(__file__).parents[3]
BY_SCENE = [mutation for mutation in MUTATIONS if mutation.found_by != STATIC]


def answers(runs: list[Run]) -> dict[str, Any]:
    """What each run answers, by its name."""
    command = [sys.executable, "-m", "tests.handlers.trtllm.battery"]
    text = b"\n".join(msgspec.json.encode(run) for run in runs)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, input=text, capture_output=True, cwd=ROOT, env=environment, timeout=300)
    assert process.returncode == 0, process.stderr.decode()[-3000:]
    outcomes = [msgspec.json.decode(line, type=Outcome) for line in process.stdout.splitlines()]
    return {outcome.name: outcome.answer for outcome in outcomes}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers of the adapter, by scene and profile, and those of each mistake that applies, by its name."""
    runs = {Run(f"{one.found_by} on {one.profile}", one.found_by, one.profile) for one in BY_SCENE}
    for mutation in BY_SCENE:
        folder = tmp_path_factory.mktemp("mistake")
        shutil.copytree(FOLDER, folder / FOLDER.name, ignore=shutil.ignore_patterns("__pycache__"))
        try:
            (folder / FOLDER.name / f"{mutation.module}.py").write_text(mutation.text())
        except Gone:
            continue  # its own test says so
        runs.add(Run(mutation.name, mutation.found_by, mutation.profile, str(folder)))
    return answers(sorted(runs, key=lambda run: run.name))


@pytest.mark.parametrize("mutation", BY_SCENE, ids=lambda mutation: mutation.name)
def test_a_scene_finds(mutation: Mutation, known: dict[str, Any]) -> None:
    mutation.text()
    sound = known[f"{mutation.found_by} on {mutation.profile}"]
    assert not isinstance(sound, str), sound
    assert known[mutation.name] != sound


def test_an_end_token_that_the_engine_keeps_or_drops_is_the_same_to_a_client(known: dict[str, Any]) -> None:
    answers = known["end_token on main-2026-08"]
    assert answers[:3] == answers[3:]


def test_a_mistake_that_no_longer_applies_says_its_name() -> None:
    with pytest.raises(Gone, match="the mistake 'old': engine.py has 'no such text' 0 times"):
        Mutation("old", "engine", "no such text", "", STATIC).text()
