"""How an engine chooses the next token of a request."""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import force_setattr

from lmi.executor.checks import broken, check_int, check_range

MAX_SEED = 2**64 - 1  # clients send unsigned 64-bit seeds
MAX_TEMPERATURE = 100.0  # the distribution is nearly flat far below this
REPETITION_PENALTIES = 0.01, 100.0  # beyond these, a logit divided by the penalty may leave the range of float32
MAX_SEQUENCES = 512  # of one request; the default of max_request_sequences at the doors
MAX_PENALTY = 2.0  # presence and frequency, either sign: the bounds of OpenAI and vLLM


class _BeamWidth(msgspec.Struct, frozen=True):
    """The positional argument of a SamplingConfig."""

    beam_width: int = 1


class SamplingConfig(_BeamWidth, frozen=True, kw_only=True):
    """How the next token is chosen.

    Decoding is greedy if and only if `temperature` is 0 or `top_k` is 1; otherwise it samples. None means "off": no
    top_k, no penalty. Upstream has no `typical_p`. A `seed` of None draws fresh randomness (upstream is deterministic
    then). Sequence i of a request uses seed + i. An engine whose seeds are signed drops the highest bit. The constants
    above bound temperature and penalties (upstream has no bounds), so that no value makes logits NaN or infinite. An
    engine may raise a tiny temperature to a larger one that is still nearly greedy.
    """

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    temperature: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    num_return_sequences: int = None  # type: ignore[assignment]  # None becomes all beams, or one sequence

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1)
        if self.num_return_sequences is None:
            force_setattr(self, "num_return_sequences", self.beam_width)
        check_int("num_return_sequences", self.num_return_sequences, 1)
        for name in ("beam_width", "num_return_sequences"):
            if getattr(self, name) > MAX_SEQUENCES:
                raise broken(name, f"at most {MAX_SEQUENCES}", getattr(self, name))
        if self.beam_width > 1 and self.num_return_sequences > self.beam_width:
            raise broken("num_return_sequences", f"at most beam_width ({self.beam_width})", self.num_return_sequences)
        for name, minimum in (("top_k", 0), ("min_tokens", 0), ("early_stopping", 0), ("no_repeat_ngram_size", 0)):
            check_int(name, getattr(self, name), minimum)
        check_int("seed", self.seed, 0, MAX_SEED)
        check_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_range("typical_p", self.typical_p, 0.0, 1.0, low_open=True)
        check_range("min_p", self.min_p, 0.0, 1.0)
        check_range("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES)
        check_range("length_penalty", self.length_penalty, 0.0, math.inf)
        check_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        check_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1
