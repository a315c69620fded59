"""A weight in AWQ's layout `gemm`: words hold neighbouring outputs of one input.

`qweight` (num_in, words of num_out), `qzeros` (num_groups, words of num_out), `scales`
(num_groups, num_out).
"""

from __future__ import annotations

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.quantised.parts import INT32, Parts
from handlers.lmi_dist.quantised.scheme import Scheme
from handlers.lmi_dist.quantised.weight import QuantisedWeight
from handlers.lmi_dist.quantised.words import WORD_BITS, Codes, unpacked

PARTS = ("qweight", "qzeros", "scales")
# From the lowest bits on a word has the outputs 0 2 4 6 1 3 5 7. So these are the places of 0 to 7.
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def read(parts: Parts, scheme: Scheme) -> QuantisedWeight:
    """Return the weight in `parts`. Raises ValueError."""
    words = parts.matrix("qweight", INT32)
    num_in, num_words = words.shape
    num_out = num_words * (WORD_BITS // scheme.num_bits)
    num_groups = scheme.num_groups(num_in)
    scales = parts.scales("scales", (num_groups, num_out))
    zero_points = parts.words("qzeros", (num_groups, num_words))

    return QuantisedWeight(
        shape=(num_out, num_in),
        num_bits=scheme.num_bits,
        read_codes=lambda: _outputs(words, scheme.num_bits),
        scales=scales.T,
        zero_points=_outputs(zero_points, scheme.num_bits),
        groups=parts.groups("g_idx", num_in, scheme),
    )


def _outputs(words: Array, num_bits: int) -> Codes:
    """Return the numbers in words (num_rows, num_words) by output, (num_out, num_rows)."""
    numbers = unpacked(words, num_bits)
    num_rows, num_out = numbers.shape
    by_word = numbers.reshape(num_rows, num_out // len(PLACES), len(PLACES))
    return by_word[:, :, PLACES].reshape(num_rows, num_out).T
