"""The native runner: as exact as transformers in float32 and in bfloat16, int8 close, limits and
plans kept.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from handlers.lmi_dist.native_runner import NativeRunner
from handlers.lmi_dist.plan import BlockCopy, Chunk, Plan
from lmi.errors import SecurityRefused
from lmi.settings.config import EngineConfig
from tests.handlers.lmi_dist.native.builds import exact_variants, library
from tests.handlers.lmi_dist.play import forward, load_native, table_of
from tests.handlers.lmi_dist.whole_sequence import read_program, run
from tests.tiny_models import FAMILIES, VOCAB_SIZE, tiny_model

DEMO = Path(__file__).parents[3] / "handlers" / "lmi_dist" / "demo"
OURS = [family for family in FAMILIES if family not in ("olmo2", "olmo2_tied", "llama_deep")]
# Longer than every window
IDS = [(11 * index * index + 3) % VOCAB_SIZE for index in range(150)]


def logits_of(runner: NativeRunner, ids: list[int]) -> Tensor:
    """The logits of every token of a prompt, (num_tokens, vocab_size)."""
    return forward(runner, Plan([], [Chunk(0, 0, ids, len(ids), table_of(0, len(ids)))]))


@torch.inference_mode()
def transformers_logits(path: Path, ids: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    ).eval()
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def distance(logits: Tensor, exact: Tensor) -> float:
    """The root of the mean square of the differences."""
    return float((logits.double() - exact).square().mean().sqrt())


@pytest.mark.parametrize("family", [*OURS, "demo"])
def test_logits_are_as_close_to_float64_as_those_of_transformers(family: str) -> None:
    path = DEMO if family == "demo" else tiny_model(family)
    exact = run(read_program(str(path), 400), IDS, list(range(len(IDS))), torch.float64)
    runner = load_native(path, EngineConfig(dtype="fp32"), max_length=200)
    our_distance = distance(logits_of(runner, IDS), exact)
    theirs = distance(transformers_logits(path, IDS), exact)
    print(f"{family}: {our_distance:.2e}, transformers {theirs:.2e}")
    assert our_distance < 1.25 * theirs


def bfloat16_model(folder: Path, family: str) -> Path:
    shutil.copytree(tiny_model(family), folder)
    tensors = {
        name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "phi", "phi3", "gpt2", "opt", "opt_post_norm"]
)
def test_a_bfloat16_checkpoint_gives_the_bits_of_float32_where_no_activation_is_rounded(
    family: str, tmp_path: Path
) -> None:
    path = bfloat16_model(tmp_path / "model", family)
    for kind in exact_variants():
        narrow, widened = (
            load_native(path, EngineConfig(dtype=dtype), max_length=200, library=library(kind))
            for dtype in ("auto", "fp32")
        )
        assert (narrow.dtype, widened.dtype) == ("bfloat16", "float32")
        assert torch.equal(logits_of(narrow, IDS), logits_of(widened, IDS))


@pytest.mark.parametrize("family", [*OURS, "demo"])
def test_a_bfloat16_checkpoint_is_as_close_to_float64_as_transformers_in_bfloat16(
    family: str, tmp_path: Path
) -> None:
    path = DEMO if family == "demo" else bfloat16_model(tmp_path / "model", family)
    exact = run(read_program(str(path), 400), IDS, list(range(len(IDS))), torch.float64)
    runner = load_native(path, max_length=200)
    assert runner.dtype == "bfloat16"

    our_log_probs = logits_of(runner, IDS).double().log_softmax(-1)
    their_logits = transformers_logits(path, IDS, torch.bfloat16)
    our_distance = distance(our_log_probs, exact.log_softmax(-1))
    theirs = distance(their_logits.double().log_softmax(-1), exact.log_softmax(-1))
    print(f"{family}: {our_distance:.2e}, transformers {theirs:.2e}")
    assert our_distance <= theirs


def test_other_checkpoints_are_float32_unless_bfloat16_is_asked_for() -> None:
    path = tiny_model("llama")
    exact, rounded = (
        load_native(path, EngineConfig(dtype=dtype), max_length=200) for dtype in ("auto", "bf16")
    )
    assert (exact.dtype, rounded.dtype) == ("float32", "bfloat16")
    expected = logits_of(exact, IDS)
    actual = logits_of(rounded, IDS)
    assert 0 < float((expected - actual).norm() / expected.norm()) < 0.05


QUESTIONS = [
    "Tell me a story about a fox.",
    "Once upon a time",
    "What is the capital of France?",
    "Tell me a story about a brave little mouse.",
    "What is lmi?",
    "Which month comes after May?",
]


@pytest.fixture(scope="module")
def answers() -> list[tuple[list[int], int]]:
    """The demo's greedy answers to a few questions: all tokens, and how many are the question's."""
    runner = load_native(DEMO, max_length=200)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    prompts_found = []
    for question in QUESTIONS:
        ids = list(tokenizer(question)["input_ids"])
        num_prompt = len(ids)
        table = table_of(0, 200)
        logits = forward(runner, Plan([], [Chunk(0, 0, ids, 1, table)]))
        while len(ids) < num_prompt + 80:
            ids.append(int(logits[0].argmax()))
            logits = forward(runner, Plan([Chunk(0, len(ids) - 1, ids[-1:], 1, table)], []))

        prompts_found.append((ids, num_prompt))

    return prompts_found


def test_int8_changes_the_demo_s_answers_hardly_at_all(
    answers: list[tuple[list[int], int]],
) -> None:
    exact, rough = (
        load_native(DEMO, EngineConfig(quantize=kind), max_length=200) for kind in (None, "int8")
    )
    assert rough.dtype == "int8"

    expected = []
    actual = []
    chosen_ids = []
    for ids, num_prompt in answers:
        chosen_ids += ids[num_prompt:]
        for runner, rows in ((exact, expected), (rough, actual)):
            rows.append(logits_of(runner, ids)[num_prompt - 1 : -1].log_softmax(-1))

    before = torch.cat(expected)
    after = torch.cat(actual)
    tokens = torch.tensor(chosen_ids)[:, None]
    change = (before.gather(1, tokens) - after.gather(1, tokens)).abs()
    divergence = (before.exp() * (before - after)).sum(-1).mean()
    num_flips = int((before.argmax(-1) != after.argmax(-1)).sum())
    print(
        f"mean {change.mean():.5f}, max {change.max():.3f}, KL {divergence:.1e}, {num_flips} of "
        f"{len(tokens)} flips"
    )

    assert (
        change.mean() < 0.003
        and change.max() < 0.1
        and divergence < 1e-4
        and num_flips <= len(tokens) // 100
    )


@pytest.mark.parametrize("family", OURS)
def test_int8_and_int4_stay_close_to_float32_in_every_family(family: str) -> None:
    """Random weights are the worst case: every channel matters alike, and errors of two layers add
    up.
    """
    path = tiny_model(family)
    exact, int8, int4 = (
        load_native(path, EngineConfig(quantize=kind), max_length=200)
        for kind in (None, "int8", "int4")
    )
    assert int4.dtype == "int4"

    expected = logits_of(exact, IDS)
    distances: list[float] = []
    for runner in (int8, int4):
        distance = (expected - logits_of(runner, IDS)).norm() / expected.norm()
        distances.append(float(distance))

    print(f"{family}: {distances[0]:.4f} in int8, {distances[1]:.4f} in int4")
    assert 0 < distances[0] < 0.1
    assert 0 < distances[1] < 0.6


def test_blocks_are_copied_before_the_step() -> None:
    runner = load_native(tiny_model("llama"), max_length=200)
    expected = logits_of(runner, IDS)[149]
    pairs = zip(table_of(0, 150)[:3], table_of(1, 150)[:3], strict=True)
    copies = [BlockCopy(source, target) for source, target in pairs]
    logits = forward(runner, Plan([Chunk(1, 149, IDS[149:], 1, table_of(1, 150))], [], copies))

    assert torch.equal(logits[0], expected)


def test_a_step_without_wanted_logits_gives_none() -> None:
    runner = load_native(tiny_model("phi"), max_length=200)
    assert forward(runner, Plan([], [Chunk(0, 0, IDS, 0, table_of(0, 150))])).shape == (
        0,
        VOCAB_SIZE,
    )


def test_logits_come_in_the_order_of_the_chunks_and_only_where_wanted() -> None:
    runner = load_native(tiny_model("llama"), max_length=200)
    everywhere = logits_of(runner, IDS[:20])

    assert everywhere.shape == (20, VOCAB_SIZE) and everywhere.dtype == torch.float32

    forward(runner, Plan([], [Chunk(1, 0, IDS[:12], 0, table_of(1, 64))]))
    chunks = [Chunk(1, 12, [IDS[12]], 1, table_of(1, 64)), Chunk(2, 0, IDS[:9], 3, table_of(2, 64))]
    mixed = forward(
        runner, Plan(chunks[:1], [*chunks[1:], Chunk(3, 0, IDS[:4], 0, table_of(3, 64))])
    )

    assert torch.equal(mixed, everywhere[[12, 6, 7, 8]])


def test_progress_runs_from_0_to_1() -> None:
    steps_seen: list[tuple[str, float]] = []
    load_native(
        tiny_model("llama"),
        max_length=64,
        progress=lambda stage, share: steps_seen.append((stage, share)),
    )
    shares = [share for stage, share in steps_seen if stage == "weights"]
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 5


def test_a_pickled_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(SecurityRefused, match=r"pytorch_model\.bin"):
        load_native(folder, max_length=64)

    expected = logits_of(load_native(tiny_model("llama"), max_length=200), IDS)
    actual = logits_of(load_native(folder, EngineConfig(allow_pickle=True), max_length=200), IDS)
    assert torch.equal(actual, expected)


def test_a_step_for_which_memory_runs_out_fails_and_the_next_one_runs() -> None:
    """In a process of its own without torch, whose memory is limited after its first step."""
    code = (
        "import resource, sys\n"
        "from handlers.lmi_dist.facts import read_facts\n"
        "from handlers.lmi_dist.native.library import load\n"
        "from handlers.lmi_dist.native.records import TOKENS_PER_BLOCK\n"
        "from handlers.lmi_dist.native_runner import NativeRunner\n"
        "from handlers.lmi_dist.plan import Chunk, Plan\n"
        "from handlers.lmi_dist.limits import Limits\n"
        "from lmi.settings.config import EngineConfig\n"
        "limits = Limits(1, 1000, 1024)\n"
        "runner = NativeRunner(\n"
        "    read_facts(sys.argv[1]), load(), EngineConfig(), limits, lambda stage, share: None\n"
        ")\n"
        "ids = list(range(3, 303)) * 3\n"
        "table = list(range(limits.num_cache_tokens // TOKENS_PER_BLOCK))\n"
        "small, large = (Plan([], [Chunk(0, 0, ids[:size], size, table)]) for size in (20, 900))\n"
        "expected = runner.forward(small).copy()\n"
        "limit = int(open('/proc/self/statm').read().split()[0]) * 4096 + 400_000\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "try:\n    runner.forward(large)\n"
        "except MemoryError as error:\n    print(error)\n"
        "print(bool((runner.forward(small) == expected).all()))"
    )
    command = [sys.executable, "-c", code, str(tiny_model("llama"))]
    done = subprocess.run(command, cwd=DEMO.parents[2], capture_output=True, text=True, check=True)
    error, is_equal = done.stdout.splitlines()

    assert "the system has no" in error and is_equal == "True"
