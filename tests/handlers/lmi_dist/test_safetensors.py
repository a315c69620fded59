"""The reader of safetensors gives what the library wrote, and names what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file

from handlers.lmi_dist.placement import to_array, to_tensor
from handlers.lmi_dist.safetensors_file import SafetensorsFile

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def test_tensors_of_every_dtype_are_those_that_were_written(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "file.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "file.safetensors")

    assert set(file) == tensors.keys() and len(file) == len(tensors)

    for name, tensor in tensors.items():
        assert file[name].shape == tuple(tensor.shape)
        assert np.array_equal(file[name], to_array(tensor)), name
        assert torch.equal(to_tensor(file[name]), tensor)


def test_a_tensor_is_a_view_of_the_mapped_file(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1000, 1000)}, tmp_path / "file.safetensors")
    file = SafetensorsFile(tmp_path / "file.safetensors")
    assert not file["w"].flags.writeable and np.shares_memory(file["w"], file["w"])


def write(path: Path, header: object, num_bytes: int = 8) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))
    return path


def entry(**changes: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"[", "its header is wrong"),
        ({"w": 5}, "its header is wrong"),
        (entry(shape="2"), "its header is wrong"),
        (entry(data_offsets=[0, 12], shape=[3]), "tensor w lies in bytes 0 to 12 of 8"),
        (entry(data_offsets=[-4, 4]), "tensor w lies in bytes -4 to 4 of 8"),
        (entry(data_offsets=[8, 0]), "tensor w lies in bytes 8 to 0 of 8"),
        (entry(shape=[3]), "tensor w has 8 bytes"),
        (entry(shape=[-1, -2]), "tensor w has 8 bytes"),
    ],
)
def test_a_broken_header_is_named(header: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        SafetensorsFile(write(tmp_path / "file", header))


def test_a_dtype_that_is_not_read_is_named_when_its_tensor_is_read(tmp_path: Path) -> None:
    header = entry() | {"q": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}
    file = SafetensorsFile(write(tmp_path / "file", header))
    assert file["w"].tolist() == [0, 0]
    with pytest.raises(ValueError, match="its dtype F8_E4M3 is not read here"):
        file["q"]


@given(content=st.binary(max_size=80), size=st.integers(0, 2**64 - 1))
def test_no_bytes_are_read_as_more_than_they_are(
    content: bytes, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(size.to_bytes(8, "little") + content)
    try:
        tensors = dict(SafetensorsFile(path))
    except ValueError:
        return

    assert all(array.nbytes <= len(content) for array in tensors.values())
