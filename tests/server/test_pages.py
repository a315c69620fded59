"""The pages for people, as the server sends them. tests/clients/test_pages.py opens them in a
browser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from lmi.server.app import ROUTES, SERVER_ROUTES
from lmi.server.routes.pages import FILES, LINKS
from tests.scripted import Host, host


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("pages")) as running:
        yield running


BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


def test_a_browser_gets_the_playground_at_the_root_and_others_get_links(server: Host) -> None:
    assert server.send("GET", "/", headers=BROWSER)[1] == server.send("GET", "/playground")[1]

    for headers in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        response, body = server.send("GET", "/", headers=headers)
        assert (
            response.getheader("content-type") == "application/json" and json.loads(body) == LINKS
        )

    assert set(LINKS.values()) <= {path for path, _, _ in (*SERVER_ROUTES, *ROUTES)}


@pytest.mark.parametrize("path", ["/playground", "/docs"])
def test_a_page_loads_nothing_from_elsewhere_and_may_run_only_what_this_server_has(
    server: Host, path: str
) -> None:
    response, body = server.send("GET", path)
    assert (
        response.status == 200 and response.getheader("content-type") == "text/html; charset=utf-8"
    )

    policy = str(response.getheader("content-security-policy"))
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy

    loaded = re.findall(r'<(?:link|script)[^>]* (?:href|src)="(.*?)"', body.decode())
    assert len(loaded) >= 3

    for file in loaded:
        assert file == "data:," or server.send("GET", f"/{file}")[0].status == 200

    assert not [
        name for name, content in FILES.items() if re.search(rb"https?://|@import|\burl\(", content)
    ]


def test_another_file_is_not_there(server: Host) -> None:
    for name in ("none.js", "..%2froutes%2fpages.py", "%2e%2e"):
        assert server.send("GET", f"/pages/{name}")[0].status == 404
