"""Rows that native code samples: as the rules in numpy say, with the same bits in any company, or
refused.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from handlers.lmi_dist.native.plain_sampling import sample_plainly
from handlers.lmi_dist.native.sampling import NativeSampler
from handlers.lmi_dist.native.sampling_records import (
    ALL_BANNED,
    CHOSEN,
    NO_NUMBERS,
    ROW_PARAMS,
    Floats,
    Sampled,
    Sampling,
    new_row_params,
)
from tests.handlers.lmi_dist.native.builds import library, variants

KERNELS = library(variants()[0])
VOCABS = (1, 2, 31, 50, 256, 257, 1031, 5000)


def sample(sampling: Sampling, num_threads: int = 1) -> Sampled:
    return NativeSampler(KERNELS, sampling.logits.shape[1], num_threads)(sampling)


def random_sampling(choice: random.Random, vocab_size: int, num: int = 24) -> Sampling:
    """Rows of every kind, some with infinite numbers."""
    numbers = np.random.default_rng(choice.getrandbits(32))
    logits = (numbers.standard_normal((num, vocab_size)) * choice.choice([0.1, 1, 3, 10])).astype(
        np.float32
    )
    if choice.random() < 0.3:
        logits = np.round(logits)  # many are equal

    logits[numbers.random(logits.shape) < choice.choice([0, 0, 0.5])] = -np.inf
    for poison in (np.nan, np.inf, -np.inf):
        logits[choice.randrange(num), choice.randrange(vocab_size)] = poison

    def some(*values: Any) -> list[Any]:
        return choice.choices(values, k=num)

    sizes = {f"num_{name}": some(0, 0, 1, 7) for name in ("biased", "seen", "banned")}
    ids = {
        name: numbers.integers(0, vocab_size, sum(sizes[f"num_{name}"]), np.int32)
        for name in ("biased", "banned")
    }
    ids_of_rows = [numbers.permutation(vocab_size)[:size] for size in sizes["num_seen"]]
    sizes["num_seen"] = [len(row_ids) for row_ids in ids_of_rows]
    seen_ids = np.concatenate(ids_of_rows).astype(np.int32)
    words = -(-vocab_size // 32)
    params = new_row_params(
        num,
        seed=[choice.getrandbits(64) for _ in range(num)],
        temperature=some(0, 1e-5, 0.3, 1, 1, 2, 100),
        top_k=some(0, 0, 1, 5, 40, vocab_size, 10**6),
        top_p=some(1, 1, 0, 0.1, 0.5, 0.95, 0.9999),
        min_p=some(0, 0, 0.05, 1),
        typical_p=some(1, 1, 1, 0.2, 0.9),
        repetition=some(1, 1.3, 0.01, 100),
        presence=some(0, -2, 0.5),
        frequency=some(0, 2, 0.3),
        row=choice.choices(range(num), k=num),
        changed=some(-1, -1, 0, 2),
        mask=some(-1, -1, 0, 1),
        position=some(0, 1, 999),
        token_id=some(-1, -1, -1, vocab_size - 1),
        wants_log_prob=some(0, 1),
        num_top=some(0, 0, 1, min(20, vocab_size)),
        num_candidates=some(0, 0, 0, min(8, vocab_size), vocab_size),
        **sizes,
    )
    return Sampling(
        logits,
        params,
        changed=(numbers.standard_normal((3, vocab_size)) * 3).astype(np.float32),
        masks=numbers.integers(-(2**31), 2**31, (2, words)).astype(np.int32),
        biased_ids=ids["biased"],
        biases=numbers.standard_normal(len(ids["biased"])).astype(np.float32),
        seen_ids=seen_ids,
        counts=numbers.integers(0, 4, len(seen_ids)).astype(np.float32),
        banned_ids=ids["banned"],
    )


def part(sampling: Sampling, places: list[int]) -> Sampling:
    """These rows, in this order, with their own parts of the lists."""

    def own(name: str, *lists: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        ends = sampling.params[f"num_{name}"].cumsum()
        bounds = [
            (ends[place] - sampling.params[f"num_{name}"][place], ends[place]) for place in places
        ]
        return [np.concatenate([array[start:end] for start, end in bounds]) for array in lists]

    biased_ids, biases = own("biased", sampling.biased_ids, sampling.biases)
    seen_ids, counts = own("seen", sampling.seen_ids, sampling.counts)
    [banned_ids] = own("banned", sampling.banned_ids)
    params = sampling.params[places]
    return Sampling(
        sampling.logits,
        params,
        sampling.changed,
        sampling.masks,
        biased_ids,
        biases,
        seen_ids,
        counts,
        banned_ids,
    )


def best_of(sampling: Sampling, answers: Sampled) -> list[npt.NDArray[Any]]:
    """The best tokens of each params."""
    ends = (sampling.params["num_top"] + sampling.params["num_candidates"]).cumsum()
    return np.split(answers.best, ends[:-1])


def told(sampling: Sampling, answers: Sampled) -> list[bytes]:
    """The bits of what each row got; those of a row that got nothing are its status."""
    rows = zip(answers.choices, best_of(sampling, answers), strict=True)
    return [
        row.tobytes() + (best.tobytes() if row["status"] == CHOSEN else b"") for row, best in rows
    ]


@pytest.mark.parametrize("vocab_size", VOCABS)
@np.errstate(invalid="ignore")
def test_rows_are_sampled_as_the_rules_in_numpy_say(vocab_size: int) -> None:
    choice = random.Random(vocab_size)
    num_compared = 0
    for _ in range(30):
        sampling = random_sampling(choice, vocab_size)
        before = sampling.logits.copy()
        got = sample(sampling)
        expected = sample_plainly(sampling)
        np.testing.assert_array_equal(sampling.logits, before)
        assert got.choices["status"].tolist() == expected.choices["status"].tolist()

        is_chosen = got.choices["status"] == CHOSEN
        assert (
            got.choices["token_id"][is_chosen].tolist()
            == expected.choices["token_id"][is_chosen].tolist()
        )

        np.testing.assert_allclose(
            got.choices["log_prob"][is_chosen],
            expected.choices["log_prob"][is_chosen],
            rtol=1e-5,
            atol=1e-5,
        )
        for place in np.flatnonzero(is_chosen):
            num_top = sampling.params["num_top"][place]
            for places in (slice(0, num_top), slice(num_top, None)):
                compare_best(
                    best_of(sampling, got)[place][places],
                    best_of(sampling, expected)[place][places],
                )

            num_compared += 1

    assert num_compared > 300


def compare_best(got: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    """Equal but for the order of scores that differ by their rounding only."""
    np.testing.assert_allclose(got["score"], expected["score"], rtol=1e-5, atol=2e-5)
    is_tie = (got["score"] == -np.inf) | (np.abs(got["score"] - expected["score"]) < 2e-5)

    assert ((got["token_id"] == expected["token_id"]) | is_tie).all()

    both, mine, theirs_at = np.intersect1d(
        got["token_id"], expected["token_id"], return_indices=True
    )

    # Of two that are equal but for rounding, one may be the last
    assert len(both) >= len(got) - 1

    for name in ("score", "log_prob"):
        np.testing.assert_allclose(got[name][mine], expected[name][theirs_at], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("vocab_size", [50, 5000])
def test_neighbours_and_threads_change_no_bit(vocab_size: int) -> None:
    choice = random.Random(vocab_size)
    for _ in range(8):
        sampling = random_sampling(choice, vocab_size, num=60)
        alone = [
            told(part_of_one, sample(part_of_one))[0]
            for part_of_one in (part(sampling, [place]) for place in range(60))
        ]
        for num_threads in (1, 2, 3, 4):
            assert told(sampling, sample(sampling, num_threads)) == alone

        places = choice.sample(range(60), 31)
        some = part(sampling, places)

        assert told(some, sample(some, 2)) == [alone[place] for place in places]


@pytest.mark.parametrize("kind", variants()[1:])
def test_every_kind_of_cpu_draws_the_same_bits(kind: str) -> None:
    choice = random.Random(7)
    for _ in range(10):
        sampling = random_sampling(choice, 3001)
        further_sampler = NativeSampler(library(kind), 3001, 1)(sampling)
        assert told(sampling, further_sampler) == told(sampling, sample(sampling))


def rows(*rows: list[float]) -> Floats:
    return np.array(rows, np.float32)


def test_of_equal_tokens_the_first_is_the_best_and_all_stay_together() -> None:
    logits = np.repeat(rows([1, 3, 3, 0, 3, 2]), 200, axis=0)
    params = new_row_params(200, row=range(200), seed=range(200), temperature=1, top_k=2, num_top=4)
    answers = sample(Sampling(logits, params))

    assert set(answers.choices["token_id"].tolist()) == {1, 2, 4}
    assert answers.best["token_id"].reshape(200, 4).tolist() == [[1, 2, 4, 5]] * 200
    assert sample(Sampling(logits, new_row_params(1))).choices["token_id"].tolist() == [1]


def test_what_is_no_number_or_banned_is_said() -> None:
    logits = rows([0, np.nan, 0], [0, np.inf, 0], [-np.inf] * 3, [0, 1, 2])
    for temperature in (0, 1):
        params = new_row_params(4, row=range(4), temperature=temperature, num_banned=[0, 0, 0, 3])
        sampling = Sampling(logits, params, banned_ids=np.array([0, 1, 2], np.int32))
        expected = [NO_NUMBERS, NO_NUMBERS, ALL_BANNED, ALL_BANNED]

        assert sample(sampling).choices["status"].tolist() == expected
        assert sample_plainly(sampling).choices["status"].tolist() == expected


NUMBERS = st.one_of(st.integers(-3, 70), st.sampled_from([2**31 - 1, -(2**31)]))
FLOATS = st.one_of(st.floats(width=32), st.sampled_from([0.0, 1.0, 1e-5, 0.5]))


@settings(max_examples=1000)
@given(st.data())
def test_parameters_of_any_numbers_are_followed_or_refused(data: st.DataObject) -> None:
    """In a valid sampling one or two numbers are any others; what is read and written stays within
    the arrays.
    """
    sampling = random_sampling(
        random.Random(data.draw(st.integers(0, 50))), data.draw(st.sampled_from([1, 33, 50])), 4
    )
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from(ROW_PARAMS.names))
        if name == "seed":
            value: float = data.draw(st.integers(0, 2**64 - 1))
        else:
            value = data.draw(FLOATS if ROW_PARAMS[name].kind == "f" else NUMBERS)

        sampling.params[name][data.draw(st.integers(0, 3))] = value

    for name in ("biased_ids", "seen_ids", "banned_ids"):
        ids = getattr(sampling, name)
        if len(ids) and data.draw(st.booleans()):
            ids[data.draw(st.integers(0, len(ids) - 1))] = data.draw(NUMBERS)

    sampling.logits[:] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 0, 3e38, -3e38]))
    sampling.logits[0, 0] = data.draw(FLOATS)
    has_room = 0 <= sampling.num_best < 10_000 and (sampling.params["num_top"] >= 0).all()
    if not has_room:
        # The answers are as many as the parameters say, so native code is not asked
        return

    try:
        sample(sampling, 2)
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"row": 2}, "row must be from 0 to 1, given 2"),
        ({"changed": 0}, "changed must be from -1 to -1, given 0"),
        ({"mask": 0}, "mask must be from -1 to -1, given 0"),
        ({"token_id": 5}, "token_id must be from -1 to 4, given 5"),
        ({"num_top": 6}, "num_top must be from 0 to 5, given 6"),
        ({"num_banned": 1}, "num_banned must be from 0 to 0, given 1"),
        ({"position": -1}, "position must be from 0 to 2147483647, given -1"),
        ({"temperature": 1e-6}, "temperature must be from 1e-05 to 100000, given 1e-06"),
        ({"temperature": np.nan}, "temperature must be from 1e-05 to 100000, given nan"),
        ({"top_p": 1.5}, "top_p must be from 0 to 1, given 1.5"),
        ({"min_p": np.nan}, "min_p must be from 0 to 1, given nan"),
        ({"repetition": 0}, "repetition penalty must be from"),
        ({"frequency": np.inf}, "frequency penalty must be from"),
    ],
)
def test_a_refusal_names_the_rule_and_the_value(columns: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sample(Sampling(np.zeros((2, 5), np.float32), new_row_params(1, **columns)))


@pytest.mark.parametrize("name", ["biased_ids", "seen_ids", "banned_ids"])
def test_an_id_outside_the_vocabulary_is_refused(name: str) -> None:
    for token_id in (-1, 5):
        lists: dict[str, Any] = {name: np.array([token_id], np.int32)}
        lists |= {"biased_ids": {"biases": rows([1])[0]}, "seen_ids": {"counts": rows([1])[0]}}.get(
            name, {}
        )
        params = new_row_params(1, **{f"num_{name.removesuffix('_ids')}": 1})
        with pytest.raises(ValueError, match=f"token.* must be from 0 to 4, given {token_id}"):
            sample(Sampling(np.zeros((1, 5), np.float32), params, **lists))
