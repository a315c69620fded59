"""How fast an engine is while it is full: learned from the times of its steps."""

import math

from msgspec import Struct

# A step that is so old counts 1/e of a new one.
MEMORY_S = 3.0
# The speed counts as known after so many steps.
MIN_STEPS = 4


class StepSums(Struct):
    """Sums over the steps of a full engine, in which older steps count less."""

    # The number of steps.
    weight: float = 0.0
    num_prompt_tokens: float = 0.0
    seconds: float = 0.0
    squared_prompt_tokens: float = 0.0
    # The sum of prompt tokens times seconds.
    token_seconds: float = 0.0
    num_output_tokens: float = 0.0
    num_sequences: float = 0.0

    def add(
        self, seconds: float, num_prompt_tokens: int, num_output_tokens: int, num_sequences: int
    ) -> None:
        keep = math.exp(-seconds / MEMORY_S)
        self.weight = keep * self.weight + 1
        self.num_prompt_tokens = keep * self.num_prompt_tokens + num_prompt_tokens
        self.seconds = keep * self.seconds + seconds
        self.squared_prompt_tokens = keep * self.squared_prompt_tokens + num_prompt_tokens**2
        self.token_seconds = keep * self.token_seconds + num_prompt_tokens * seconds
        self.num_output_tokens = keep * self.num_output_tokens + num_output_tokens
        self.num_sequences = keep * self.num_sequences + num_sequences

    @property
    def slope(self) -> float:
        """The seconds of one more prompt token, by least squares over the steps. 0 where all steps
        had equally many.
        """
        spread = self.weight * self.squared_prompt_tokens - self.num_prompt_tokens**2
        if spread <= 1e-9 * self.weight * self.squared_prompt_tokens:
            return 0.0

        covariance = self.weight * self.token_seconds - self.num_prompt_tokens * self.seconds
        return covariance / spread


class Speed:
    """The time of a full engine's steps, as the line that fits them best:

    seconds of a step = step_s + prompt_token_s * number of its prompt tokens
    """

    def __init__(self) -> None:
        # Without enough steps, all seconds below are 0.
        self.is_known = False
        # What one more prompt token costs.
        self.prompt_token_s = 0.0
        # A full step without prompt tokens.
        self.step_s = 0.0
        # The engine's time for a token of an answer, while it makes many at once.
        self.output_token_s = 0.0
        # The shortest of all steps that made tokens of answers, full or not.
        self.least_step_s = math.inf

        self._num_steps = 0
        self._sums = StepSums()

    def note(
        self, seconds: float, num_prompt_tokens: int, num_output_tokens: int, num_sequences: int
    ) -> None:
        """Learn from a full engine's step, of which `seconds` count the wait before it too."""
        sums = self._sums
        sums.add(seconds, num_prompt_tokens, num_output_tokens, num_sequences)

        self.prompt_token_s = 0.0
        if sums.num_prompt_tokens:
            # As if the steps had done nothing else.
            max_token_s = sums.seconds / sums.num_prompt_tokens
            self.prompt_token_s = min(max(sums.slope, 0.0), max_token_s)

        prefill_s = self.prompt_token_s * sums.num_prompt_tokens
        decode_s = max(0.0, sums.seconds - prefill_s)
        self.step_s = decode_s / sums.weight

        self.output_token_s = 0.0
        if sums.num_output_tokens:
            self.output_token_s = decode_s / sums.num_output_tokens

        self._num_steps += 1
        self.is_known = self._num_steps >= MIN_STEPS and sums.num_output_tokens > 0

    def num_sequences(self, seconds: float) -> float:
        """Return how many sequences a step of so many seconds has, prompts included, if each takes
        what it took lately.

        In truth a sequence takes less in a step of more of them. A batch that is set to this number
        again and again still ends at steps of so many seconds.
        """
        sums = self._sums
        if not (sums.num_sequences and sums.seconds):
            return math.inf

        return seconds * sums.num_sequences / sums.seconds
