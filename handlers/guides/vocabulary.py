"""The tokens of an engine as its guides see them. A mask has a bit for each: 1 if it may come next.

`tokenizer_files.py` reads the texts of the tokens, `tokenizer.py` gives them to llguidance.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lmi.executor import GuidedDecodingConfig

if TYPE_CHECKING:
    from llguidance import LLMatcher

# The bits of the words that a mask is made of.
WORD_BITS = 32

Mask = NDArray[np.int32]
"""(num_words,), with the first token in the lowest bit of the first word."""


def num_words(num_tokens: int) -> int:
    """Return the number of words in a mask of so many tokens."""
    return -(-num_tokens // WORD_BITS)


class Vocabulary:
    """The tokens of an engine, and those that end an answer."""

    def __init__(self, config: GuidedDecodingConfig, vocab_size: int) -> None:
        """`vocab_size` is the width of the logits. No guide allows a token that `config` does not
        have.
        """
        from handlers.guides.tokenizer import new_tokenizer

        self.size = vocab_size
        end_ids = config.stop_token_ids or ()
        self.end_ids = frozenset(end_id for end_id in end_ids if 0 <= end_id < vocab_size)
        self.tokenizer = new_tokenizer(config, vocab_size)

        # llguidance allows these where an answer may end, and after an error.
        eos_ids = self.tokenizer.eos_tokens
        self.eos_mask = self.mask_of(token_id for token_id in eos_ids if token_id < vocab_size)

        # llguidance writes its masks here. Its tokenizer may have more tokens than the logits.
        self._row = np.zeros(num_words(self.tokenizer.vocab_size), np.int32)

    def mask_of(self, token_ids: Iterable[int]) -> Mask:
        """Return the mask in which only these tokens have a 1."""
        bits = np.zeros(num_words(self.size) * WORD_BITS, bool)
        bits[list(token_ids)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)

    def mask_from(self, matcher: "LLMatcher") -> Mask:
        """Return the mask of the tokens that may follow in a matcher, among them `eos_mask` at an
        end. It is valid until the next call.
        """
        matcher.unsafe_compute_mask_ptr(self._row.ctypes.data, self._row.nbytes)
        return self._row[: num_words(self.size)]
