"""What a GGUF file says of itself is what ggml's own reader finds, and a broken one is one line."""

import random
import re
import resource
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from lmi.errors import ModelUnusable
from lmi.shared.gguf_file import OTHER_TYPES, TENSOR_TYPES, ValueKind, read_model
from tests.gguf_files import (
    Typed,
    Written,
    floats,
    gguf_bytes,
    pair,
    smollm2_file,
    text,
    write_gguf,
)

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "a.number": Typed(ValueKind.INT64, -5),
    "a.share": 0.5,
    "a.switch": True,
    "some.numbers": [1, 2, 3],
    "some.shares": [0.25, 1.0],
    "some.switches": [True, False],
    "some.texts": ["a", "größer", ""],
    "no.texts": Typed(ValueKind.TEXT, []),
}
TENSORS = {
    "first": floats(np.arange(12).reshape(3, 4)),
    "second": Written("Q8_0", (2, 64), bytes(4 * 34)),
    "third": floats([1.0]),
}
NUM_MUTATIONS = 400
# Of address space beyond what the process has
MAX_MUTANT_BYTES = 1 << 30


def refusal(data: bytes, folder: Path, name: str = "model.gguf") -> str:
    file = folder / name
    file.write_bytes(data)
    with pytest.raises(ModelUnusable) as raised:
        read_model(file)
    message = str(raised.value)
    assert message.startswith(f"{file}: ") and "\n" not in message
    return message.removeprefix(f"{file}: ")


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_are_those_that_were_written(tmp_path: Path, version: int) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_bytes(METADATA, TENSORS, version=version))
    model = read_model(file)
    metadata = {
        key: value.value if isinstance(value, Typed) else value for key, value in METADATA.items()
    }

    assert model.metadata == metadata
    assert {name: tensor.shape for name, tensor in model.tensors.items()} == {
        "first": (3, 4),
        "second": (2, 64),
        "third": (1,),
    }

    data = file.read_bytes()
    for name, tensor in model.tensors.items():
        assert tensor.start % 32 == 0
        assert data[tensor.start : tensor.end] == TENSORS[name].data


def test_a_real_file_is_read_as_ggml_reads_it() -> None:
    file = smollm2_file()
    model = read_model(file)
    theirs = gguf.GGUFReader(file)
    assert model.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        our_tensor = model.tensors[tensor.name]
        assert our_tensor.start == tensor.data_offset and our_tensor.num_bytes == tensor.n_bytes
        assert our_tensor.shape == tuple(reversed(tensor.shape.tolist()))
        assert our_tensor.type.name == tensor.tensor_type.name

    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert model.metadata.keys() == fields.keys()
    for name, field in fields.items():
        # Theirs takes seconds for a vocabulary
        if not name.startswith("tokenizer.ggml."):
            assert model.metadata[name] == field.contents(), name


def raw_tensor(
    name: str = "w",
    sizes: tuple[int, ...] = (4,),
    kind: int = 0,
    offset: int = 0,
    num_dimensions: int | None = None,
) -> bytes:
    """The description of a tensor, its sizes with the innermost first."""
    count = len(sizes) if num_dimensions is None else num_dimensions
    head = text(name) + struct.pack("<I", count) + b"".join(struct.pack("<Q", n) for n in sizes)
    return head + struct.pack("<IQ", kind, offset)


def raw_file(*tensors: bytes, pairs: tuple[bytes, ...] = (), num_bytes: int = 64) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join((*pairs, *tensors))
    return head + bytes(-len(head) % 32) + bytes(num_bytes)


