"""What a hostile S3 may answer, asked in this process over loopback."""

from collections.abc import Iterator, Mapping
from contextlib import suppress

import pytest

from lmi.errors import ModelUnusable
from lmi.sources.bucket import Bucket
from tests.sources.faulty_server import Answer, FaultyServer
from tests.sources.s3_server import CREDENTIALS

XML = {"Content-Type": "application/xml"}
OBJECT = "<Contents><Key>fox/a.json</Key><Size>2</Size><ETag>&quot;e&quot;</ETag></Contents>"


def page(contents: str, number: int = 0) -> Answer:
    """A page of a listing; after one with a number there is a next one."""
    ending = (
        f"<IsTruncated>true</IsTruncated><NextContinuationToken>{number}</NextContinuationToken>"
        if number
        else ""
    )
    return Answer(200, XML, f"<ListBucketResult>{contents}{ending}</ListBucketResult>".encode())


class HostileS3(FaultyServer):
    contents = OBJECT
    is_endless = False

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        return page(self.contents, len(self.requests) * self.is_endless)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileS3]:
    with HostileS3() as server:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": server.url}.items():
            monkeypatch.setenv(name, value)

        yield server


@pytest.fixture
def bucket(server: HostileS3) -> Iterator[Bucket]:
    bucket = Bucket("models")
    yield bucket
    bucket._lister.close()
    bucket._reader.close()


def test_a_listing_is_read(server: HostileS3, bucket: Bucket) -> None:
    assert [
        (stored_object.path, stored_object.size, stored_object.etag)
        for stored_object in bucket.objects("fox/")
    ] == [("a.json", 2, "e")]


@pytest.mark.parametrize(
    "contents",
    [
        OBJECT.replace("Key>", "Name>"),
        OBJECT.replace("Size>", "Length>"),
        OBJECT.replace("ETag>", "Tag>"),
        OBJECT.replace(">2<", ">-2<"),
        OBJECT.replace(">2<", ">two<"),
        OBJECT.replace("fox/", "hare/"),
    ],
    ids=["no key", "no size", "no ETag", "negative", "text", "elsewhere"],
)
def test_a_listing_that_is_none_is_one_line(
    server: HostileS3, bucket: Bucket, contents: str
) -> None:
    server.contents = contents
    with pytest.raises(ModelUnusable, match="s3://models/fox/") as raised:
        bucket.objects("fox/")

    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Length": "2"},
        {"ETag": '"e"', "Transfer-Encoding": "chunked"},
        {"ETag": '"e"', "Content-Length": "-2"},
        {"ETag": '"e"', "Content-Length": "two"},
    ],
    ids=["no ETag", "no size", "negative", "text"],
)
def test_an_object_without_a_size_or_an_etag_is_one_line(
    server: HostileS3, bucket: Bucket, headers: dict[str, str]
) -> None:
    server.replace("HEAD", Answer(200, headers))
    with pytest.raises(ModelUnusable, match=r"s3://models/fox\.tar\.gz") as raised:
        bucket.head("fox.tar.gz")

    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "limit"), [("MAX_PAGES", 5), ("MAX_OBJECTS", 5)])
def test_a_listing_without_an_end_is_given_up(
    server: HostileS3, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    monkeypatch.setattr(f"lmi.sources.bucket.{name}", limit)
    server.is_endless = True
    with pytest.raises(ModelUnusable, match="does not answer as S3: it lists more than"):
        bucket.objects("fox/")

    assert len(server.requests) == limit + 1


@pytest.mark.parametrize("status", [200, 403])
def test_an_answer_that_is_larger_than_its_limit_is_not_read_to_its_end(
    server: HostileS3, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr("lmi.sources.bucket.MAX_ANSWER_BYTES", 1 << 20)
    server.replace("GET", Answer(status, XML, b" " * (3 << 20)))
    with pytest.raises(ModelUnusable, match="an answer has more than 1048576 bytes"):
        bucket.objects("fox/")


def test_a_redirect_of_s3_is_not_followed(server: HostileS3, bucket: Bucket) -> None:
    with HostileS3() as second_server:
        server.replace("GET", Answer(307, XML | {"Location": f"{second_server.url}/x"}), times=10)
        with suppress(ModelUnusable):
            bucket.objects("fox/")

        assert second_server.requests == []
