"""Notices that long prompts share nearly all of their text and nothing of the cache, because their
beginnings differ.

Agents write a date, an id or a folder in front of what they send in every request. A cache of
prompts ends at the first token that differs, so an engine then computes thousands of tokens anew
each time.
"""

import logging
from collections import OrderedDict
from collections.abc import Hashable, Sequence

MIN_PROMPT_TOKENS = 1000
BEGINNING_TOKENS = 256
WINDOW_TOKENS = 64
MAX_KNOWN_WINDOWS = 256

log = logging.getLogger(__name__)


class BeginningWatch:
    """Remembers a window of each long prompt that an engine computed nearly whole, and tells once
    that one came again.

    The window is found by what it holds and not by its place, since a beginning may have grown by
    some tokens.
    """

    def __init__(self) -> None:
        self._has_told = False
        # The hash of a prompt's beginning by that of its window; the oldest first.
        self._beginnings: OrderedDict[int, int] = OrderedDict()

    def note(self, token_ids: Sequence[int], owner: Hashable, num_cached_tokens: int) -> None:
        """Look at a prompt whose first Result has come. Only prompts of one `owner` could have
        shared anything.
        """
        is_short = len(token_ids) <= MIN_PROMPT_TOKENS
        if self._has_told or is_short or num_cached_tokens >= BEGINNING_TOKENS:
            return

        window = hash((owner, window_of(token_ids)))
        beginning = hash(tuple(token_ids[:BEGINNING_TOKENS]))
        first_beginning = self._beginnings.setdefault(window, beginning)
        if first_beginning != beginning:
            self._has_told = True
            self._beginnings.clear()
            log.warning(
                "prompts of over %d tokens differ within their first %d and share what follows: "
                "of one of %d tokens %d were cached. What changes from request to request belongs "
                "at a prompt's end",
                MIN_PROMPT_TOKENS,
                BEGINNING_TOKENS,
                len(token_ids),
                num_cached_tokens,
            )

        while len(self._beginnings) > MAX_KNOWN_WINDOWS:
            self._beginnings.popitem(last=False)


def window_of(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens from the largest id on that stands behind the beginning, which is mostly a
    rare word.
    """
    middle = token_ids[BEGINNING_TOKENS : MIN_PROMPT_TOKENS - WINDOW_TOKENS]
    start = BEGINNING_TOKENS + middle.index(max(middle))
    return tuple(token_ids[start : start + WINDOW_TOKENS])
