"""The memory of the blocks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.native.model import NativeModel
from handlers.lmi_dist.native.records import F32
from tests.handlers.lmi_dist.native.builds import library, variants
from tests.handlers.lmi_dist.native.models import llama, packed, run_whole


def resident_bytes(array: Array) -> int:
    """The memory that the mapping around an array has taken."""
    address = array.ctypes.data
    is_around = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, amount = line.partition(" ")
        if not name.endswith(":"):
            begin, end = (int(bound, 16) for bound in name.split("-"))
            is_around = begin <= address < end
        elif is_around and name == "Rss:":
            return int(amount.split()[0]) * 1024

    raise AssertionError("the tensor lies in no mapping")


@pytest.mark.skipif("LMI_NATIVE_LIBRARY" in os.environ, reason="the sanitizers' memory is malloc's")
def test_one_short_prompt_takes_memory_for_its_block_and_for_no_other() -> None:
    kernels = library(variants()[0])
    program = llama()
    model = NativeModel(kernels, packed(kernels, program, F32), num_blocks=4096, num_threads=1)
    block_bytes = kernels.block_bytes(program.num_layers, program.num_kv_heads, program.head_dim)
    run_whole(model, [1, 2, 3], [2048])
    assert 0 < resident_bytes(model.pool) < 2 * block_bytes
