"""The sampler in numpy, for a machine without the native library, with the rules in short.

They are: bias, penalties, bans and the mask; then temperature, top_k, top_p (a share of the mass
that top_k left), min_p and typical_p, each on the result of the one before, where equal
probabilities stay together. Last, one uniform number per (seed, position) picks the token by
inverse CDF. It gives the tokens of the library, to the rounding of sums.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from handlers.lmi_dist.native.sampling_records import (
    ALL_BANNED,
    BEST,
    CHOICE,
    CHOSEN,
    NO_NUMBERS,
    Floats,
    Sampled,
    Sampling,
)

# The constant of splitmix64, and the bits of its numbers.
_GOLDEN = 0x9E3779B97F4A7C15
_64_BITS = 2**64 - 1
# e to a lesser power counts as 0.
_LEAST_POWER = np.float32(-87)
_LEAST_DISTANCE = np.float32(1e-6)


class PartsOfLists(NamedTuple):
    """Which part of each list of a Sampling is a row's, and which of the best tokens."""

    biased: slice
    seen: slice
    banned: slice
    best: slice = slice(0, 0)


class _Choice(NamedTuple):
    """What becomes of a row: a record of CHOICE."""

    status: int
    token_id: int
    log_prob: float = 0.0


def sample_plainly(sampling: Sampling) -> Sampled:
    """Sample the rows of a step with numpy."""
    choices = np.zeros(len(sampling.params), CHOICE)
    best = np.zeros(sampling.num_best, BEST)
    ends = dict.fromkeys(PartsOfLists._fields, 0)

    with np.errstate(all="ignore"):
        for index, params in enumerate(sampling.params):
            sizes = {
                "biased": int(params["num_biased"]),
                "seen": int(params["num_seen"]),
                "banned": int(params["num_banned"]),
                "best": int(params["num_top"] + params["num_candidates"]),
            }
            parts: dict[str, slice] = {}
            for name, size in sizes.items():
                parts[name] = slice(ends[name], ends[name] + size)
                ends[name] += size

            choices[index] = _sample_row(sampling, params, PartsOfLists(**parts), best)

    return Sampled(choices, best)


def _sample_row(sampling: Sampling, params: Any, parts: PartsOfLists, best: Any) -> _Choice:
    """Return what becomes of a row, and fill its part of `best`."""
    is_drawn = params["token_id"] < 0 and not params["num_candidates"]
    if is_drawn:
        choice = _drawn(sampling, params, parts)
    else:
        choice = _Choice(CHOSEN, int(params["token_id"]))

    wants_log_probs = params["wants_log_prob"] or params["num_top"] or params["num_candidates"]
    if choice.status == CHOSEN and wants_log_probs:
        return _with_log_probs(sampling, params, parts, choice.token_id, best[parts.best])

    return choice


def _drawn(sampling: Sampling, params: Any, parts: PartsOfLists) -> _Choice:
    """Return the token that is drawn by all rules, or the best one without a temperature."""
    row = apply_rules(sampling, params, parts, _source(sampling, params))
    largest = row.max()
    if largest == -math.inf:
        return _Choice(ALL_BANNED, -1)

    if not math.isfinite(largest):
        return _Choice(NO_NUMBERS, -1)

    token_id = _draw(row, params) if params["temperature"] else int(row.argmax())
    return _Choice(CHOSEN, token_id)


def _with_log_probs(
    sampling: Sampling, params: Any, parts: PartsOfLists, token_id: int, best: Any
) -> _Choice:
    """Return a choice with its log-prob, -1 having none, and fill the best tokens of its row.

    Log-probs are the model's, before any rule.
    """
    logits = sampling.logits[params["row"]]
    largest = logits.max()
    if not math.isfinite(largest):
        return _Choice(NO_NUMBERS, token_id)

    log_sum = np.float32(math.log(_weights(logits - largest).sum(dtype=np.float64)))
    log_probs = logits - largest - log_sum
    log_prob = float(log_probs[token_id]) if token_id >= 0 else 0.0
    is_given_token = params["token_id"] >= 0
    if not is_given_token and not math.isfinite(log_prob):
        return _Choice(NO_NUMBERS, token_id, log_prob)

    num_top = int(params["num_top"])
    _tell_best(best[:num_top], log_probs, log_probs)
    if params["num_candidates"]:
        row = _source(sampling, params) - largest - log_sum
        scores = apply_rules(sampling, params, parts, row)
        if not scores.max() < math.inf:
            return _Choice(NO_NUMBERS, token_id, log_prob)

        _tell_best(best[num_top:], scores, log_probs)

    return _Choice(CHOSEN, token_id, log_prob)


