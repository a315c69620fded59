"""What numbers of 4 and 8 bits change of a real model's answers: the tables of
docs/quantisation.md.

    scripts/bench quantisation [--write]

The model is SmolLM2-135M-Instruct. The file that its package brings has weights of four bits, so a
grid of four bits over the same groups of inputs would fit them as those of no other model. So the
options quantise a checkpoint whose channels are in another order: its answers are the same, and its
groups are others.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from handlers.lmi_dist.facts import read_facts
from handlers.lmi_dist.native.records import Panels
from handlers.lmi_dist.native_runner import NativeRunner
from handlers.lmi_dist.operations import Linear
from handlers.lmi_dist.plan import Chunk, Plan
from lmi.settings.config import EngineConfig
from lmi.shared.gguf_file import read_model
from lmi.sources.gguf.config import config_of
from tests.gguf_files import gemma3_file, smollm2_file
from tests.handlers.lmi_dist.play import forward, load_native, table_of
from tests.quantised_models import Variant, quantised_folder
from tests.real_model import smollm2

PAGE = Path(__file__).parents[2] / "docs" / "quantisation.md"
WEIGHTS = "model.safetensors"
IN_FLOAT32 = EngineConfig(dtype="fp32")
NUM_RANDOM_TOKENS = 200
# Of the text whose perplexity is measured
NUM_WINDOWS = 4
WINDOW = 1024
MAX_LENGTH = WINDOW
HEAD_DIM = 64
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
FILES = {
    "SmolLM2-135M, Q4_1 (and Q8_0)": smollm2_file,
    "Gemma 3 270M, Q4_K_M (Q4_K, Q5_0, Q6_K, Q8_0)": gemma3_file,
}
FILES_TITLE = "| GGUF file | largest | mean | best tokens that agree |"
METHODS_TITLE = "| method | largest | mean | best tokens that agree |"
OPTIONS = {
    "`--dtype bf16`": EngineConfig(dtype="bf16"),
    "`--quantize int8`": EngineConfig(quantize="int8"),
    "`--quantize int4`": EngineConfig(quantize="int4"),
}
OPTIONS_TITLE = "| option | bytes a weight | largest | mean | best tokens that agree | perplexity |"


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
    parser.add_argument("--write", action="store_true", help="put the tables into the page")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        tables = [table_of_methods(folder), table_of_options(folder), table_of_files(folder)]
    finally:
        shutil.rmtree(folder)

    if arguments.write:
        for table in tables:
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


def table_of_options(folder: Path) -> list[str]:
    shuffled = with_shuffled_channels(smollm2(), folder / "shuffled")
    windows = windows_of_text(shuffled)
    exact_runner = load_native(shuffled, IN_FLOAT32, max_length=MAX_LENGTH)
    exact = [log_probs(exact_runner, ids) for ids in windows]
    rows = [OPTIONS_TITLE, "|---|---|---|---|---|---|"]
    rows.append(f"| float32 | 4.00 | | | | {perplexity(exact, windows):.2f} |")
    print(rows[-1], flush=True)
    for name, config in OPTIONS.items():
        runner = load_native(shuffled, config, max_length=MAX_LENGTH)
        rounded = [log_probs(runner, ids) for ids in windows]
        size = f"{bytes_of_number(runner):.2f}"
        cells = difference(torch.cat(rounded), torch.cat(exact)).cells
        rows.append(f"| {name} | {size} | {cells} | {perplexity(rounded, windows):.2f} |")
        print(rows[-1], flush=True)

    return rows


def table_of_files(folder: Path) -> list[str]:
    rows = [FILES_TITLE, "|---|---|---|---|"]
    for name, file in FILES.items():
        opened = folder / file.__name__
        opened.mkdir()
        (opened / "model.gguf").symlink_to(file())
        (opened / "config.json").write_text(json.dumps(config_of(read_model(file()))))
        vocab_size = read_facts(str(opened)).vocab_size
        ids = np.random.default_rng(1).integers(0, vocab_size, NUM_RANDOM_TOKENS).tolist()
        exact = log_probs(load_native(opened, IN_FLOAT32, max_length=MAX_LENGTH), ids)
        kept = log_probs(load_native(opened, max_length=MAX_LENGTH), ids)
        rows.append(f"| {name} | {difference(kept, exact).cells} |")
        print(rows[-1], flush=True)

    return rows


def log_probs(runner: NativeRunner, ids: list[int]) -> Tensor:
    """Of every token, over the whole vocabulary: (num_tokens, vocab_size)."""
    chunk = Chunk(0, 0, ids, len(ids), table_of(0, MAX_LENGTH))
    return forward(runner, Plan([], [chunk])).log_softmax(-1)


def difference(found: Tensor, exact: Tensor) -> Difference:
    distances = (found - exact).abs()
    num_equal = int((found.argmax(-1) == exact.argmax(-1)).sum())
    return Difference(float(distances.max()), float(distances.mean()), num_equal, len(found))


def perplexity(rows: list[Tensor], windows: list[list[int]]) -> float:
    """Of the tokens behind the first of each window."""
    losses: list[Tensor] = []
    for row, ids in zip(rows, windows, strict=True):
        next_ids = torch.tensor(ids[1:])[:, None]
        losses.append(-row[:-1].gather(1, next_ids))

    return math.exp(float(torch.cat(losses).double().mean()))


def windows_of_text(folder: Path) -> list[list[int]]:
    """The first tokens of the manual that comes with Python."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer.encode(text[: 16 * NUM_WINDOWS * WINDOW]).ids
    return [ids[start : start + WINDOW] for start in range(0, NUM_WINDOWS * WINDOW, WINDOW)]


