"""The life of one of several models, with real processes in the places of its engines."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from lmi.runtime import Runtime
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.supervisor.model import ModelProcesses
from lmi.supervisor.models import KILL_S, ModelLife


def test_a_failed_model_forgets_the_process_groups_that_ended_since_others_may_get_their_numbers(
    tmp_path: Path,
) -> None:
    config = Config(server=ServerConfig(), model=ModelConfig(path="/m", name="m"), engine=EngineConfig())
    life = ModelLife(ModelProcesses(Runtime.create(config, tmp_path)))
    [engine] = life.processes.children
    with subprocess.Popen(["/bin/sleep", "60"], process_group=0) as process:
        engine.pid = process.pid
        now = time.monotonic()
        life.fail("lost", now)
        assert life.groups == {process.pid}
        process.wait()  # it was told to end
        engine.pid = None
    life.look(now + KILL_S, is_wanted=True)
    assert life.groups == set()
    assert not life.is_over  # its folder says why until the model is loaded again or unloaded
