"""The torch runner: neighbours and pieces change answers only by rounding, and slots are released
and clean.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from handlers.lmi_dist.attention import Attention
from handlers.lmi_dist.facts import read_facts
from handlers.lmi_dist.model_runner import ModelRunner
from handlers.lmi_dist.placement import choose_placement
from handlers.lmi_dist.plan import Chunk, Plan
from lmi.settings.config import EngineConfig
from tests.handlers.lmi_dist.play import (
    Player,
    forward,
    load_runner,
    play_alone,
    play_together,
    random_players,
)
from tests.tiny_models import VOCAB_SIZE, tiny_model

# Of logits in float32
CLOSE = {"rtol": 0.0, "atol": 1e-3}


def build(family: str, num_slots: int, max_length: int = 1000, **settings: object) -> ModelRunner:
    return load_runner(
        tiny_model(family), EngineConfig(**settings), num_slots=num_slots, max_length=max_length
    )


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "mistral", "gemma2", "phi", "gpt2", "opt_post_norm", "olmo2"]
)
def test_neighbours_and_pieces_change_a_sequence_only_by_rounding(family: str) -> None:
    runner = build(family, num_slots=6)
    players = random_players(VOCAB_SIZE, [1, 5, 60, 129, 200, 300], 6)
    alone = [play_alone(runner, Player(player.prompt, player.num_answers)) for player in players]
    assert play_together(runner, players, 6, seed=1, start_together=True) == 6
    for player, reference in zip(players, alone, strict=True):
        assert player.answers == reference.answers
        torch.testing.assert_close(
            torch.stack(player.logits), torch.stack(reference.logits), **CLOSE
        )


def test_it_promises_no_equal_bits() -> None:
    assert not build("llama", 2, 64).is_batch_invariant


def long_llama(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8192,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_one_slot_of_4096_among_63_short_slots_is_split_off_and_changes_nothing(
    tmp_path: Path,
) -> None:
    runner = load_runner(long_llama(tmp_path), num_slots=64, max_length=4200)
    draw = torch.Generator().manual_seed(0)
    ends = [40] * 31 + [4096] + [40] * 32
    prompts = [torch.randint(64, (end,), generator=draw).tolist() for end in ends]
    for slot, prompt in enumerate(prompts):
        for start in range(0, len(prompt), 128):
            forward(runner, Plan([], [Chunk(slot, start, prompt[start : start + 128], 0)]))

    decodes = [Chunk(slot, end, [slot]) for slot, end in enumerate(ends)]
    together = forward(runner, Plan(decodes, []))
    calls = list(
        Attention(runner.slots, Plan(decodes, []), torch.empty(0))._plan_calls(None, False)
    )

    assert [(call.end_row - call.first_row, call.positions.stop) for call in calls] == [
        (31, 41),
        (1, 4097),
        (32, 41),
    ]

    for slot in (0, 30, 31, 32, 63):
        torch.testing.assert_close(
            forward(runner, Plan([decodes[slot]], []))[0], together[slot], **CLOSE
        )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_released_slot_gives_its_memory_back_and_is_clean_again(tmp_path: Path) -> None:
    runner = load_runner(long_llama(tmp_path), num_slots=8, max_length=8192)
    player = random_players(64, [200], 4)[0]
    expected = play_alone(runner, Player(player.prompt, 4), slot=3).logits
    before = resident_bytes()
    with torch.inference_mode():
        # 8 slots x 2 x 2 heads x 8192 positions x 16 channels x 4 bytes = 16.8 MB
        runner.slots._storage.normal_()

    full = resident_bytes()
    assert full - before > 15_000_000

    for slot in range(8):
        runner.slots.release(slot)

    assert full - resident_bytes() > 15_000_000
    assert torch.equal(
        torch.stack(play_alone(runner, player, slot=3).logits), torch.stack(expected)
    )


def test_a_released_slot_is_clean_also_where_memory_cannot_be_given_back() -> None:
    runner = build("llama", num_slots=2, max_length=64)
    # As on an accelerator
    runner.slots._mapping = None
    with torch.inference_mode():
        runner.slots._storage.fill_(float("nan"))

    runner.slots.release(0)
    assert not runner.slots._storage[0].any() and runner.slots._storage[1].isnan().all()


def test_stale_slots_and_holes_between_slots_change_nothing() -> None:
    runner = build("llama", num_slots=12, max_length=400)
    prompt = random_players(VOCAB_SIZE, [90], 1)[0].prompt
    forward(runner, Plan([], [Chunk(5, 0, prompt, 0)]))
    alone = forward(runner, Plan([Chunk(5, 90, [7])], []))
    forward(runner, Plan([], [Chunk(2, 0, prompt[:50], 0)]))
    forward(runner, Plan([], [Chunk(9, 0, prompt[:70], 0)]))
    together = forward(runner, Plan([Chunk(2, 50, [8]), Chunk(5, 90, [7]), Chunk(9, 70, [9])], []))
    torch.testing.assert_close(together[1], alone[0], **CLOSE)

    assert torch.isfinite(together).all()


def test_logits_come_in_the_order_of_the_chunks_and_only_where_wanted() -> None:
    runner = build("llama", num_slots=4, max_length=400)
    prompt = random_players(VOCAB_SIZE, [20], 1)[0].prompt
    everywhere = forward(runner, Plan([], [Chunk(0, 0, prompt, 20)]))

    assert everywhere.shape == (20, VOCAB_SIZE) and everywhere.dtype == torch.float32
    assert forward(runner, Plan([], [Chunk(1, 0, prompt[:12], 0)])).shape == (0, VOCAB_SIZE)

    mixed = forward(
        runner,
        Plan(
            [Chunk(1, 12, [prompt[12]])], [Chunk(2, 0, prompt[:9], 3), Chunk(3, 0, prompt[:4], 0)]
        ),
    )
    torch.testing.assert_close(mixed, everywhere[[12, 6, 7, 8]], rtol=0, atol=1e-4)


def test_bfloat16_stays_close_to_float32() -> None:
    prompt = random_players(VOCAB_SIZE, [150], 1)[0].prompt
    exact, rough = (build("llama", 2, 200, dtype=dtype) for dtype in ("fp32", "bf16"))

    assert (exact.dtype, rough.dtype) == ("float32", "bfloat16")

    expected, actual = (
        forward(runner, Plan([], [Chunk(0, 0, prompt, 150)])) for runner in (exact, rough)
    )

    assert float((expected - actual).norm() / expected.norm()) < 0.1


def test_the_cache_costs_what_kv_bytes_per_token_says() -> None:
    facts = read_facts(str(tiny_model("llama")))
    # k and v, layers, heads, channels, bytes
    assert facts.kv_bytes_per_token(4) == 2 * 2 * 2 * 16 * 4
    assert facts.kv_bytes_per_token(2) == 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("settings", "checkpoint", "expected"),
    [
        ({}, "bfloat16", torch.float32),
        ({"dtype": "bf16"}, "float32", torch.bfloat16),
        ({"dtype": "fp16"}, "float16", torch.float32),
    ],
)
def test_the_dtype_on_a_cpu(
    settings: dict[str, object], checkpoint: str, expected: torch.dtype
) -> None:
    assert choose_placement(EngineConfig(**settings), "cpu", checkpoint).dtype == expected


def test_progress_runs_from_0_to_1() -> None:
    steps_seen: list[tuple[str, float]] = []
    load_runner(
        tiny_model("llama"),
        num_slots=2,
        max_length=64,
        progress=lambda stage, share: steps_seen.append((stage, share)),
    )
    shares = [share for stage, share in steps_seen if stage == "weights"]
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 5
