"""What is wanted of the rows of a step's logits, one record for each wish, and what fulfils it:
natively, or by numpy.

`lmi_kernels.h` describes the records. Ids that rules are about stand in lists that the wishes
share: each takes as many as it says, behind those of the wishes before it.

`choose_plainly` has the rules in short: bias, penalties, bans and the mask; then temperature,
top_k, top_p (a share of the mass that top_k left), min_p and typical_p, each on the result of the
one before, where equal probabilities stay together. Last, one uniform number per (seed, position)
picks the token by inverse CDF. It gives the tokens of the library, to the rounding of sums.
"""

import math
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from handlers.lmi_dist.native.library import Library

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int32]
Records: TypeAlias = npt.NDArray[Any]

WISH = np.dtype(
    [
        ("seed", "u8"),
        ("temperature", "f4"),
        ("top_p", "f4"),
        ("min_p", "f4"),
        ("typical_p", "f4"),
        ("repetition", "f4"),
        ("presence", "f4"),
        ("frequency", "f4"),
        ("top_k", "i4"),
        ("row", "i4"),
        ("changed", "i4"),
        ("mask", "i4"),
        ("position", "i4"),
        ("token_id", "i4"),
        ("wants_log_prob", "i4"),
        ("num_top", "i4"),
        ("num_candidates", "i4"),
        ("num_biased", "i4"),
        ("num_seen", "i4"),
        ("num_banned", "i4"),
        ("reserved", "i4"),
    ]
)
# What a wish says where it is not 0.
_DEFAULTS = {
    "top_p": 1,
    "typical_p": 1,
    "repetition": 1,
    "changed": -1,
    "mask": -1,
    "token_id": -1,
}
CHOICE = np.dtype([("status", "i4"), ("token_id", "i4"), ("log_prob", "f4")])
BEST = np.dtype([("token_id", "i4"), ("score", "f4"), ("log_prob", "f4")])
# The status of a choice.
CHOSEN, NO_NUMBERS, ALL_BANNED = range(3)
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_LEAST_POWER = np.float32(-87)
_LEAST_DISTANCE = np.float32(1e-6)
NO_INTS = np.empty(0, np.int32)
NO_FLOATS = np.empty(0, np.float32)


def new_wishes(num: int, **columns: Any) -> Records:
    """The best token of each row, without rules, where no column says otherwise."""
    wishes = np.zeros(num, WISH)
    for name, value in (_DEFAULTS | columns).items():
        wishes[name] = value

    return wishes


@dataclass(slots=True)
class Sampling:
    """Wishes and what they are about. What fulfils them writes to none of the arrays."""

    # (num_logits, vocab_size)
    logits: Floats
    # (num_wishes) of WISH
    wishes: Records
    # (num_changed, vocab_size): rows that take the place of those of the logits
    changed: Floats | None = None
    # (num_masks, vocab_size / 32, rounded up): a bit for each token that may come
    masks: Ints | None = None
    biased_ids: Ints = field(default_factory=lambda: NO_INTS)
    # Parallel to `biased_ids`.
    biases: Floats = field(default_factory=lambda: NO_FLOATS)
    # What penalties count.
    seen_ids: Ints = field(default_factory=lambda: NO_INTS)
    # Parallel to `seen_ids`: how often each was generated.
    counts: Floats = field(default_factory=lambda: NO_FLOATS)
    banned_ids: Ints = field(default_factory=lambda: NO_INTS)

    @property
    def num_best(self) -> int:
        return int(self.wishes["num_top"].sum() + self.wishes["num_candidates"].sum())


class Fulfilled(NamedTuple):
    # (num_wishes) of CHOICE
    choices: Records
    # Of BEST: for each wish the best tokens by log-prob, then the candidates.
    best: Records


Choose: TypeAlias = Callable[[Sampling], Fulfilled]

# The name of each array, and of its length if it has one of its own.
_ARRAYS: tuple[tuple[str, npt.DTypeLike, str], ...] = (
    ("logits", np.float32, "num_logits"),
    ("changed", np.float32, "num_changed"),
    ("masks", np.int32, "num_masks"),
    ("wishes", WISH, "num_wishes"),
    ("biased_ids", np.int32, "num_biased"),
    ("biases", np.float32, ""),
    ("seen_ids", np.int32, "num_seen"),
    ("counts", np.float32, ""),
    ("banned_ids", np.int32, "num_banned"),
)


