"""The sampler against transformers' processors, against its own distribution, and against its
neighbours.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from handlers.base.token_sequence import sequences_of
from handlers.lmi_dist.logits_rules import LogitsRules, RuledRow, add_rules, new_rules
from handlers.lmi_dist.native.plain_sampling import (
    PartsOfLists,
    apply_rules,
    drop_filtered,
    sample_plainly,
    uniform,
)
from handlers.lmi_dist.native.sampling_records import Floats, Sampled, Sampling, new_row_params
from handlers.lmi_dist.plan import Chunk
from handlers.lmi_dist.prompt_log_probs import note_prompt
from handlers.lmi_dist.sampler import Sampler, filters_of
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.executor import (
    MAX_PENALTY,
    MAX_TEMPERATURE,
    REPETITION_PENALTIES,
    OutputConfig,
    Request,
    SamplingConfig,
    TokenLogProb,
)

VOCABS = (50, 1031, 2951)
LOG_PROBS = OutputConfig(return_log_probs=True, num_top_log_probs=3)


class Draw(NamedTuple):
    token_id: int
    log_prob: float
    top: list[TokenLogProb] | None


def sequence(
    config: SamplingConfig,
    prompt: tuple[int, ...] = (1, 2, 3),
    generated: tuple[int, ...] = (),
    **fields: Any,
) -> EmbeddedSequence:
    request = Request(input_token_ids=prompt, max_tokens=1000, sampling_config=config, **fields)
    [tracked] = sequences_of(EmbeddedSequence, 1, request, 100_000)
    for token_id in generated:
        tracked.append(token_id)

    return tracked


def random_logits(num_rows: int, vocab_size: int, width: float = 3.0, seed: int = 0) -> Floats:
    return (
        torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * width
    ).numpy()


def drawn(sampler: Sampler, logits: Floats, *sequences: EmbeddedSequence) -> list[Draw]:
    draws = sampler.sample(logits, list(range(len(logits))), list(sequences))
    assert all(draw is not None for draw in draws)
    return [Draw(*draw) for draw in draws if draw is not None]


def reference_scores(logits: Floats, config: SamplingConfig) -> Any:
    """The logits that transformers' processors leave, in its order, in float64; the others are
    -inf.
    """
    chain: list[Any] = [TemperatureLogitsWarper(config.temperature)] if config.temperature else []
    chain += [TopKLogitsWarper(config.top_k)] if config.top_k else []
    chain += [TopPLogitsWarper(config.top_p)] if config.top_p else []
    chain += [MinPLogitsWarper(config.min_p)] if config.min_p else []
    chain += (
        [TypicalLogitsWarper(config.typical_p)] if config.typical_p and config.typical_p < 1 else []
    )
    scores = torch.from_numpy(logits[None]).double()
    for processor in chain:
        scores = processor(torch.tensor([[1]]), scores)

    return scores[0]


def kept(logits: Floats, config: SamplingConfig) -> Floats:
    """The weights of the tokens of each row, those that filters leave out 0."""
    [params] = new_row_params(1, **filters_of(config, logits.shape[1]))
    rows = (logits - logits.max(-1, keepdims=True)) / np.float32(params["temperature"])
    weights = np.exp(rows)
    for sampling_row, powers in zip(weights, rows, strict=True):
        drop_filtered(sampling_row, powers, params)

    return weights


def name_of(config: SamplingConfig) -> str:
    """The fields that differ from the default, for the names of tests."""
    described = {
        name: value
        for name, value in _fields(config).items()
        if value != getattr(SamplingConfig(), name)
    }
    return " ".join(f"{name}={value}" for name, value in described.items()) or "plain"


def _fields(config: SamplingConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


FILTERS = [
    SamplingConfig(top_k=5),
    SamplingConfig(top_k=300),
    SamplingConfig(top_k=10**6),
    SamplingConfig(top_p=0.1),
    SamplingConfig(top_p=0.9),
    SamplingConfig(top_p=0.999),
    SamplingConfig(top_p=0.9, temperature=20.0),
    SamplingConfig(top_p=1.0, min_p=0.0, typical_p=1.0),
    SamplingConfig(min_p=0.05),
    SamplingConfig(min_p=1.0),
    SamplingConfig(typical_p=0.2),
    SamplingConfig(typical_p=0.95, temperature=0.5),
    SamplingConfig(top_k=40, top_p=0.8),
    SamplingConfig(top_k=40, top_p=0.9, min_p=0.02, temperature=1.3),
    SamplingConfig(top_k=40, top_p=0.9, min_p=0.02, typical_p=0.6),
]


@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("config", FILTERS, ids=name_of)
def test_the_filters_keep_what_transformers_keeps(config: SamplingConfig, vocab_size: int) -> None:
    logits = random_logits(8, vocab_size)
    for row, weights in zip(logits, kept(logits, config), strict=True):
        reference = set(torch.isfinite(reference_scores(row, config)).nonzero().flatten().tolist())
        # One token on the boundary may fall on the other side, because the sums are rounded
        # differently.
        assert len(set(np.flatnonzero(weights).tolist()) ^ reference) <= (
            1 if len(reference) > 500 else 0
        )


@pytest.mark.parametrize("vocab_size", [50, 1031, 5003])
def test_draws_are_those_of_a_slow_reference_in_float64(vocab_size: int) -> None:
    """But for a uniform number that falls on the border of two tokens, where roundings decide."""
    choice = random.Random(vocab_size)
    num_rows = 1500
    num_other = 0
    configs = [
        SamplingConfig(**{**_fields(choice.choice(FILTERS)), "seed": seed})
        for seed in range(num_rows)
    ]
    logits = random_logits(num_rows, vocab_size, width=choice.choice([1.0, 4.0]), seed=1)
    draws = drawn(Sampler(vocab_size, num_threads=2), logits, *map(sequence, configs))
    for seed, (row, config, draw) in enumerate(zip(logits, configs, draws, strict=True)):
        cdf = reference_scores(row, config).softmax(-1).cumsum(-1)
        num_other += draw.token_id != int(torch.searchsorted(cdf, uniform(seed, 0), right=True))

    assert num_other <= num_rows // 500


@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(),
        SamplingConfig(temperature=0.6),
        SamplingConfig(temperature=3.0, top_k=12),
        SamplingConfig(top_p=0.8),
        SamplingConfig(min_p=0.1, temperature=2.0),
        SamplingConfig(typical_p=0.7),
    ],
    ids=name_of,
)
def test_frequencies_follow_the_distribution(config: SamplingConfig) -> None:
    num_draws = 20_000
    logits = random_logits(1, 50, width=1.5)
    weights = kept(logits, config)[0]
    expected = (weights / weights.sum()).tolist()
    seeded = [SamplingConfig(**{**_fields(config), "seed": seed}) for seed in range(num_draws)]
    counts = Counter(
        draw.token_id
        for draw in drawn(
            Sampler(50),
            logits.repeat(num_draws, 0),
            *[sequence(seeded_config) for seeded_config in seeded],
        )
    )

    for token_id, share in enumerate(expected):
        deviation = math.sqrt(share * (1 - share) * num_draws)
        assert abs(counts[token_id] - share * num_draws) <= 4.5 * deviation
        assert share > 0 or token_id not in counts


def test_positions_of_one_seed_are_independent() -> None:
    """A sequence draws 20 000 tokens from the same row; a token does not depend on the one before
    it.
    """
    seeded_sequence = sequence(SamplingConfig(seed=3))
    logits = zeros(4)
    sampler = Sampler(4)
    seeded_sequence.max_tokens = 10**6
    for _ in range(20_000):
        seeded_sequence.append(drawn(sampler, logits, seeded_sequence)[0].token_id)

    tokens = seeded_sequence.token_ids[3:]
    pairs = Counter(zip(tokens, tokens[1:], strict=False))

    assert all(abs(pairs[first, second] - 1250) < 160 for first in range(4) for second in range(4))


CONFIGS = [
    SamplingConfig(temperature=0),
    SamplingConfig(top_k=1),
    SamplingConfig(seed=1),
    SamplingConfig(seed=2, temperature=0.3),
    SamplingConfig(seed=3, top_k=20),
    SamplingConfig(seed=4, top_k=900, top_p=0.95),
    SamplingConfig(seed=5, top_p=0.9),
    SamplingConfig(seed=6, top_p=0.99, temperature=30.0),
    SamplingConfig(seed=7, min_p=0.01),
    SamplingConfig(seed=8, typical_p=0.9),
    SamplingConfig(seed=9, typical_p=0.5, top_p=0.95),
    SamplingConfig(seed=10, repetition_penalty=1.3),
    SamplingConfig(temperature=0, presence_penalty=0.7, frequency_penalty=0.3),
    SamplingConfig(seed=12, min_tokens=9, top_p=0.6),
]


def zeros(vocab_size: int) -> Floats:
    return np.zeros((1, vocab_size), np.float32)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_neighbours_change_no_bit_of_a_draw(vocab_size: int, num_threads: int) -> None:
    choice = random.Random(vocab_size)
    num_rows = 70
    sequences = [
        sequence(
            choice.choice(CONFIGS),
            prompt=tuple(choice.choices(range(50), k=choice.randint(1, 30))),
            generated=tuple(choice.choices(range(50), k=choice.randint(0, 30))),
            output_config=LOG_PROBS,
            bad_words=((7,), (8, 9)) if row % 3 == 0 else (),
            embedding_bias=((5, 2.0), (6, -2.0)) if row % 4 == 0 else (),
        )
        for row in range(num_rows)
    ]
    logits = random_logits(num_rows, vocab_size)
    sampler = Sampler(vocab_size, num_threads=num_threads)
    together = drawn(sampler, logits, *sequences)
    for row in range(num_rows):
        assert drawn(sampler, logits[row : row + 1], sequences[row]) == [together[row]]

    for num in (2, 3, 17, 40):
        rows = choice.sample(range(num_rows), num)
        assert drawn(sampler, logits[rows], *[sequences[row] for row in rows]) == [
            together[row] for row in rows
        ]


def test_greedy_takes_the_best_and_ignores_the_seed() -> None:
    logits = random_logits(3, 50)
    sequences = [sequence(SamplingConfig(temperature=0, seed=seed)) for seed in range(3)]
    assert [draw.token_id for draw in drawn(Sampler(50), logits, *sequences)] == logits.argmax(
        -1
    ).tolist()


def test_a_tiny_temperature_is_greedy_and_a_huge_one_flat() -> None:
    logits = random_logits(1, 50)
    for temperature in (1e-300, 1e-38, 1e-6):
        [draw] = drawn(
            Sampler(50), logits, sequence(SamplingConfig(temperature=temperature, seed=1))
        )
        assert draw.token_id == int(logits.argmax())

    seeds = [sequence(SamplingConfig(temperature=100, seed=seed)) for seed in range(2000)]
    assert len({draw.token_id for draw in drawn(Sampler(50), logits.repeat(2000, 0), *seeds)}) == 50


@pytest.mark.parametrize("repetition_penalty", REPETITION_PENALTIES)
@pytest.mark.parametrize("penalty", [-MAX_PENALTY, MAX_PENALTY])
@pytest.mark.parametrize("temperature", [5e-324, MAX_TEMPERATURE])
def test_no_value_within_the_bounds_makes_logits_that_are_no_numbers(
    repetition_penalty: float, penalty: float, temperature: float
) -> None:
    config = SamplingConfig(
        temperature=temperature,
        repetition_penalty=repetition_penalty,
        presence_penalty=penalty,
        frequency_penalty=penalty,
    )
    logits = random_logits(1, 50) * 1e4
    drawn(Sampler(50), logits, sequence(config, (1, 2), tuple(range(50)) * 200))


def test_repetition_penalty_counts_prompt_and_output_as_transformers() -> None:
    prompt = (1, 2, 2, 3)
    generated = (4, 4, 5)
    logits = random_logits(1, 20)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(
        torch.tensor([[*prompt, *generated]]), torch.tensor(logits)
    )
    edited = edit(logits, sequence(SamplingConfig(repetition_penalty=1.7), prompt, generated))
    assert np.array_equal(edited, expected.numpy())


def test_presence_and_frequency_count_the_output_only() -> None:
    config = SamplingConfig(presence_penalty=0.5, frequency_penalty=0.25)
    logits = random_logits(1, 20)
    expected = logits.copy()
    expected[0, 4] -= 0.25 * 2 + 0.5
    expected[0, 5] -= 0.25 + 0.5
    assert np.array_equal(edit(logits, sequence(config, (1, 2, 3), (4, 4, 5))), expected)


def test_penalties_together_follow_one_another() -> None:
    config = SamplingConfig(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0)
    logits = np.array([[4.0, -4.0, 1.0]], np.float32)
    edited = edit(logits, sequence(config, (0,), (1,)))

    assert edited.tolist() == [[2.0, -10.0, 1.0]]


def test_the_history_of_a_long_sequence_is_exact() -> None:
    config = SamplingConfig(frequency_penalty=1.0, repetition_penalty=1.0)
    long_sequence = sequence(config, tuple(range(70)))
    logits = zeros(300)
    choice = random.Random(1)
    for _ in range(900):
        edit(logits, long_sequence)
        long_sequence.append(choice.randrange(300))

    counts = Counter(long_sequence.token_ids[70:])
    assert edit(logits, long_sequence).tolist() == [
        [-float(counts[token_id]) for token_id in range(300)]
    ]


def edit(logits: Floats, one: EmbeddedSequence) -> Floats:
    """The logits that the sampler draws from, (1, vocab)."""
    sampler = Sampler(logits.shape[1])
    edited = list[Floats]()

    def sample(sampling: Sampling) -> Sampled:
        edited.append(ruled(sampling))
        return sample_plainly(sampling)

    sampler.sample_rows = sample
    sampler.sample(logits, [0], [one])
    return edited[0]


def ruled(sampling: Sampling) -> Floats:
    """The only row after its rules, (1, vocab)."""
    ranges = PartsOfLists(slice(None), slice(None), slice(None))
    return apply_rules(sampling, sampling.params[0], ranges, sampling.logits[0])[None]


def test_a_bad_word_is_banned_where_it_would_be_completed() -> None:
    words = ((3,), (4, 5), (4, 4, 6))
    for generated, banned in (((), {3}), ((4,), {3, 5}), ((4, 4), {3, 5, 6}), ((4, 4, 1), {3})):
        edited = edit(zeros(10), sequence(SamplingConfig(), (4,), generated, bad_words=words))
        assert set(np.flatnonzero(edited[0] == -math.inf).tolist()) == banned


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_no_ngram_comes_twice_in_prompt_and_output_as_in_transformers(size: int) -> None:
    choice = random.Random(size)
    logits = zeros(6)
    repeated = sequence(
        SamplingConfig(no_repeat_ngram_size=size), tuple(choice.choices(range(4), k=5))
    )
    for _ in range(60):
        expected = NoRepeatNGramLogitsProcessor(size)(
            torch.tensor([repeated.token_ids]), torch.tensor(logits)
        ).numpy()
        assert np.array_equal(edit(logits, repeated), expected)
        repeated.append(choice.randrange(5))


def test_a_size_of_0_bans_nothing() -> None:
    logits = zeros(5)
    assert np.array_equal(
        edit(logits, sequence(SamplingConfig(no_repeat_ngram_size=0), (1, 1, 1))), logits
    )


def test_rules_that_were_forked_go_their_own_ways() -> None:
    config = SamplingConfig(no_repeat_ngram_size=2, repetition_penalty=1.5, frequency_penalty=0.5)
    ruled = sequence(config, (1, 2, 3), (1,))
    logits = random_logits(1, 10)
    rules = new_rules(ruled, 10)
    assert rules is not None

    apply(rules, logits, ruled)
    forked = rules.fork()
    for row_rules, generated in (
        (rules, (1, 4, 1)),
        (forked, (1, 5, 1)),
        (rules, (1, 4, 1, 6)),
        (forked, (1, 5, 1, 2)),
    ):
        fresh = sequence(config, (1, 2, 3), generated)
        assert np.array_equal(apply(row_rules, logits, fresh), edit(logits, fresh))


def apply(rules: LogitsRules, logits: Floats, one: EmbeddedSequence) -> Floats:
    sampling = Sampling(logits, new_row_params(1, **filters_of(one.request.sampling_config, 10)))
    add_rules(sampling, [RuledRow(0, one, rules)])
    return ruled(sampling)


def test_min_tokens_bans_end_ids_and_stop_words_of_one_token() -> None:
    config = SamplingConfig(min_tokens=2)
    fields: dict[str, Any] = {"end_id": 1, "end_ids": (2,), "stop_words": ((3,), (4, 5))}
    for generated, banned in (((), {1, 2, 3}), ((7,), {1, 2, 3}), ((7, 7), set())):
        edited = edit(zeros(10), sequence(config, generated=generated, **fields))
        assert set(np.flatnonzero(edited[0] == -math.inf).tolist()) == banned


def test_a_bias_forces_a_token_and_a_ban_beats_it() -> None:
    logits = random_logits(1, 50)
    config = SamplingConfig(temperature=0)
    bias = ((9, 1000.0), (9, 1.0))

    assert drawn(Sampler(50), logits, sequence(config, embedding_bias=bias))[0].token_id == 9
    assert (
        drawn(Sampler(50), logits, sequence(config, embedding_bias=bias, bad_words=((9,),)))[
            0
        ].token_id
        != 9
    )

    edited = edit(logits, sequence(config, embedding_bias=bias))
    assert edited[0, 9].item() == pytest.approx(logits[0, 9].item() + 1001)


def test_log_probs_are_those_of_the_model_whatever_the_request_asks() -> None:
    logits = random_logits(1, 50)
    config = SamplingConfig(seed=1, temperature=0.3, top_k=5, repetition_penalty=2.0)
    [draw] = drawn(
        Sampler(50),
        logits,
        sequence(config, output_config=LOG_PROBS, bad_words=((int(logits.argmax()),),)),
    )
    expected = torch.tensor(logits).log_softmax(-1)[0]

    assert draw.log_prob == pytest.approx(
        expected[draw.token_id].item(), abs=1e-6
    ) and draw.token_id != int(logits.argmax())

    values, token_ids = expected.topk(3)
    assert draw.top is not None
    assert [top_token.token_id for top_token in draw.top] == token_ids.tolist()
    assert [top_token.log_prob for top_token in draw.top] == pytest.approx(
        values.tolist(), abs=1e-6
    )


def test_log_probs_come_only_where_they_are_asked_for() -> None:
    outputs = [
        OutputConfig(),
        OutputConfig(return_log_probs=True),
        OutputConfig(num_top_log_probs=2),
    ]
    sequences = [
        sequence(SamplingConfig(temperature=0), output_config=output) for output in outputs
    ]
    draws = drawn(Sampler(50), random_logits(3, 50), *sequences)

    assert [(draw.log_prob != 0, draw.top is not None) for draw in draws[:2]] == [
        (False, False),
        (True, False),
    ]
    assert draws[2].top is not None and len(draws[2].top) == 2


def test_prompt_log_probs_are_those_of_the_next_tokens() -> None:
    logits = random_logits(4, 50)
    sample = Sampler(50).sample_rows
    chunk = Chunk(0, 0, [4, 5, 6, 7])
    config = OutputConfig(num_prompt_log_probs=2)
    prompted = sequence(SamplingConfig(), (4, 5, 6, 7, 8), output_config=config)
    assert note_prompt(sample, prompted, chunk, logits)

    expected = torch.tensor(logits).log_softmax(-1)
    chosen_logits = [expected[row, row + 5].item() for row in range(4)]
    first, *notes = prompted.prompt_log_probs

    assert first.log_prob is None and [note.log_prob for note in notes] == pytest.approx(
        chosen_logits, abs=1e-6
    )
    assert all(
        [prompted.token_id for prompted in note.top] == expected[row].topk(2).indices.tolist()
        for row, note in enumerate(notes)
    )

    bare = sequence(
        SamplingConfig(), (4, 5, 6, 7, 8), output_config=OutputConfig(num_prompt_log_probs=0)
    )

    assert (
        note_prompt(sample, bare, chunk, logits)
        and [note.top for note in bare.prompt_log_probs] == [[]] * 5
    )

    logits[2, 30] = math.nan
    assert not note_prompt(
        sample, sequence(SamplingConfig(), (4, 5, 6, 7, 8), output_config=config), chunk, logits
    )


def test_a_prompt_of_one_token_has_one_log_prob_which_is_none() -> None:
    prompted = sequence(SamplingConfig(), (4,), output_config=OutputConfig(num_prompt_log_probs=2))
    assert note_prompt(Sampler(50).sample_rows, prompted, Chunk(0, 0, [4]), random_logits(1, 50))
    assert [note.log_prob for note in prompted.prompt_log_probs] == [None]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(
    "config", [CONFIGS[0], CONFIGS[2], CONFIGS[5], CONFIGS[8], CONFIGS[9]], ids=name_of
)
def test_a_poisoned_row_yields_nothing_and_its_neighbours_are_unharmed(
    config: SamplingConfig, poison: float
) -> None:
    logits = random_logits(3, VOCABS[1])
    healthy = [sequence(config, output_config=LOG_PROBS) for _ in range(3)]
    expected = drawn(Sampler(VOCABS[1]), logits, *healthy)
    logits[1, 40] = poison
    draws = Sampler(VOCABS[1]).sample(logits, [0, 1, 2], healthy)

    assert draws == [expected[0], None, expected[2]]


def test_a_row_where_everything_is_banned_yields_nothing() -> None:
    everything = tuple((token_id,) for token_id in range(10))
    for config in (
        SamplingConfig(temperature=0),
        SamplingConfig(seed=1),
        SamplingConfig(top_p=0.5),
    ):
        assert Sampler(10).sample(zeros(10), [0], [sequence(config, bad_words=everything)]) == [
            None
        ]


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = np.full((1, 1000), -math.inf, np.float32)
    logits[0, ::7] = 0.0
    sequences = [sequence(SamplingConfig(seed=seed)) for seed in range(3000)]
    draws = drawn(Sampler(1000), logits.repeat(3000, 0), *sequences)

    assert {draw.token_id % 7 for draw in draws} == {0}


def test_uniform_numbers_depend_on_seed_and_position_alone_and_fill_the_range() -> None:
    draws = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert len(set(draws)) > 9990 and all(0 <= draw < 1 for draw in draws)
    assert draws == [uniform(seed, position) for seed in range(100) for position in range(100)]

    for tenth in range(10):
        assert 900 < sum(tenth / 10 <= draw < (tenth + 1) / 10 for draw in draws) < 1100

    assert all(draw == float(int(draw * 2**24)) / 2**24 for draw in draws)  # exact in float32
