"""The locks of the clients, and the list of them in docs/apis.md."""

from __future__ import annotations

import json
import re

import pytest

from tests.clients.agents import LOCK
from tests.clients.venvs import LOCKS, ROOT

NAMES = sorted(path.stem for path in LOCKS.glob("*.txt"))


def pins(name: str) -> dict[str, str]:
    return dict(re.findall(r"^(\S+)==(\S+) ", (LOCKS / f"{name}.txt").read_text(), re.MULTILINE))


def agents() -> list[dict[str, str]]:
    """The packages of the coding agents."""
    return [package for place, package in json.loads(LOCK.read_text())["packages"].items() if place]


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_has_exact_versions_with_hashes_and_no_places(name: str) -> None:
    for line in (LOCKS / f"{name}.txt").read_text().splitlines():
        assert re.fullmatch(r"[a-z0-9-]+==[\w.+!]+( --hash=sha256:[0-9a-f]{64})+", line), line


def test_the_lock_of_the_agents_has_exact_versions_with_hashes_and_no_places() -> None:
    assert len(agents()) == 6
    for package in agents():
        assert re.fullmatch(r"\d+\.\d+\.\d+(-linux-\w+)?", package["version"])
        assert (
            re.fullmatch(r"sha512-[\w+/]{86}==", package["integrity"]) and "resolved" not in package
        )


def test_the_page_names_the_versions_that_are_tested() -> None:
    section = (
        (ROOT / "docs" / "apis.md").read_text().partition("## Clients")[2].partition("\n## ")[0]
    )
    packages = re.findall(r"\b([a-z][a-z0-9_-]+) (\d+\.\d+\.\d+)", section)
    assert len(packages) == 19

    versions = {package["version"].partition("-")[0] for package in agents()}
    for client, version in packages:
        of_client = {pins(lock).get(client.replace("_", "-")) for lock in NAMES}
        assert version in (
            versions if client in ("codex", "claude-code", "opencode") else of_client
        ), client