class _Sampling(Structure):
    _fields_ = [
        *((name, c_void_p) for name, _, _ in _ARRAYS),
        ("choices", c_void_p),
        ("best", c_void_p),
        ("scratch", c_void_p),
        ("scratch_bytes", c_int64),
        ("num_logits", c_int32),
        ("num_changed", c_int32),
        ("num_masks", c_int32),
        ("vocab_size", c_int32),
        ("num_wishes", c_int32),
        ("num_biased", c_int32),
        ("num_seen", c_int32),
        ("num_banned", c_int32),
        ("num_best", c_int32),
        ("reserved", c_int32),
    ]


class NativeSampler:
    """Not safe to call from two threads at once."""

    def __init__(self, library: Library, vocab_size: int, num_threads: int) -> None:
        self._functions = library.functions
        self._num_threads = num_threads
        self._functions.lmi_sampling_bytes.argtypes = (c_int32,)
        self._functions.lmi_sampling_bytes.restype = c_int64
        self._functions.lmi_sample.argtypes = (POINTER(_Sampling), c_int32)

        thread_bytes = self._functions.lmi_sampling_bytes(vocab_size)
        self._scratch = np.empty(num_threads * thread_bytes, np.uint8)
        self._scratch_address = self._scratch.ctypes.data

    def __call__(self, sampling: Sampling) -> Fulfilled:
        """Raises ValueError, with nothing done, if a wish breaks a rule."""
        choices = np.empty(len(sampling.wishes), CHOICE)
        best = np.empty(sampling.num_best, BEST)
        native = _Sampling(
            choices=_address(choices),
            best=_address(best),
            scratch=self._scratch_address,
            scratch_bytes=self._scratch.nbytes,
            vocab_size=sampling.logits.shape[1],
            num_best=len(best),
        )
        for name, dtype, size in _ARRAYS:
            array = getattr(sampling, name)
            if array is not None and array.size:
                assert array.dtype == dtype and array.flags.c_contiguous
                setattr(native, name, array.ctypes.data)
                if size:
                    setattr(native, size, len(array))

        if self._functions.lmi_sample(byref(native), self._num_threads):
            raise ValueError(self._functions.lmi_error().decode())

        return Fulfilled(choices, best)


def _address(array: Records) -> int | None:
    return array.ctypes.data if array.size else None


def choose_plainly(sampling: Sampling) -> Fulfilled:
    """Fulfil wishes with numpy, where there is no native library."""
    choices = np.zeros(len(sampling.wishes), CHOICE)
    best = np.zeros(sampling.num_best, BEST)
    ends = {"biased": 0, "seen": 0, "banned": 0, "best": 0}

    with np.errstate(all="ignore"):
        for index, wish in enumerate(sampling.wishes):
            sizes = {name: int(wish[f"num_{name}"]) for name in ("biased", "seen", "banned")}
            sizes["best"] = int(wish["num_top"] + wish["num_candidates"])

            parts: dict[str, slice] = {}
            for name, size in sizes.items():
                parts[name] = slice(ends[name], ends[name] + size)
                ends[name] += size

            choices[index] = _grant(sampling, wish, parts, best[parts["best"]])

    return Fulfilled(choices, best)


def _grant(
    sampling: Sampling, wish: Any, parts: dict[str, slice], best: Any
) -> tuple[int, int, float]:
    """Status, token id and log-prob; `best` is filled.

    `parts` says which part of each list of the sampling is the wish's.
    """
    logits = sampling.logits[wish["row"]]
    source = logits
    if wish["changed"] >= 0 and sampling.changed is not None:
        source = sampling.changed[wish["changed"]]

    token_id = int(wish["token_id"])
    num_top = int(wish["num_top"])
    num_candidates = int(wish["num_candidates"])
    is_drawn = token_id < 0 and not num_candidates
    if is_drawn:
        ruled = apply_rules(sampling, wish, parts, source)
        largest = ruled.max()
        if largest == -math.inf:
            return ALL_BANNED, -1, 0.0

        if not math.isfinite(largest):
            return NO_NUMBERS, -1, 0.0

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
        scores = apply_rules(sampling, wish, parts, source - largest - log_sum)
        if not scores.max() < math.inf:
            return NO_NUMBERS, token_id, log_prob

        _tell_best(best[num_top:], scores, log_probs)

    return CHOSEN, token_id, log_prob


