"""What a row of the supervisor's table gives its process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lmi.runtime import Runtime
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.settings.user import User
from lmi.shared.state import Phase
from lmi.supervisor import kinds
from lmi.supervisor.cores import Cores
from lmi.supervisor.pauses import Pauses
from lmi.supervisor.running_model import of_model
from lmi.user_code.options import UserCodeConfig

FORMATTER = "def write(output):\n    return b''\n"


def test_formatters_keep_off_the_cores_of_the_engines(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FORMATTER)
    code = UserCodeConfig(path=str(tmp_path / "model.py"), output_formatter="write")
    model = ModelConfig(path=str(tmp_path), name="m")
    folder = tmp_path / "runtime"
    folder.mkdir()
    config = Config(
        server=ServerConfig(log_format="json"), model=model, engine=EngineConfig(), user_code=code
    )
    runtime = Runtime.create(config, folder)
    block = runtime.attach()
    core = max(os.sched_getaffinity(0))
    *_, formatter = of_model(runtime, block, Cores(((0,),), (core,)))
    formatter.look(time.monotonic(), Pauses(late_s=1.0))
    assert formatter.pid is not None and formatter.record is not None

    try:
        deadline_s = time.monotonic() + 60
        while formatter.record.phase != Phase.READY and time.monotonic() < deadline_s:
            time.sleep(0.02)

        assert formatter.record.phase == Phase.READY, formatter.record.reason
        assert os.sched_getaffinity(formatter.pid) == {core}
    finally:
        os.kill(formatter.pid, 9)
        os.waitpid(formatter.pid, 0)
        if formatter.output is not None:
            formatter.output.close()

        runtime.remove()


@pytest.mark.parametrize(
    ("backend", "is_of_several", "is_users"),
    [("mp", False, True), ("ray", False, False), ("ray", True, True)],
)
def test_an_engine_is_the_users_unless_the_ranks_of_the_only_model_are_on_a_cluster(
    caplog: pytest.LogCaptureFixture, backend: str, is_of_several: bool, is_users: bool
) -> None:
    user = User.of("nobody")
    config = Config(
        server=ServerConfig(user=user, multi_model=is_of_several),
        model=ModelConfig(path="/m", name="m"),
        engine=EngineConfig(handler="vllm", options={"distributed_executor_backend": backend}),
    )
    assert kinds.user_of_engine(config) == (user if is_users else None)
    root_message = "engines run as root, since option.distributed_executor_backend=ray"
    assert any(message.startswith(root_message) for message in caplog.messages) is not is_users
