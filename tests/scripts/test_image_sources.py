"""The hub and the S3 from which the test of the image lets a container fetch its model, asked by
real clients.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from scripts.image.sources import BUCKET, COMMIT, MODEL, model_sources

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 5000}


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)

    with model_sources(tmp_path) as url:
        yield url


def test_the_hubs_client_fetches_a_snapshot(url: str, tmp_path: Path) -> None:
    code = f"from huggingface_hub import snapshot_download; print(snapshot_download({MODEL!r}))"
    environ = {
        **os.environ,
        "HF_ENDPOINT": url,
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]

    folder = Path(done.stdout.splitlines()[-1])
    assert folder.name == COMMIT
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES


def test_boto3_lists_a_prefix_and_reads_an_object_whole_and_in_part(url: str) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="local",
        aws_access_key_id="nobody",
        aws_secret_access_key="nothing",
    )
    objects = client.list_objects_v2(Bucket=BUCKET, Prefix="demo/")["Contents"]

    assert {listed_object["Key"]: listed_object["Size"] for listed_object in objects} == {
        f"demo/{name}": len(data) for name, data in FILES.items()
    }
    assert "Contents" not in client.list_objects_v2(Bucket=BUCKET, Prefix="other/")

    whole = client.get_object(Bucket=BUCKET, Key="demo/model.safetensors")
    assert (
        whole["Body"].read() == FILES["model.safetensors"] and whole["ETag"] == objects[1]["ETag"]
    )

    part = client.get_object(Bucket=BUCKET, Key="demo/model.safetensors", Range="bytes=10-19")
    assert part["Body"].read() == FILES["model.safetensors"][10:20]

    client.close()
