"""Where a hub may send a fetch, by the text of a URL and by the address of its host."""

import httpx2
import pytest

from lmi.sources.reach import Reach, is_public

HUB = "http://hub.corp:8081"
PUBLIC = "https://huggingface.co"


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        (HUB, "http://hub.corp:8081/api/models/a/b"),
        (HUB, "http://HUB.corp.:8081/x"),
        (HUB, "https://hub.corp/x"),
        (HUB, "https://hub.corp:8081/x"),
        (PUBLIC, "https://cdn-lfs.hf.co/x?signature=1"),
        (PUBLIC, "https://cas-bridge.xethub.hf.co:8443/x"),
        (PUBLIC, "https://8.8.8.8/x"),
        (PUBLIC, "https://[2606:4700::6810:1]/x"),
        ("http://[::1]:8081", "http://[::1]:8081/x"),
        ("https://10.1.2.3", "https://10.1.2.3/x"),
    ],
)
def test_a_hub_may_send_us_to_itself_and_over_https_to_the_public_internet(
    endpoint: str, url: str
) -> None:
    assert Reach(endpoint).fault(httpx2.URL(url)) is None


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        (HUB, "http://hub.corp:9200/x"),
        (HUB, "https://localhost/x"),
        (HUB, "http://cdn.example/x"),
        ("https://hub.corp", "http://hub.corp/x"),
        ("https://hub.corp", "http://hub.corp:443/x"),
        (PUBLIC, "http://169.254.169.254/latest/meta-data"),
        (PUBLIC, "https://169.254.169.254/x"),
        (PUBLIC, "https://10.0.0.1/x"),
        (PUBLIC, "https://127.1/x"),
        (PUBLIC, "https://2130706433/x"),
        (PUBLIC, "https://0x7f.1/x"),
        (PUBLIC, "https://[::ffff:10.0.0.1]/x"),
        (PUBLIC, "https://localhost./x"),
        (PUBLIC, "https://db.localhost/x"),
        (PUBLIC, "file:///etc/passwd"),
        (PUBLIC, "ftp://huggingface.co/x"),
    ],
)
def test_a_hub_may_send_us_nowhere_else(endpoint: str, url: str) -> None:
    assert Reach(endpoint).fault(httpx2.URL(url)) is not None


def test_an_operator_opens_hosts_with_or_without_a_port() -> None:
    reach = Reach(PUBLIC, ("minio.corp:9000", "*.cdn.corp", "[fd00::1]", "10.1.2.3"))
    opened = [
        "http://minio.corp:9000/x",
        "http://a.cdn.corp/x",
        "https://[fd00::1]:1/x",
        "http://10.1.2.3:80/x",
    ]
    assert [reach.fault(httpx2.URL(url)) for url in opened] == [None] * 4

    closed = ["http://minio.corp/x", "http://cdn.corp/x", "http://10.1.2.30/x"]
    assert all(reach.fault(httpx2.URL(url)) for url in closed)
    assert Reach(PUBLIC, ("*",)).fault(httpx2.URL("http://127.0.0.1:1/x")) is None
    assert reach.fault_of_address(httpx2.URL("http://minio.corp:9000/x"), "127.0.0.1") is None


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700::6810:1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"]
)
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "10.0.0.1",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
        ),
        *(
            "224.0.0.1",
            "255.255.255.255",
            "192.0.2.1",
            "::",
            "::1",
            "fe80::1",
            "fe80::1%eth0",
            "fd00:ec2::254",
        ),
        *(
            "::ffff:127.0.0.1",
            "::127.0.0.1",
            "64:ff9b::10.0.0.1",
            "64:ff9b:1::1",
            "2002:7f00:1::",
            "2001::1",
        ),
        *("fec0::1", "ff02::1"),
    ],
)
def test_an_address_of_a_machine_or_a_network_within_is_not_public(address: str) -> None:
    assert not is_public(address)


def test_a_fault_shows_no_secret_of_a_url() -> None:
    fault = Reach(PUBLIC).fault(httpx2.URL("http://me:secret@cdn.example:81/x?token=secret"))
    assert fault is not None and "http://cdn.example:81 " in fault and "secret" not in fault