def _source(sampling: Sampling, params: Any) -> Floats:
    """Return the row (vocab_size,) that rules apply to: what functions of the user made of the
    logits, if there are any.
    """
    if params["changed"] >= 0 and sampling.changed is not None:
        changed: Floats = sampling.changed[params["changed"]]
        return changed

    logits: Floats = sampling.logits[params["row"]]
    return logits


def apply_rules(sampling: Sampling, params: Any, parts: PartsOfLists, row: Floats) -> Floats:
    """Return a row (vocab_size,) after bias, penalties, bans and the mask."""
    row = row.copy()
    biased_ids = sampling.biased_ids[parts.biased]
    np.add.at(row, biased_ids, sampling.biases[parts.biased])

    seen_ids = sampling.seen_ids[parts.seen]
    counts = sampling.counts[parts.seen].astype(np.float64)
    penalties = params["frequency"] * counts + params["presence"] * (counts > 0)
    less = np.float32(penalties)
    repetition = params["repetition"]
    scores = row[seen_ids]
    divided = scores / repetition - less
    multiplied = scores.astype(np.float64) * repetition - less
    row[seen_ids] = np.where(scores > 0, divided, multiplied)

    row[sampling.banned_ids[parts.banned]] = -np.inf
    if params["mask"] >= 0 and sampling.masks is not None:
        bits = np.unpackbits(sampling.masks[params["mask"]].view(np.uint8), bitorder="little")
        row[bits[: len(row)] == 0] = -np.inf

    return row


def _draw(row: Floats, params: Any) -> int:
    """Draw a token from a row (vocab_size,) after all rules, by temperature and filters."""
    scale = np.float32(1) / params["temperature"]
    powers = (row - row.max()) * scale
    weights = _weights(powers)
    everything = weights.sum(dtype=np.float64)
    drop_filtered(weights, powers, params)

    shares = weights.cumsum(dtype=np.float64) / everything
    cdf = shares.astype(np.float32)
    chance = uniform(int(params["seed"]), int(params["position"]))
    target = np.float32(chance) * cdf[-1]
    return int(cdf.searchsorted(target, side="right"))


def drop_filtered(weights: Floats, powers: Floats, params: Any) -> None:
    """Set the weights (vocab_size,) of the tokens that filters leave out to 0. `weights` are e to
    the `powers`.
    """
    top_k = params["top_k"]
    if 0 < top_k < len(weights):
        least = np.partition(weights, -top_k)[-top_k]
        weights[weights < least] = 0

    if params["top_p"] < 1:
        least = -_last_key(-weights, weights, params["top_p"])
        weights[weights < least] = 0

    weights[weights < params["min_p"]] = 0
    if params["typical_p"] < 1:
        # Meister et al. 2022. The surprise is a constant less the power.
        possible_powers = np.where(weights > 0, powers, 0)
        total = (weights * possible_powers.astype(np.float64)).sum()
        mean = np.float32(total / weights.sum(dtype=np.float64))
        distances = np.maximum(np.abs(mean - powers), _LEAST_DISTANCE)
        largest = _last_key(distances, weights, params["typical_p"])
        weights[distances > largest] = 0


def _weights(powers: Floats) -> Floats:
    """Return e to the powers, (vocab_size,)."""
    return np.where(powers >= _LEAST_POWER, np.exp(powers), np.float32(0))


def _last_key(keys: Floats, weights: Floats, share: float) -> np.float32:
    """Return the key of the last token that is taken, where tokens are taken by ascending keys
    until they have a share of the mass.
    """
    order = keys.argsort(kind="stable")
    order = order[weights[order] > 0]
    masses = weights[order].cumsum(dtype=np.float64)

    needed_mass = masses[-1] * float(share)
    is_too_little = masses[:-1] < needed_mass
    num_before = int(is_too_little.sum())
    return np.float32(keys[order[num_before]])


def _tell_best(best: Any, scores: Floats, log_probs: Floats) -> None:
    """Fill records of BEST with the tokens of the largest scores. Of equal ones the lower id is the
    first.
    """
    if not len(best):
        return

    order = (-scores).argsort(kind="stable")[: len(best)]
    best["token_id"] = order
    best["score"] = scores[order]
    best["log_prob"] = log_probs[order]


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) with 24 bits, exact in float32.

    Scaled by any total it stays below that total.

    A token's depends only on its sequence's seed and its index in the output, so neighbours in the
    batch, preemption and recomputation cannot change it. The mixing function is splitmix64 (Steele,
    Lea, Flood 2014).
    """
    return (_mix(_mix(seed) + position * _GOLDEN) >> 40) * 2.0**-24


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _64_BITS
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return value ^ (value >> 31)
