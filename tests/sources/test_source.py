import pytest

from lmi.errors import ModelUnusable
from lmi.sources.source import HubModel, RemoteSource, S3Model, parse, remote


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("Qwen/Qwen3-0.6B", HubModel("Qwen/Qwen3-0.6B")),
        ("gpt2", HubModel("gpt2")),
        ("owner/name:Q4_K_M", HubModel("owner/name", "Q4_K_M")),
        ("owner/name/model.gguf", HubModel("owner/name", "model.gguf")),
        ("owner/name:model.gguf", HubModel("owner/name", "model.gguf")),
        ("owner/name/Q4/model.gguf", HubModel("owner/name", "Q4/model.gguf")),
        ("owner/name:Q4/model.gguf", HubModel("owner/name", "Q4/model.gguf")),
        ("s3://bucket/llama", S3Model("bucket", "llama/")),
        ("s3://bucket/a/llama//", S3Model("bucket", "a/llama/")),
        ("S3://bucket/llama", S3Model("bucket", "llama/")),
        ("s3://bucket", S3Model("bucket", "")),
        ("s3://bucket/", S3Model("bucket", "")),
        ("s3://bucket/a/model.tar.gz", S3Model("bucket", "a/model.tar.gz")),
        ("s3://bucket/model.TGZ", S3Model("bucket", "model.TGZ")),
        ("s3://bucket/model.tar", S3Model("bucket", "model.tar")),
        ("s3://bucket/model.tar.gz/", S3Model("bucket", "model.tar.gz/")),
        ("s3://bucket/a/model.gguf", S3Model("bucket", "a/model.gguf")),
    ],
)
def test_a_text_names_a_remote_source(text: str, source: RemoteSource) -> None:
    assert parse(text) == source


@pytest.mark.parametrize(
    "text",
    [
        "/opt/ml/model",
        "./fox",
        "../fox",
        "fox/",
        "a/b/c",
        ".",
        "file:///opt/ml/model",
        "a--b/c",
        "a/b.git",
        "a/b.gguf",
        "b.gguf",
        "b:Q4_K_M",
        "a/b:",
        "a/b:Q4 K",
        "a/b:Q4:K",
        "a/b/c:Q4",
        "a--b/c:Q4",
        "../a/b.gguf",
        "./a/b/c.gguf",
        "-a/b",
        "",
    ],
)
def test_other_texts_are_local_folders(text: str) -> None:
    assert remote(text, exists_locally=False) is None
    with pytest.raises(ModelUnusable, match="owner/name"):
        parse(text)


def test_an_existing_folder_beats_a_hub_id() -> None:
    assert remote("Qwen/Qwen3-0.6B", exists_locally=True) is None


def test_the_folder_of_serve_needs_an_owner_to_be_a_hub_id() -> None:
    assert remote("gpt2", exists_locally=False, needs_owner=True) is None
    assert remote("openai/gpt2", exists_locally=False, needs_owner=True) == HubModel("openai/gpt2")


@pytest.mark.parametrize(
    "text", ["gs://bucket/fox", "https://host/fox", "hf://owner/name", "djl://a/b"]
)
def test_a_scheme_that_is_not_known_is_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(ModelUnusable, match="s3://bucket/prefix") as raised:
        remote(text, exists_locally=False)

    assert text in str(raised.value)


def test_a_url_without_a_bucket_is_refused() -> None:
    with pytest.raises(ModelUnusable, match="names no bucket"):
        parse("s3:///fox")


def test_the_text_of_a_source_is_its_url_without_a_slash_at_the_end() -> None:
    texts = ["s3://b/p", "s3://b", "s3://b/k.tar", "s3://b/m.gguf", "a/b", "a/b:Q8_0", "a/b/m.gguf"]
    texts += ["https://host:8443/m.gguf"]
    assert [str(parse(text)) for text in ("s3://b/p/", "s3://b/", *texts[2:])] == texts
    assert str(parse("a/b:m.gguf")) == "a/b/m.gguf"
    assert str(parse("https://me:secret@host/m.gguf?key=secret#x")) == "https://host/m.gguf"
