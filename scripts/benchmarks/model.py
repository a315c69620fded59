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

# Before torch: threads that spin beside another process cost tenfold
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

from handlers.lmi_dist import loading  # noqa: E402
from handlers.lmi_dist.plan import Chunk, Plan
from handlers.lmi_dist.runner import Runner  # noqa: E402
from lmi.settings.config import EngineConfig  # noqa: E402
from scripts.benchmarks.peers import shapes  # noqa: E402

CONTEXT = 128
MAX_LENGTH = 1024
VOCABULARY = 1000
BLOCKS = 8
STEPS = 5
SHAPES = {"demo": shapes.Shape("llama", 1024, 192, 512, 5, 6, 2), "135m": shapes.SHAPES["135M"]}
# The key of a figure ends with the variant's name
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
    torch.set_num_threads(num_threads)
    transformers_logging.disable_progress_bar()
    print(f"{shape}: {num_threads} threads, load average {os.getloadavg()[0]:.1f}")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(shape, folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        runners = {
            name: load(folder, max(BATCHES), **settings) for name, settings in VARIANTS.items()
        }
        for batch in BATCHES:
            steps = {"Hugging Face": reference_step(model, batch)}
            steps |= {name: own_step(runner, batch) for name, runner in runners.items()}
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


def own_step(runner: Runner, batch: int) -> Step:
    position = CONTEXT
    num_blocks = MAX_LENGTH // runner.tokens_per_block  # of one sequence
    tables = [list(range(slot * num_blocks, (slot + 1) * num_blocks)) for slot in range(batch)]
    for slot, table in enumerate(tables):
        prompt = torch.randint(VOCABULARY, (CONTEXT,)).tolist()
        runner.forward(Plan([], [Chunk(slot, 0, prompt, 0, table)]))

    def step() -> None:
        nonlocal position
        runner.forward(
            Plan([Chunk(slot, position, [1], 1, table) for slot, table in enumerate(tables)], [])
        )
        position += 1

    return step


def take_turns(steps: dict[str, Step]) -> dict[str, list[float]]:
    times_ms: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    for block in range(BLOCKS + 1):
        for name, step in steps.items():
            for index in range(STEPS + 1):
                start = time.perf_counter()
                step()
                # The first block warms up
                if block and index:
                    times_ms[name].append((time.perf_counter() - start) * 1e3)

    return times_ms


def print_row(
    shape: str, batch: int, times_ms: dict[str, list[float]], medians: dict[str, float]
) -> None:
    cells = [
        f"{name}: {median:.2f} ms [{min(times_ms[name]):.2f}] "
        f"{median / medians['Hugging Face']:.2f}x"
        for name, median in medians.items()
    ]
    print(f"{shape:>5} batch {batch:>2}   " + "   ".join(cells), flush=True)


def default_threads(shape: str) -> int:
    """The engine's default number of threads. A small model leaves one core to the front end."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores - 1) if shape == "demo" else cores