def apply_rules(sampling: Sampling, wish: Any, parts: dict[str, slice], row: Floats) -> Floats:
    """A row (vocab) after bias, penalties, bans and the mask."""
    row = row.copy()
    biased_ids = sampling.biased_ids[parts["biased"]]
    np.add.at(row, biased_ids, sampling.biases[parts["biased"]])

    seen_ids = sampling.seen_ids[parts["seen"]]
    counts = sampling.counts[parts["seen"]].astype(np.float64)
    penalties = wish["frequency"] * counts + wish["presence"] * (counts > 0)
    less = np.float32(penalties)
    repetition = wish["repetition"]
    scores = row[seen_ids]
    divided = scores / repetition - less
    multiplied = scores.astype(np.float64) * repetition - less
    row[seen_ids] = np.where(scores > 0, divided, multiplied)

    row[sampling.banned_ids[parts["banned"]]] = -np.inf
    if wish["mask"] >= 0 and sampling.masks is not None:
        bits = np.unpackbits(sampling.masks[wish["mask"]].view(np.uint8), bitorder="little")
        row[bits[: len(row)] == 0] = -np.inf

    return row


def _draw(row: Floats, wish: Any) -> int:
    scale = np.float32(1) / wish["temperature"]
    powers = (row - row.max()) * scale
    weights = _weights(powers)
    everything = weights.sum(dtype=np.float64)
    keep(weights, powers, wish)

    shares = weights.cumsum(dtype=np.float64) / everything
    cdf = shares.astype(np.float32)
    chance = uniform(int(wish["seed"]), int(wish["position"]))
    target = np.float32(chance) * cdf[-1]
    return int(cdf.searchsorted(target, side="right"))


def keep(weights: Floats, powers: Floats, wish: Any) -> None:
    """Set the weights (vocab) of the tokens that filters leave out to 0. `weights` are e to the
    `powers`.
    """
    top_k = wish["top_k"]
    if 0 < top_k < len(weights):
        least = np.partition(weights, -top_k)[-top_k]
        weights[weights < least] = 0

    if wish["top_p"] < 1:
        least = -_last_taken(-weights, weights, wish["top_p"])
        weights[weights < least] = 0

    weights[weights < wish["min_p"]] = 0
    if wish["typical_p"] < 1:
        # Meister et al. 2022. The surprise is a constant less the power.
        possible_powers = np.where(weights > 0, powers, 0)
        total = (weights * possible_powers.astype(np.float64)).sum()
        mean = np.float32(total / weights.sum(dtype=np.float64))
        distances = np.maximum(np.abs(mean - powers), _LEAST_DISTANCE)
        weights[distances > _last_taken(distances, weights, wish["typical_p"])] = 0


def _weights(powers: Floats) -> Floats:
    return np.where(powers >= _LEAST_POWER, np.exp(powers), np.float32(0))


def _last_taken(keys: Floats, weights: Floats, share: float) -> np.float32:
    """The key of the last token that is taken, where tokens are taken by ascending keys until they
    have a share of the mass.
    """
    order = keys.argsort(kind="stable")
    order = order[weights[order] > 0]
    masses = weights[order].cumsum(dtype=np.float64)
    least_mass = masses[-1] * float(share)
    num_before = int((masses[:-1] < least_mass).sum())
    return np.float32(keys[order[num_before]])


def _tell_best(best: Any, scores: Floats, log_probs: Floats) -> None:
    if not len(best):
        return

    # Of equal ones the lower id is the first.
    order = (-scores).argsort(kind="stable")[: len(best)]
    best["token_id"] = order
    best["score"] = scores[order]
    best["log_prob"] = log_probs[order]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 24 bits, exact in float32.

    Scaled by any total it stays below that total.

    A token's depends only on its sequence's seed and its index in the output, so neighbours in the
    batch, preemption and recomputation cannot change it. The mixing function is splitmix64 (Steele,
    Lea, Flood 2014).
    """
    return (_mix(_mix(seed) + position * _GOLDEN) >> 40) * 2.0**-24


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
