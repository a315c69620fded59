"""What each engine may take of the memory, beside the other processes of its server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.shared.machine import MB, SHARE, share_bytes
from lmi.supervisor.memory import FRONT_END_BYTES, MASTER_BYTES, bytes_held, of_memory
from tests.kernel_files import kernel_in, write

CONFIG = Config(
    server=ServerConfig(), model=ModelConfig(path="", name="model"), engine=EngineConfig()
)


@pytest.mark.parametrize(("num_engines", "share_mb"), [(1, 600), (2, 300)])
def test_engines_share_what_front_ends_leave(
    tmp_path: Path, num_engines: int, share_mb: int
) -> None:
    kernel = kernel_in(tmp_path, 600 * MB + MASTER_BYTES + 2 * FRONT_END_BYTES)
    config = replace(
        CONFIG,
        server=ServerConfig(frontend_workers=2),
        engine=EngineConfig(num_engines=num_engines),
    )
    assert of_memory(config, kernel.proc) == {SHARE: str(share_mb * MB)}


def test_what_front_ends_have_already_is_not_kept_for_them_again(tmp_path: Path) -> None:
    """They start before the model is fetched, and its engines after."""
    kernel = kernel_in(tmp_path, 300 * MB)
    write(kernel.proc / "7/smaps_rollup", f"Pss: 1 kB\nPss_Anon: {MASTER_BYTES >> 10} kB")
    write(kernel.proc / "8/smaps_rollup", f"Pss_Anon: {(FRONT_END_BYTES - 5 * MB) >> 10} kB")
    held_bytes = bytes_held([7, 8, 9], kernel.proc)
    assert of_memory(CONFIG, kernel.proc, held_bytes) == {SHARE: str(295 * MB)}
    assert of_memory(CONFIG, kernel.proc, held_bytes * 2) == {SHARE: str(300 * MB)}


def test_an_engine_without_room_is_told_so(tmp_path: Path) -> None:
    kernel = kernel_in(tmp_path, 10 * MB)
    assert of_memory(CONFIG, kernel.proc) == {SHARE: "0"}


def test_an_engine_reads_its_share_and_a_library_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernel_in(tmp_path, 7 * MB)
    monkeypatch.setenv(SHARE, str(5 * MB))
    assert share_bytes(kernel.proc) == 5 * MB
    monkeypatch.delenv(SHARE)
    assert share_bytes(kernel.proc) == 7 * MB
