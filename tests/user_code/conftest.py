"""Every test of user code needs an importable djl_python."""

from __future__ import annotations

import pytest

from lmi.user_code.runner import COMPAT


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(COMPAT))
