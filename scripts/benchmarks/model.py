"""The embedded executor's model step against one call of the Hugging Face model, in one run.

Both have the same random weights, float32 (except in columns that say bf16 or int8), a static
batch, and a context of 128 tokens before the first step. The Hugging Face model keeps its
DynamicCache. They take turns in short blocks, so that both meet the same noise of the machine. The
first step of a block is not counted, because it finds the other model's data in the processor's
cache. Sampling and scheduling are not part of a step. The table has medians and, in brackets,
minima.
"""

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

# This comes before the import of torch: threads that spin beside another process cost tenfold.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

from handlers.lmi_dist import loading  # noqa: E402
from handlers.lmi_dist.plan import Chunk, Plan
from handlers.lmi_dist.runner import Runner  # noqa: E402
from lmi.settings.config import EngineConfig  # noqa: E402
from scripts.benchmarks.peers import shapes  # noqa: E402

# Tokens before the first step.
CONTEXT = 128
MAX_LENGTH = 1024
VOCABULARY = 1000
# The turns of each model, and the steps of a turn that count.
BLOCKS = 8
STEPS = 5
SHAPES = {"demo": shapes.Shape("llama", 1024, 192, 512, 5, 6, 2), "135m": shapes.SHAPES["135M"]}
# Settings of our models. The key of a figure ends with the variant's name, but for ours.
VARIANTS: dict[str, dict[str, Any]] = {
    "ours": {},
    "bf16": {"dtype": "bf16"},
    "int8": {"quantize": "int8"},
}
BATCHES = [1, 8, 32, 64]
Step = Callable[[], object]


def measure() -> dict[str, float]:
    """The ratios of median steps, lmi's to the reference's, by key: `demo_8`.

    A key with `_bf16` or `_int8` has such weights.
    """
    figures: dict[str, float] = {}
    for shape in SHAPES:
        figures |= measure_shape(shape, default_threads(shape))

    return figures


def measure_shape(shape: str, num_threads: int) -> dict[str, float]:
    """Return the ratios of one shape."""
    torch.set_num_threads(num_threads)
    transformers_logging.disable_progress_bar()
    print(f"{shape}: {num_threads} threads, load average {os.getloadavg()[0]:.1f}")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(shape, folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        runners: dict[str, Runner] = {}
        for name, settings in VARIANTS.items():
            runners[name] = load(folder, max(BATCHES), **settings)

        for batch in BATCHES:
            steps = {"Hugging Face": reference_step(model, batch)}
            for name, runner in runners.items():
                steps[name] = step_of_runner(runner, batch)

            times_ms = take_turns(steps)
            medians = {name: statistics.median(values) for name, values in times_ms.items()}
            for name in runners:
                key = f"{shape}_{batch}" if name == "ours" else f"{shape}_{batch}_{name}"
                figures[key] = medians[name] / medians["Hugging Face"]

            if shape == "135m":
                figures[f"int8_speedup_{batch}"] = medians["ours"] / medians["int8"]

            print_row(shape, batch, times_ms, medians)

    return figures


def make_model(shape: str, folder: str) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPES[shape].config())).save_pretrained(folder)


def load(folder: str, num_sequences: int, **settings: Any) -> Runner:
    """The runner that an engine has with these settings, with room for so many sequences of
    MAX_LENGTH tokens.
    """
    config = EngineConfig(
        max_num_sequences=num_sequences,
        max_sequence_length=MAX_LENGTH,
        max_kv_cache_tokens=num_sequences * MAX_LENGTH,
        **settings,
    )
    runner, _ = loading.load_runner(folder, config, lambda stage, share: None)
    return runner


def reference_step(model: torch.nn.Module, batch: int) -> Step:
    cache = DynamicCache()
    token = torch.ones(batch, 1, dtype=torch.int64)
    with torch.inference_mode():
        model(
            torch.randint(VOCABULARY, (batch, CONTEXT)),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )

    def step() -> None:
        with torch.inference_mode():
            model(token, past_key_values=cache, use_cache=True)

    return step


def step_of_runner(runner: Runner, batch: int) -> Step:
    """Compute random prompts, and return what makes the next step of all."""
    position = CONTEXT
    num_blocks_each = MAX_LENGTH // runner.tokens_per_block
    tables: list[list[int]] = []
    for slot in range(batch):
        first_block = slot * num_blocks_each
        table = list(range(first_block, first_block + num_blocks_each))
        prompt = torch.randint(VOCABULARY, (CONTEXT,)).tolist()
        runner.forward(Plan([], [Chunk(slot, 0, prompt, 0, table)]))
        tables.append(table)

    def step() -> None:
        nonlocal position
        decodes = [Chunk(slot, position, [1], 1, table) for slot, table in enumerate(tables)]
        runner.forward(Plan(decodes, []))
        position += 1

    return step


def take_turns(steps: dict[str, Step]) -> dict[str, list[float]]:
    """Return the milliseconds of the steps that count, by model."""
    times_ms: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    for block in range(BLOCKS + 1):
        for name, step in steps.items():
            for index in range(STEPS + 1):
                start = time.perf_counter()
                step()
                # The first block warms up, and so does the first step of each.
                if block and index:
                    times_ms[name].append((time.perf_counter() - start) * 1e3)

    return times_ms


def print_row(
    shape: str, batch: int, times_ms: dict[str, list[float]], medians: dict[str, float]
) -> None:
    cells = []
    for name, median in medians.items():
        least = min(times_ms[name])
        ratio = median / medians["Hugging Face"]
        cells.append(f"{name}: {median:.2f} ms [{least:.2f}] {ratio:.2f}x")

    print(f"{shape:>5} batch {batch:>2}   " + "   ".join(cells), flush=True)


def default_threads(shape: str) -> int:
    """The engine's default number of threads. A small model leaves one core to the front end."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores - 1) if shape == "demo" else cores