HUGE = 1 << 63


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"GG", "it ends within its head, at byte 2"),
        (b"PK\x03\x04" + bytes(100), "is not a GGUF file: it does not begin with GGUF"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is a big-endian GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "is GGUF of version 1, only 2 and 3 are read"),
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), f"names {HUGE} tensors, at most 65536"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), f"names {HUGE} pairs of metadata"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE), f"a text of {HUGE} bytes"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1000), "it ends within its head"),
        (raw_file(pairs=(text(b"\xff") + bytes(8),)), "is not UTF-8"),
        (raw_file(pairs=(text("a") + struct.pack("<I", 13),)), "a value of the unknown kind 13"),
        (raw_file(pairs=(pair("a", 1), pair("a", 2))), "its metadata has 'a' twice"),
        (raw_file(pairs=(text("a") + struct.pack("<IB", 7, 2),)), "must be true or false"),
        (
            raw_file(pairs=(text("a") + struct.pack("<IIQ", 9, 9, 1),)),
            "'a' is an array of arrays",
        ),
        (
            raw_file(pairs=(text("a") + struct.pack("<IIQ", 9, 0, HUGE),)),
            "its arrays have over 8388608 items, at 'a'",
        ),
        (
            raw_file(pairs=(text("a") + struct.pack("<IIQ", 9, 12, 1 << 22),)),
            "it ends within its head",
        ),
        (
            raw_file(pairs=(text("a") + struct.pack("<IIQ", 9, 8, 1 << 22),), num_bytes=1000),
            "it ends within its head",
        ),
        (raw_file(pairs=(pair("general.alignment", 0),)), "general.alignment must be a power of"),
        (raw_file(pairs=(pair("general.alignment", 48),)), "general.alignment must be a power of"),
        (
            raw_file(pairs=(pair("general.alignment", 1 << 30),)),
            "from 8 to 65536, given 1073741824",
        ),
        (
            raw_file(pairs=(pair("general.alignment", "32"),)),
            "general.alignment must be a power of",
        ),
        (raw_file(raw_tensor(num_dimensions=0)), "has 0 dimensions, allowed are 1 to 4"),
        (raw_file(raw_tensor(num_dimensions=1 << 31)), "has 2147483648 dimensions"),
        (raw_file(raw_tensor(sizes=(0,))), "has the shape (0,), allowed are 1 to"),
        (raw_file(raw_tensor(sizes=(HUGE, 2))), "allowed are 1 to 1099511627776 numbers"),
        (raw_file(raw_tensor(sizes=(1 << 32, 1 << 32))), "allowed are 1 to 1099511627776 numbers"),
        (raw_file(raw_tensor(kind=99)), "is the unknown type 99, which is not read, only F32"),
        (raw_file(raw_tensor(kind=8)), "has rows of 4 numbers, Q8_0 needs a multiple of 32"),
        (
            raw_file(raw_tensor(offset=8)),
            "begins at byte 8 of the data, which is no multiple of 32",
        ),
        (raw_file(raw_tensor(offset=HUGE)), "it is cut short or damaged"),
        (raw_file(raw_tensor(sizes=(17,))), "it is cut short or damaged"),
        (raw_file(raw_tensor(), raw_tensor(offset=32)), "it has tensor 'w' twice"),
        (raw_file(raw_tensor("a", (16,)), raw_tensor("b", offset=32)), "'a' and 'b' overlap"),
        (raw_file(raw_tensor("a"), raw_tensor("b")), "'a' and 'b' overlap"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(data: bytes, says: str, tmp_path: Path) -> None:
    assert says in refusal(data, tmp_path)


@pytest.mark.parametrize(("number", "name"), OTHER_TYPES.items())
def test_a_type_that_is_not_read_is_refused_by_its_name(
    number: int, name: str, tmp_path: Path
) -> None:
    message = refusal(raw_file(raw_tensor(kind=number)), tmp_path)
    assert message.startswith(f"tensor 'w' is {name}, which is not read")


def test_every_type_of_ggml_is_read_or_known_by_its_name() -> None:
    for kind in gguf.GGMLQuantizationType:
        type_name = TENSOR_TYPES[kind].name if kind in TENSOR_TYPES else OTHER_TYPES[kind]
        assert type_name == kind.name


def splits(folder: Path, count: int) -> list[Path]:
    """A model in so many files, of which the first has the metadata."""
    files = []
    for number in range(count):
        split_keys = {"split.no": number, "split.count": count, "split.tensors.count": count}
        metadata = split_keys | METADATA if number == 0 else split_keys
        file = folder / f"m-{number + 1:05}-of-{count:05}.gguf"
        files.append(write_gguf(file, metadata, {f"w{number}": floats([number])}))
    return files


@pytest.mark.parametrize("number", [0, 2])
def test_a_split_model_is_read_from_any_of_its_files(tmp_path: Path, number: int) -> None:
    files = splits(tmp_path, 3)
    model = read_model(files[number])
    assert list(model.files) == files
    assert model.metadata["a.share"] == 0.5
    assert {name: tensor.file for name, tensor in model.tensors.items()} == {
        "w0": files[0],
        "w1": files[1],
        "w2": files[2],
    }


def test_a_split_model_without_one_of_its_files_is_refused_by_that_name(tmp_path: Path) -> None:
    files = splits(tmp_path, 3)
    files[1].unlink()
    with pytest.raises(ModelUnusable, match=f"{re.escape(str(files[1]))}: is missing"):
        read_model(files[0])


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"split.no": 0, "split.count": 2}, "split.no must be 1, given 0"),
        ({}, "split.no must be 1, given null"),
    ],
)
def test_a_file_of_another_split_model_is_refused(
    tmp_path: Path, changed: dict[str, int], says: str
) -> None:
    files = splits(tmp_path, 2)
    write_gguf(files[1], changed, {"w1": floats([1])})
    with pytest.raises(ModelUnusable, match=re.escape(says)):
        read_model(files[0])


