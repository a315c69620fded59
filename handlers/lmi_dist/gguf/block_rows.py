"""Rows of a weight as the blocks of a GGUF file, which our kernels multiply by as they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from msgspec import Struct

from handlers.lmi_dist.gguf.blocks import Bytes, Floats, dequantise
from lmi.shared.gguf_file import TensorType


class BlockRows(Struct, frozen=True):
    """Rows of a weight (num_rows, num_columns) in blocks of one type."""

    type: TensorType
    # (num_rows, bytes of a row), uint8.
    data: Bytes

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers in them, (num_rows, num_columns)."""
        num_rows, num_bytes = self.data.shape
        return num_rows, num_bytes // self.type.num_bytes * self.type.num_elements

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, rows: slice) -> BlockRows:
        return BlockRows(self.type, self.data[rows])

    def floats(self) -> Floats:
        """Return the numbers in float32, (num_rows, num_columns)."""
        numbers = dequantise(np.ascontiguousarray(self.data).reshape(-1), self.type)
        return numbers.reshape(self.shape)


def joined_by_type(weights: Sequence[BlockRows]) -> list[BlockRows]:
    """Return the same rows in the same order, neighbours of one type in one."""
    joined: list[BlockRows] = []
    for kind, neighbours in groupby(weights, key=lambda rows: rows.type):
        datas = [rows.data for rows in neighbours]
        data = datas[0] if len(datas) == 1 else np.concatenate(datas)
        joined.append(BlockRows(kind, data))

    return joined
