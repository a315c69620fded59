"""A weight in GPTQ's layouts: words hold neighbouring inputs of one output.

`qweight` (words of num_in, num_out), `qzeros` (num_groups, words of num_out), `scales`
(num_groups, num_out), and perhaps `g_idx` (num_in,), the group of each input.
"""

from __future__ import annotations

import numpy as np

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.quantised.parts import INT32, Parts
from handlers.lmi_dist.quantised.scheme import Layout, Scheme
from handlers.lmi_dist.quantised.weight import QuantisedWeight
from handlers.lmi_dist.quantised.words import WORD_BITS, num_words, unpacked

PARTS = ("qweight", "qzeros", "scales", "g_idx")
# A word with a 1 in the place of each number, by the number of bits.
ONES = {4: 0x11111111, 8: 0x01010101}


def read(parts: Parts, scheme: Scheme) -> QuantisedWeight:
    """Return the weight in `parts`. Raises ValueError."""
    words = parts.matrix("qweight", INT32)
    num_in = len(words) * (WORD_BITS // scheme.num_bits)
    num_out = words.shape[1]
    num_groups = scheme.num_groups(num_in)
    scales = parts.scales("scales", (num_groups, num_out))
    packed_zero_points = parts.words("qzeros", (num_groups, num_words(num_out, scheme.num_bits)))
    zero_points = unpacked(_as_in_v2(packed_zero_points, scheme), scheme.num_bits)

    return QuantisedWeight(
        shape=(num_out, num_in),
        num_bits=scheme.num_bits,
        read_codes=lambda: unpacked(words.T, scheme.num_bits),
        scales=scales.T,
        zero_points=zero_points[:, :num_out].T,
        groups=parts.groups("g_idx", num_in, scheme),
    )


def _as_in_v2(words: Array, scheme: Scheme) -> Array:
    """Return the words of the zero points themselves.

    The first format has words from which 1 was taken in each place, where a 0 has borrowed from its
    neighbour. So the ones are added to the whole word, as GPTQModel does.
    """
    if scheme.layout is Layout.GPTQ_V2:
        return words

    return words.view(np.uint32) + np.uint32(ONES[scheme.num_bits])
