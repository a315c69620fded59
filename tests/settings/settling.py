"""Helpers for tests of settings: they resolve a text, on one of two machines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from lmi.errors import BadConfiguration
from lmi.settings.properties import parse
from lmi.settings.resolve import Resolved, resolve
from lmi.settings.start import StartInputs
from lmi.shared.machine import Machine

CPU = Machine(num_cores=4)
FOUR_GPUS = Machine(num_cores=32, gpus=("0", "1", "2", "3"))
ASYNC_SERVICE = "option.entryPoint=djl_python.lmi_vllm.vllm_async_service"


def settle(
    folder: Path,
    text: str = "",
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    machine: Machine = CPU,
) -> Resolved:
    start = StartInputs(
        folder=folder,
        cwd=folder.parent,
        machine=machine,
        properties=parse(text),
        environ=environ or {},
        flags=flags or {},
    )
    return resolve(start)


def faults(folder: Path, text: str = "", **given: object) -> list[str]:
    with pytest.raises(BadConfiguration) as caught:
        settle(folder, text, **given)  # type: ignore[arg-type]

    assert caught.value.exit_code == 2
    return str(caught.value).split("\n")


def source_of(resolved: Resolved, option: str) -> str:
    return next(setting.source for setting in resolved.settings if setting.option == option)
