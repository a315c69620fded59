"""The programs in docs/library.md: each runs after those before it, and prints what the
page shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import pytest

from lmi.executor import (
    ExecutorConfig,
    GuidedDecodingConfig,
    KvCacheConfig,
    LogitsPostProcessorConfig,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "library.md"
PROGRAM = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_programs_print_what_the_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    programs = PROGRAM.findall(PAGE.read_text())
    names: dict[str, Any] = {}
    for program, output in programs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program, PAGE, "exec"), names)

        assert printed.getvalue() == output

    assert len(programs) == 5


@pytest.mark.parametrize(
    "config",
    [ExecutorConfig, KvCacheConfig, LogitsPostProcessorConfig, GuidedDecodingConfig],
    ids=lambda one: one.__name__,
)
def test_the_page_names_every_field_of_the_configuration(config: Any) -> None:
    page = PAGE.read_text()
    [row] = [line for line in page.splitlines() if line.startswith(f"| `{config.__name__}` |")]
    assert re.findall(r"`(\w+)`", row)[1:] == [field.name for field in dataclasses.fields(config)]