def bytes_of_number(runner: NativeRunner) -> float:
    """Of the linears."""
    num_bytes = 0
    num_numbers = 0
    for panels in panels_of(runner):
        num_bytes += panels.memory.nbytes
        num_numbers += panels.num_out * panels.num_in

    return num_bytes / num_numbers


def panels_of(runner: NativeRunner) -> Iterator[Panels]:
    for operation in runner.program.operations:
        if isinstance(operation, Linear):
            yield operation.weight
            if operation.gate is not None:
                yield operation.gate


def with_shuffled_channels(source: Path, folder: Path) -> Path:
    """A copy of a Llama whose channels are in another order: those of the residual, those between
    the linears of a feed-forward, and those of the values in each head.
    """
    shutil.copytree(source, folder)
    tensors = load_file(folder / WEIGHTS)
    dice = torch.Generator().manual_seed(1)
    hidden = torch.randperm(tensors["model.norm.weight"].numel(), generator=dice)
    for name in list(tensors):
        tensor = tensors[name]
        if name.endswith(("norm.weight", "layernorm.weight")):
            tensor = tensor[hidden]
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor = tensor[hidden]
        else:
            tensor = tensor[:, hidden]

        tensors[name] = tensor

    for prefix in [name.removesuffix("up_proj.weight") for name in tensors if "up_proj" in name]:
        shuffle_inner(tensors, prefix, dice)

    for prefix in [name.removesuffix("v_proj.weight") for name in tensors if "v_proj" in name]:
        shuffle_values(tensors, prefix, dice)

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    return folder


def shuffle_inner(tensors: dict[str, Tensor], prefix: str, dice: torch.Generator) -> None:
    order = torch.randperm(len(tensors[f"{prefix}up_proj.weight"]), generator=dice)
    for name in ("gate_proj", "up_proj"):
        tensors[f"{prefix}{name}.weight"] = tensors[f"{prefix}{name}.weight"][order]

    tensors[f"{prefix}down_proj.weight"] = tensors[f"{prefix}down_proj.weight"][:, order]


def shuffle_values(tensors: dict[str, Tensor], prefix: str, dice: torch.Generator) -> None:
    """All heads have one order of their channels."""
    order = torch.randperm(HEAD_DIM, generator=dice)
    values = tensors[f"{prefix}v_proj.weight"].unflatten(0, (-1, HEAD_DIM))
    tensors[f"{prefix}v_proj.weight"] = values[:, order].flatten(0, 1)
    outputs = tensors[f"{prefix}o_proj.weight"].unflatten(1, (-1, HEAD_DIM))
    tensors[f"{prefix}o_proj.weight"] = outputs[:, :, order].flatten(1, 2)


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
