"""One server with the demo model, which all clients share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.venvs import ROOT
from tests.served import Server, serve


@pytest.fixture(scope="package")
def demo() -> Iterator[Server]:
    with serve(
        ROOT / "handlers" / "lmi_dist" / "demo", "option.model_name=demo", "frontend_workers=1"
    ) as server:
        yield server
