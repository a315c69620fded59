"""What each engine may take of the memory, beside the other processes of its server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.shared import machine
from lmi.shared.machine import MB
from lmi.supervisor.memory import FRONT_END_BYTES, MASTER_BYTES, of_memory

CONFIG = Config(
    server=ServerConfig(), model=ModelConfig(path="", name="model"), engine=EngineConfig()
)


@pytest.mark.parametrize(("num_engines", "share_mb"), [(1, 600), (2, 300)])
def test_engines_share_what_front_ends_leave(
    monkeypatch: pytest.MonkeyPatch, num_engines: int, share_mb: int
) -> None:
    monkeypatch.setattr(
        machine, "free_bytes", lambda: 600 * MB + MASTER_BYTES + 2 * FRONT_END_BYTES
    )
    config = replace(
        CONFIG,
        server=ServerConfig(frontend_workers=2),
        engine=EngineConfig(num_engines=num_engines),
    )
    assert of_memory(config) == {machine.SHARE: str(share_mb * MB)}


def test_an_engine_without_room_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda: 10 * MB)
    assert of_memory(CONFIG) == {machine.SHARE: "0"}


def test_an_engine_reads_its_share_and_a_library_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda: 7 * MB)
    monkeypatch.setenv(machine.SHARE, str(5 * MB))
    assert machine.share_bytes() == 5 * MB
    monkeypatch.delenv(machine.SHARE)
    assert machine.share_bytes() == 7 * MB
