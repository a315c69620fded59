"""What blocks of 4 and 8 bits change of a real model's answers: the table of docs/quantisation.md.

    scripts/bench quantisation [--write]

The model is SmolLM2-135M-Instruct, whose weights are rounded to the nearest number here.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from handlers.lmi_dist.native_runner import NativeRunner
from handlers.lmi_dist.plan import Chunk, Plan
from lmi.settings.config import EngineConfig
from tests.handlers.lmi_dist.play import forward, load_native, table_of
from tests.quantised_models import Variant, quantised_folder
from tests.real_model import smollm2

PAGE = Path(__file__).parents[2] / "docs" / "quantisation.md"
IN_FLOAT32 = EngineConfig(dtype="fp32")
NUM_RANDOM_TOKENS = 200
MAX_LENGTH = 256
VOCAB_SIZE = 49152

METHODS = {
    "GPTQ, 4 bits, symmetric, groups of 128": Variant("gptq", 4, 128, is_symmetric=True),
    "int-quantized, 8 bits": Variant("int-quantized", 8, -1, is_symmetric=True),
    "GPTQ, 8 bits, zero points, groups of 128": Variant("gptq", 8, 128),
    "pack-quantized, 4 bits, zero points, scales in bf16, groups of 128": Variant(
        "pack-quantized", 4, 128, scale_dtype=torch.bfloat16
    ),
    "AWQ, groups of 32": Variant("gemm", 4, 32),
    "AWQ, groups of 128": Variant("gemm", 4, 128),
    "pack-quantized, 4 bits, zero points, scales in float32, groups of 128": Variant(
        "pack-quantized", 4, 128, scale_dtype=torch.float32
    ),
}
METHODS_TITLE = "| method | largest | mean | best tokens that agree |"


@dataclass(frozen=True)
class Difference:
    """How log-probs of the whole vocabulary differ from those of float32."""

    largest: float
    mean: float
    num_equal: int
    num_tokens: int

    @property
    def cells(self) -> str:
        return f"{self.largest:.2g} | {self.mean:.1g} | {self.num_equal} of {self.num_tokens}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        table = table_of_methods(folder)
    finally:
        shutil.rmtree(folder)

    if arguments.write:
        write(table)

    return 0


def table_of_methods(folder: Path) -> list[str]:
    ids = np.random.default_rng(1).integers(0, VOCAB_SIZE, NUM_RANDOM_TOKENS).tolist()
    rows = [METHODS_TITLE, "|---|---|---|---|"]
    for name, variant in METHODS.items():
        quantised, floats = quantised_folder(smollm2(), folder / "method", variant)
        exact = log_probs(load_native(floats, IN_FLOAT32, max_length=MAX_LENGTH), ids)
        kept = log_probs(load_native(quantised, max_length=MAX_LENGTH), ids)
        rows.append(f"| {name} | {difference(kept, exact).cells} |")
        print(rows[-1], flush=True)
        shutil.rmtree(folder / "method")

    return rows


def log_probs(runner: NativeRunner, ids: list[int]) -> Tensor:
    """Of every token, over the whole vocabulary: (num_tokens, vocab_size)."""
    chunk = Chunk(0, 0, ids, len(ids), table_of(0, MAX_LENGTH))
    return forward(runner, Plan([], [chunk])).log_softmax(-1)


def difference(found: Tensor, exact: Tensor) -> Difference:
    distances = (found - exact).abs()
    num_equal = int((found.argmax(-1) == exact.argmax(-1)).sum())
    return Difference(float(distances.max()), float(distances.mean()), num_equal, len(found))


def write(table: list[str]) -> None:
    """Put a table into the page, in the place of the one with the same title."""
    lines = PAGE.read_text().splitlines()
    first = lines.index(table[0])
    end = first
    while end < len(lines) and lines[end].startswith("|"):
        end += 1

    lines[first:end] = table
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
