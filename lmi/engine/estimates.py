"""What an engine learns of itself and of its clients: how fast it is when it is full, and how long clients wait.

Both are measured, so admission needs no number from an operator. Times are seconds of any clock that only grows.
"""

from __future__ import annotations

import math
from bisect import bisect_right

MEMORY_S = 3.0  # a step that is so old counts 1/e of a new one
MIN_STEPS = 4  # before the speed counts as known
NUM_STAYED = 4  # clients who are taken to have stayed before any was seen
MAX_SEEN = 32  # of clients, that count in an average
INSTANT_S = 0.1  # who leave together have one reason, as a proxy that ends, and count once
FORGET_S = 600.0  # half of what is known of impatience is forgotten in this time
QUANTILE = 0.5  # of clients who still wait when patience is said to end
BOUNDS_S = tuple(0.1 * 1.15**i for i in range(52))  # 0.1 s to 125 s


class Speed:
    """The time of a full engine's steps, as a line: seconds = step_s + prompt_token_s · number of prompt tokens."""

    def __init__(self) -> None:
        self.is_known = False
        self.prompt_token_s = 0.0  # what one more prompt token costs
        self.step_s = 0.0  # a full step without prompt tokens
        self.output_token_s = 0.0  # the engine's time for a token of an answer, while it makes many at once
        self.least_step_s = math.inf  # of all steps that made tokens of answers, full or not
        self._num_steps = 0
        self._weight = self._prompt = self._seconds = self._prompt_2 = self._both = self._output = self._rows = 0.0

    def note(self, seconds: float, num_prompt_tokens: int, num_output_tokens: int, num_sequences: int) -> None:
        """Learn from a full engine's step and the wait before it."""
        keep = math.exp(-seconds / MEMORY_S)
        self._num_steps += 1
        self._weight = keep * self._weight + 1
        self._prompt = keep * self._prompt + num_prompt_tokens
        self._seconds = keep * self._seconds + seconds
        self._prompt_2 = keep * self._prompt_2 + num_prompt_tokens**2
        self._both = keep * self._both + num_prompt_tokens * seconds
        self._output = keep * self._output + num_output_tokens
        self._rows = keep * self._rows + num_sequences
        self._settle()

    def num_sequences(self, seconds: float) -> float:
        """The sequences of a step that takes so long with its prompts, at the time that each took lately.

        A step of more sequences takes less for each, so that a batch of this size settles where a step takes so long.
        """
        return seconds * self._rows / self._seconds if self._rows and self._seconds else math.inf

    def _settle(self) -> None:
        spread = self._weight * self._prompt_2 - self._prompt**2
        slope = 0.0  # each step had as many prompt tokens as any other
        if spread > 1e-9 * self._weight * self._prompt_2:
            slope = (self._weight * self._both - self._prompt * self._seconds) / spread
        self.prompt_token_s = min(max(slope, 0.0), self._seconds / self._prompt) if self._prompt else 0.0
        decode_s = max(0.0, self._seconds - self.prompt_token_s * self._prompt)
        self.step_s = decode_s / self._weight
        self.output_token_s = decode_s / self._output if self._output else 0.0
        self.is_known = self._num_steps >= MIN_STEPS and self._output > 0


class ClientPatience:
    """How long clients wait before they leave, by the product-limit estimate over the times that were seen.

    A client who is answered, or refused, has stayed for so long and says nothing of later times.
    """

    def __init__(self) -> None:
        # Of the clients who waited until a bound, the share that left before the next.
        self._left = [0.0] * len(BOUNDS_S)
        self._seen = [NUM_STAYED] * len(BOUNDS_S)
        self._left_s = -math.inf  # when one left who counted
        self._forgotten_s = 0.0

    def note(self, waited_s: float, *, has_left: bool, now: float) -> None:
        self._forget(now)
        if has_left:
            if now - self._left_s < INSTANT_S:
                return
            self._left_s = now
        last = bisect_right(BOUNDS_S, waited_s) - 1
        for i in range(last + has_left):
            self._seen[i] = min(self._seen[i] + 1, MAX_SEEN)
            self._left[i] += ((i == last) - self._left[i]) / self._seen[i]

    def seconds(self, now: float) -> float:
        """The time after which fewer than QUANTILE of the clients still wait. Infinite if few were seen to leave."""
        self._forget(now)
        staying = 1.0
        for bound_s, share in zip(BOUNDS_S, self._left, strict=True):
            staying *= 1 - share
            if staying < QUANTILE:
                return bound_s
        return math.inf

    def _forget(self, now: float) -> None:
        if (passed_s := now - self._forgotten_s) < 1.0:
            return
        self._forgotten_s = now
        keep = 0.5 ** (passed_s / FORGET_S)
        self._left = [keep * share for share in self._left]