def test_a_tensor_in_two_files_of_a_model_is_refused(tmp_path: Path) -> None:
    files = splits(tmp_path, 2)
    write_gguf(files[1], {"split.no": 1, "split.count": 2}, {"w0": floats([1])})
    with pytest.raises(ModelUnusable, match="tensor w0 is in"):
        read_model(files[0])


def test_a_name_that_counts_thousands_of_files_is_refused_before_they_are_looked_for(
    tmp_path: Path,
) -> None:
    message = refusal(gguf_bytes(METADATA), tmp_path, "m-00001-of-99999.gguf")
    assert "counts from 00001 to at most 1024" in message


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelUnusable, match="is no file"):
        read_model(tmp_path / "model.gguf")


def mutants() -> list[bytes]:
    """Files that differ from a sound one: bytes changed, huge numbers, cut short, parts moved."""
    sound = gguf_bytes(METADATA, TENSORS)
    chance = random.Random(46)
    numbers = [0, 1, 255, (1 << 31) - 1, (1 << 32) - 1, 1 << 62, (1 << 63) + 1, (1 << 64) - 1]
    mutants = []
    for index in range(NUM_MUTATIONS):
        data = bytearray(sound)
        at = chance.randrange(4, len(data) - 8)
        match index % 4:
            case 0:
                for _ in range(chance.randrange(1, 5)):
                    data[chance.randrange(len(data))] = chance.randrange(256)
            case 1:
                data[at : at + 8] = struct.pack("<Q", chance.choice(numbers))
            case 2:
                del data[at:]
            case 3:
                length = chance.randrange(1, 40)
                data[at:at] = data[at - 4 : at - 4 + length]

        mutants.append(bytes(data))

    return mutants


def test_mutated_files_are_read_or_refused_in_one_line_and_take_no_memory(tmp_path: Path) -> None:
    """What is read of a changed file still lies within it."""
    num_refused = 0
    file = tmp_path / "model.gguf"
    with open("/proc/self/statm") as statm:
        size_now = int(statm.read().split()[0]) * resource.getpagesize()

    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size_now + MAX_MUTANT_BYTES, limits[1]))
    try:
        for data in mutants():
            file.write_bytes(data)
            try:
                model = read_model(file)
            except ModelUnusable as error:
                num_refused += 1
                assert "\n" not in str(error)
            else:
                assert all(tensor.end <= len(data) for tensor in model.tensors.values())
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)

    assert num_refused > NUM_MUTATIONS / 2
