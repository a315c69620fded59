"""A model.py that a test writes."""

from __future__ import annotations

from pathlib import Path

from lmi.user_code.options import UserCodeConfig
from lmi.user_code.runner import UserCode


def model(
    tmp_path: Path,
    source: str,
    properties: dict[str, str] | None = None,
    folder: str = ".",
    **functions: str,
) -> UserCode:
    (tmp_path / "model.py").write_text(source)
    code = UserCodeConfig(path=str(tmp_path / "model.py"), properties=properties or {}, **functions)
    return UserCode(code, folder=folder)
