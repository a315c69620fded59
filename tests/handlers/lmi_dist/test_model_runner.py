"""The runner's promises: a sequence's bits do not depend on its neighbours, slots are released, int8 stays close."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from handlers.lmi_dist.model_runner import ModelRunner
from handlers.lmi_dist.placement import choose_dtype
from handlers.lmi_dist.plan import Chunk, Plan
from handlers.lmi_dist.weights import read_facts
from lmi.errors import BadConfiguration
from lmi.settings.config import EngineConfig
from tests.handlers.lmi_dist.play import Player, load_runner, play_alone, play_together, random_players
from tests.tiny_models import VOCAB_SIZE, tiny_model

INVARIANT = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3", "phi", "phi3", "gpt2", "opt"]


def build(family: str, num_slots: int, max_length: int = 1000, **settings: object) -> ModelRunner:
    return load_runner(tiny_model(family), EngineConfig(**settings), num_slots=num_slots, max_length=max_length)


@pytest.fixture(params=[2, 3])
def num_threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_same_bits(runner: ModelRunner, players: list[Player], num_slots: int, seed: int) -> None:
    """Run each player alone, then all together, and compare every logit of every answer bit by bit."""
    alone = [play_alone(runner, Player(player.prompt, player.num_answers)) for player in players]
    crowd = [Player(player.prompt, player.num_answers) for player in players]
    assert play_together(runner, crowd, num_slots, seed, start_together=True) == num_slots
    play_together(runner, players, num_slots, seed)
    for player, reference in [*zip(players, alone, strict=True), *zip(crowd, alone, strict=True)]:
        assert player.answers == reference.answers
        assert torch.equal(torch.stack(player.logits), torch.stack(reference.logits))


@pytest.mark.parametrize("family", INVARIANT)
def test_a_batch_of_24_changes_no_bit_of_a_sequence(family: str) -> None:
    runner = build(family, num_slots=24)
    assert runner.is_batch_invariant
    lengths = [1, 5, 60, 127, 128, 129, 200, 300, 380, 460, 520, 700] * 2
    assert_same_bits(runner, random_players(VOCAB_SIZE, lengths, 8), 24, seed=1)


def test_a_batch_of_64_changes_no_bit_of_a_sequence_with_any_number_of_threads(num_threads: int) -> None:
    runner = build("llama", num_slots=64)
    assert runner.is_batch_invariant
    lengths = [1 + 61 * index % 600 for index in range(64)]
    assert_same_bits(runner, random_players(VOCAB_SIZE, lengths, 16), 64, seed=num_threads)


def test_odd_head_counts_survive_large_steps_on_several_threads(num_threads: int) -> None:
    """With seven heads of query and key, threads that split a rotation in the middle of a head once changed bits."""
    runner = build("gemma", num_slots=16)
    lengths = [129, 300, 640, 900] * 4
    assert_same_bits(runner, random_players(VOCAB_SIZE, lengths, 4), 16, seed=2)


@pytest.mark.parametrize(
    ("family", "settings"),
    [("gemma2", {}), ("olmo2", {}), ("llama", {"dtype": "bf16"}), ("llama", {"quantize": "int8"})],
)
def test_what_cannot_be_promised_is_not_promised(family: str, settings: dict[str, object]) -> None:
    assert not build(family, 2, 64, **settings).is_batch_invariant


def test_invariance_can_be_switched_off_and_answers_stay() -> None:
    prompt = random_players(VOCAB_SIZE, [150], 10)[0].prompt
    on, off = (play_alone(build("llama", 2, 200, batch_invariant=flag), Player(prompt, 10)) for flag in (True, False))
    assert on.answers == off.answers
    torch.testing.assert_close(torch.stack(on.logits), torch.stack(off.logits), rtol=0, atol=1e-3)


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


def test_one_slot_of_4096_among_63_short_slots_is_split_off_and_changes_nothing(tmp_path: Path) -> None:
    runner = load_runner(long_llama(tmp_path), num_slots=64, max_length=4200)
    draw = torch.Generator().manual_seed(0)
    ends = [40] * 31 + [4096] + [40] * 32
    prompts = [torch.randint(64, (end,), generator=draw).tolist() for end in ends]
    for slot, prompt in enumerate(prompts):
        for start in range(0, len(prompt), 128):
            runner.forward(Plan([], [Chunk(slot, start, prompt[start : start + 128], 0)]))
    decodes = [Chunk(slot, end, [slot]) for slot, end in enumerate(ends)]
    together = runner.forward(Plan(decodes, []))
    groups = runner._attention.plan(Plan(decodes, []), 64, None).groups
    short, long = (runner._attention.grid.length(end + 1) for end in (40, 4096))
    assert long < 4200
    assert [(group.num_tokens, group.span.end) for group in groups] == [(31, short), (1, long), (32, short)]
    for slot in (0, 30, 31, 32, 63):
        assert torch.equal(runner.forward(Plan([decodes[slot]], []))[0], together[slot])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_released_slot_gives_its_memory_back_and_is_clean_again(tmp_path: Path) -> None:
    runner = load_runner(long_llama(tmp_path), num_slots=8, max_length=8192)
    player = random_players(64, [200], 4)[0]
    expected = play_alone(runner, Player(player.prompt, 4), slot=3).logits
    before = resident_bytes()
    runner.kv.randomize(8, 8192)  # 8 slots x 2 x 2 heads x 8192 positions x 16 channels x 4 bytes = 16.8 MB
    full = resident_bytes()
    assert full - before > 15_000_000
    for slot in range(8):
        runner.release(slot)
    assert full - resident_bytes() > 15_000_000
    assert torch.equal(torch.stack(play_alone(runner, player, slot=3).logits), torch.stack(expected))


def test_a_released_slot_is_clean_also_where_memory_cannot_be_given_back() -> None:
    runner = build("llama", num_slots=2, max_length=64)
    runner.kv._mapping = None  # as on an accelerator
    with torch.inference_mode():
        runner.kv._storage.fill_(float("nan"))
    runner.release(0)
    assert not runner.kv._storage[0].any() and runner.kv._storage[1].isnan().all()


def test_stale_slots_and_holes_between_slots_change_nothing() -> None:
    runner = build("llama", num_slots=12, max_length=400)
    prompt = random_players(VOCAB_SIZE, [90], 1)[0].prompt
    runner.forward(Plan([], [Chunk(5, 0, prompt, 0)]))
    alone = runner.forward(Plan([Chunk(5, 90, [7])], []))
    runner.forward(Plan([], [Chunk(2, 0, prompt[:50], 0)]))
    runner.forward(Plan([], [Chunk(9, 0, prompt[:70], 0)]))
    together = runner.forward(Plan([Chunk(2, 50, [8]), Chunk(5, 90, [7]), Chunk(9, 70, [9])], []))
    assert torch.equal(together[1], alone[0])
    assert torch.isfinite(together).all()


def test_logits_come_in_the_order_of_the_chunks_and_only_where_wanted() -> None:
    runner = build("llama", num_slots=4, max_length=400)
    prompt = random_players(VOCAB_SIZE, [20], 1)[0].prompt
    everywhere = runner.forward(Plan([], [Chunk(0, 0, prompt, 20)]))
    assert everywhere.shape == (20, VOCAB_SIZE) and everywhere.dtype == torch.float32
    assert runner.forward(Plan([], [Chunk(1, 0, prompt[:12], 0)])).shape == (0, VOCAB_SIZE)
    mixed = runner.forward(Plan([Chunk(1, 12, [prompt[12]])], [Chunk(2, 0, prompt[:9], 3), Chunk(3, 0, prompt[:4], 0)]))
    torch.testing.assert_close(mixed, everywhere[[12, 6, 7, 8]], rtol=0, atol=1e-4)


def test_two_chunks_of_one_prompt_in_a_plan_equal_two_plans() -> None:
    runner = build("mistral", num_slots=2, max_length=400)
    prompt = random_players(VOCAB_SIZE, [256], 1)[0].prompt
    first, second = Chunk(0, 0, prompt[:128], 0), Chunk(0, 128, prompt[128:], 1)
    both = runner.forward(Plan([], [first, second]))
    runner.release(0)
    runner.forward(Plan([], [first]))
    assert torch.equal(runner.forward(Plan([], [second])), both)


@pytest.mark.parametrize("family", ["llama", "gpt2", "olmo2"])
def test_int8_stays_close_to_float32(family: str) -> None:
    """Random weights are the worst case: every channel matters alike, and errors of two layers add up."""
    prompt = random_players(VOCAB_SIZE, [150], 1)[0].prompt
    exact, rough = (
        build(family, 2, 200, quantize=kind).forward(Plan([], [Chunk(0, 0, prompt, 150)])) for kind in (None, "int8")
    )
    assert not torch.equal(exact, rough)
    assert float((exact - rough).norm() / exact.norm()) < 0.2
    assert float((exact.argmax(1) == rough.argmax(1)).float().mean()) > 0.75


def test_bfloat16_stays_close_to_float32() -> None:
    prompt = random_players(VOCAB_SIZE, [150], 1)[0].prompt
    exact, rough = (build("llama", 2, 200, dtype=dtype) for dtype in ("fp32", "bf16"))
    assert (exact.dtype, rough.dtype) == ("float32", "bfloat16")
    expected, given = (runner.forward(Plan([], [Chunk(0, 0, prompt, 150)])) for runner in (exact, rough))
    assert float((expected - given).norm() / expected.norm()) < 0.1


def test_the_cache_costs_what_kv_bytes_per_token_says() -> None:
    facts = read_facts(str(tiny_model("llama")))
    assert facts.kv_bytes_per_token(torch.float32) == 2 * 2 * 2 * 16 * 4  # k and v, layers, heads, channels, bytes
    assert facts.kv_bytes_per_token(torch.bfloat16) == 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("settings", "checkpoint", "expected"),
    [
        ({}, torch.bfloat16, torch.float32),
        ({"dtype": "bf16"}, torch.float32, torch.bfloat16),
        ({"dtype": "fp16"}, torch.float16, torch.float32),
        ({"dtype": "bf16", "quantize": "int8"}, torch.bfloat16, torch.float32),
        ({"batch_invariant": False}, torch.float32, torch.float32),
    ],
)
def test_the_dtype_on_a_cpu(settings: dict[str, object], checkpoint: torch.dtype, expected: torch.dtype) -> None:
    assert choose_dtype(EngineConfig(**settings), torch.device("cpu"), checkpoint) == expected


@pytest.mark.parametrize("is_supported", [True, False])
def test_bf16_is_taken_by_itself_only_where_the_cpu_has_it_and_nobody_wants_invariance(is_supported: bool) -> None:
    config = EngineConfig(batch_invariant=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: is_supported)
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        chosen = choose_dtype(config, torch.device("cpu"), torch.bfloat16)
    assert chosen == (torch.bfloat16 if is_supported else torch.float32)


def test_a_quantisation_that_is_not_built_is_named() -> None:
    with pytest.raises(BadConfiguration, match=r"option\.quantize=awq"):
        build("llama", 2, 64, quantize="awq")


def test_a_device_that_is_not_there_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(BadConfiguration, match=r"option\.device=cuda"):
        build("llama", 2, 64, device="cuda")


def test_progress_runs_from_0_to_1() -> None:
    seen: list[tuple[str, float]] = []
    load_runner(
        tiny_model("llama"),
        num_slots=2,
        max_length=64,
        progress=lambda stage, share: seen.append((stage, share)),
    )
    shares = [share for stage, share in seen if stage == "weights"]
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 5
