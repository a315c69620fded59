"""Fulfils wishes with numpy, where there is no native library: the same tokens, to the rounding of sums.

This is the rules in short: bias, penalties, bans and the mask; then temperature, top_k, top_p (a share of the mass that
top_k left), min_p and typical_p, each on the result of the one before, where equal probabilities stay together. Last,
one uniform number per (seed, position) picks the token by inverse CDF.
"""

import math
from typing import Any

import numpy as np

from handlers.lmi_dist.native.sampling import ALL_BANNED, BEST, CHOICE, CHOSEN, NO_NUMBERS, Floats, Fulfilled, Sampling

_GOLDEN, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1
_LEAST_POWER, _LEAST_DISTANCE = np.float32(-87), np.float32(1e-6)


def choose(sampling: Sampling) -> Fulfilled:
    answers = Fulfilled(np.zeros(len(sampling.wishes), CHOICE), np.zeros(sampling.num_best, BEST))
    taken = {"biased": 0, "seen": 0, "banned": 0, "best": 0}
    with np.errstate(all="ignore"):
        for index, wish in enumerate(sampling.wishes):
            sizes = {name: int(wish[f"num_{name}"]) for name in ("biased", "seen", "banned")}
            sizes["best"] = int(wish["num_top"] + wish["num_candidates"])
            own = {name: slice(taken[name], taken[name] + size) for name, size in sizes.items()}
            answers.choices[index] = _grant(sampling, wish, own, answers.best[own["best"]])
            taken = {name: one.stop for name, one in own.items()}
    return answers


def _grant(sampling: Sampling, wish: Any, own: dict[str, slice], best: Any) -> tuple[int, int, float]:
    """Status, token id and log-prob; `best` is filled."""
    logits = sampling.logits[wish["row"]]
    source = logits if wish["changed"] < 0 or sampling.changed is None else sampling.changed[wish["changed"]]
    token_id, num_top, num_candidates = (int(wish[name]) for name in ("token_id", "num_top", "num_candidates"))
    is_drawn = token_id < 0 and not num_candidates
    if is_drawn:
        ruled = apply_rules(sampling, wish, own, source)
        largest = ruled.max()
        if not math.isfinite(largest):
            return (ALL_BANNED if largest == -math.inf else NO_NUMBERS), -1, 0.0
        token_id = _draw(ruled, wish) if wish["temperature"] else int(ruled.argmax())
    if not (wish["wants_log_prob"] or num_top or num_candidates):
        return CHOSEN, token_id, 0.0
    largest = logits.max()
    if not math.isfinite(largest):
        return NO_NUMBERS, token_id, 0.0
    log_sum = np.float32(math.log(_weights(logits - largest).sum(dtype=np.float64)))
    log_probs = logits - largest - log_sum
    log_prob = float(log_probs[token_id]) if token_id >= 0 else 0.0
    if wish["token_id"] < 0 and not math.isfinite(log_prob):
        return NO_NUMBERS, token_id, log_prob
    _tell_best(best[:num_top], log_probs, log_probs)
    if num_candidates:
        scores = apply_rules(sampling, wish, own, source - largest - log_sum)
        if not scores.max() < math.inf:
            return NO_NUMBERS, token_id, log_prob
        _tell_best(best[num_top:], scores, log_probs)
    return CHOSEN, token_id, log_prob


def apply_rules(sampling: Sampling, wish: Any, own: dict[str, slice], row: Floats) -> Floats:
    """A row (vocab) after bias, penalties, bans and the mask."""
    row = row.copy()
    np.add.at(row, sampling.biased_ids[own["biased"]], sampling.biases[own["biased"]])
    seen, counts = sampling.seen_ids[own["seen"]], sampling.counts[own["seen"]].astype(np.float64)
    scores, less = row[seen], np.float32(wish["frequency"] * counts + wish["presence"] * (counts > 0))
    lower = scores.astype(np.float64) * wish["repetition"] - less
    row[seen] = np.where(scores > 0, scores / wish["repetition"] - less, lower)
    row[sampling.banned_ids[own["banned"]]] = -np.inf
    if wish["mask"] >= 0 and sampling.masks is not None:
        bits = np.unpackbits(sampling.masks[wish["mask"]].view(np.uint8), bitorder="little")
        row[bits[: len(row)] == 0] = -np.inf
    return row


def _draw(row: Floats, wish: Any) -> int:
    powers = (row - row.max()) * (np.float32(1) / wish["temperature"])
    weights = _weights(powers)
    everything = weights.sum(dtype=np.float64)
    keep(weights, powers, wish)
    cdf = (weights.cumsum(dtype=np.float64) / everything).astype(np.float32)
    target = np.float32(uniform(int(wish["seed"]), int(wish["position"]))) * cdf[-1]
    return int(cdf.searchsorted(target, side="right"))


def keep(weights: Floats, powers: Floats, wish: Any) -> None:
    """Set the weights (vocab) of the tokens that filters leave out to 0; `powers` are those of e."""
    if 0 < wish["top_k"] < len(weights):
        weights[weights < np.partition(weights, -wish["top_k"])[-wish["top_k"]]] = 0
    if wish["top_p"] < 1:
        weights[weights < -_last_taken(-weights, weights, wish["top_p"])] = 0
    weights[weights < wish["min_p"]] = 0
    if wish["typical_p"] < 1:  # Meister et al. 2022; the surprise is a constant less the power
        known = np.where(weights > 0, powers, 0)
        mean = np.float32((weights * known.astype(np.float64)).sum() / weights.sum(dtype=np.float64))
        distances = np.maximum(np.abs(mean - powers), _LEAST_DISTANCE)
        weights[distances > _last_taken(distances, weights, wish["typical_p"])] = 0


def _weights(powers: Floats) -> Floats:
    return np.where(powers >= _LEAST_POWER, np.exp(powers), np.float32(0))


def _last_taken(keys: Floats, weights: Floats, share: float) -> np.float32:
    """Tokens are taken by ascending keys, while less than a share of the mass was taken: the key of the last."""
    order = keys.argsort(kind="stable")
    order = order[weights[order] > 0]
    after = weights[order].cumsum(dtype=np.float64)
    return np.float32(keys[order[int((after[:-1] < after[-1] * float(share)).sum())]])


def _tell_best(best: Any, scores: Floats, log_probs: Floats) -> None:
    if len(best):
        order = (-scores).argsort(kind="stable")[: len(best)]  # of equal ones the lower id first
        best["token_id"], best["score"], best["log_prob"] = order, scores[order], log_probs[order]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 24 bits, exact in float32. Scaled by any total it stays below that total.

    A token's depends only on its sequence's seed and its index in the output, so neighbours in the batch, preemption
    and recomputation cannot change it. The mixing function is splitmix64 (Steele, Lea, Flood 2014).
    """
    return (_mix(_mix(seed) + position * _GOLDEN) >> 40) * 2.0**-24


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
