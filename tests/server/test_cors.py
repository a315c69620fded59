"""Pages of other origins: what a browser is answered before and with a request."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi.settings.annexes import KEYS
from tests.scripted import host

PAGE = "https://app.example"
OPEN = {"cors_allowed_origins": (PAGE,), "api_keys": KEYS.parse("sk-one")}
ASKS = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


def test_a_browser_asks_without_a_key_and_is_told_what_the_page_may_send(tmp_path: Path) -> None:
    with host(tmp_path, server=OPEN) as lmi:
        response, _ = lmi.send("OPTIONS", "/v1/chat/completions", headers=ASKS)
        assert response.status == 200 and response.getheader("Access-Control-Allow-Origin") == PAGE
        assert "POST" in response.getheader("Access-Control-Allow-Methods", "")
        assert "authorization" in response.getheader("Access-Control-Allow-Headers", "").lower()


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [("/invocations", "sk-one", 200), ("/invocations", "no", 401), ("/none", "sk-one", 404)],
)
def test_answers_and_errors_may_be_read_by_the_page(
    path: str, key: str, status: int, tmp_path: Path
) -> None:
    with host(tmp_path, server=OPEN) as lmi:
        headers = {"Origin": PAGE, "Authorization": f"Bearer {key}"}
        response, _ = lmi.post({"inputs": "say a", "stream": True}, path, headers=headers)
        assert (
            response.status == status and response.getheader("Access-Control-Allow-Origin") == PAGE
        )
        assert "Retry-After" in response.getheader("Access-Control-Expose-Headers", "")


def test_a_page_of_another_origin_may_not(tmp_path: Path) -> None:
    with host(tmp_path, server=OPEN) as lmi:
        assert (
            lmi.send("OPTIONS", "/invocations", headers=ASKS | {"Origin": "https://b.example"})[
                0
            ].status
            == 400
        )
        headers = {"Origin": "https://b.example", "x-api-key": "sk-one"}
        response, _ = lmi.post({"inputs": "say a"}, headers=headers)
        assert response.getheader("Access-Control-Allow-Origin") is None


def test_without_the_option_no_page_may(tmp_path: Path) -> None:
    with host(tmp_path) as lmi:
        for response, _ in (
            lmi.send("OPTIONS", "/invocations", headers=ASKS),
            lmi.post({"inputs": "say a"}, headers={"Origin": PAGE}),
        ):
            assert (
                response.status == 403 and response.getheader("Access-Control-Allow-Origin") is None
            )
