"""A queue that learns how fast its engine is, and so knows how long a request waits and runs."""

from collections.abc import Iterator

from lmi.engine.queue import Line, QueueEntry, RequestQueue
from lmi.engine.speed import Speed

# The weight of a new error in the average of errors.
ERROR_SHARE = 0.05


class CountedLine(Line):
    """A line that knows how many tokens its requests have."""

    num_prompt_tokens = 0
    max_output_tokens = 0

    def append(self, entry: QueueEntry) -> None:
        super().append(entry)
        self._count(entry, sign=1)

    def remove(self, entry: QueueEntry) -> None:
        super().remove(entry)
        self._count(entry, sign=-1)

    def _count(self, entry: QueueEntry, *, sign: int) -> None:
        self.num_prompt_tokens += sign * entry.num_prompt_tokens
        self.max_output_tokens += sign * entry.max_tokens * entry.num_sequences


class TimedQueue(RequestQueue):
    """A queue whose costs are seconds of the engine. They are 0 until its speed is known."""

    _new_line = CountedLine

    def __init__(self, max_num_sequences: int, max_wait_s: float) -> None:
        super().__init__(max_num_sequences, max_wait_s)
        self.speed = Speed()

    def start(self, now: float) -> Iterator[QueueEntry]:
        """Yield the requests to give to the engine now. Notes how far their expected waits were
        off.
        """
        for entry in super().start(now):
            if entry.expected_s is not None:
                error_s = abs(now - entry.queued_s - entry.expected_s)
                self.wait_error_s += ERROR_SHARE * (error_s - self.wait_error_s)

            yield entry

    # What tokens and requests take.

    def _price(self, num_prompt_tokens: float, num_output_tokens: float) -> float:
        return (
            num_prompt_tokens * self.speed.prompt_token_s
            + num_output_tokens * self.speed.output_token_s
        )

    def prompt_s(self, num_tokens: int) -> float | None:
        if not self.speed.is_known:
            return None

        return num_tokens * self.speed.prompt_token_s

    def service_s(self, entry: QueueEntry) -> float:
        """Return the time from a request's start to its end, while the engine is full."""
        prompt_s = entry.num_prompt_tokens * self.speed.prompt_token_s
        return prompt_s + self._num_steps_of(entry) * self.speed.step_s

    def _num_steps_of(self, entry: QueueEntry) -> float:
        """Return how many steps an answer is expected to take."""
        return entry.max_tokens * self._answered_share

    # How long requests wait.

    def expected_wait_s(self, entry: QueueEntry) -> float | None:
        if not self.speed.is_known:
            return None

        return self._next_end_s() + self.ahead_of(entry).cost

    def _next_end_s(self) -> float:
        """Return the time until a place of the batch is expected to be free."""
        if self._num_running < self._places:
            return 0.0

        last_steps = []
        for entry in self._running:
            if not entry.is_express:
                last_steps.append((entry.started_step or 0) + self._num_steps_of(entry))

        num_steps_left = min(last_steps, default=0.0) - self._num_steps
        return max(0.0, num_steps_left) * self.speed.step_s

    def _ahead_s(self, entry: QueueEntry) -> float:
        """Return what those take who will go before a request that is not in the queue yet.

        Clients take turns by what they have had. So while a client has its requests up to this one,
        each other client has at most as much. `ahead_of` counts request by request; this looks at
        each line once, as it is asked for every request that comes.
        """
        sender = self._clients.get(entry.client)
        line_of_sender = None if sender is None else sender.lines.get(entry.priority)
        before_s = 0.0 if line_of_sender is None else self._line_s(line_of_sender)
        turn_s = before_s + self._cost_of(entry)

        ahead_s = before_s
        for client in self._clients.values():
            for priority, line in client.lines.items():
                if priority > entry.priority:
                    ahead_s += self._line_s(line)
                elif priority == entry.priority and client is not sender:
                    ahead_s += min(turn_s, self._line_s(line))

        return ahead_s

    def _waiting_s(self) -> float:
        """Return what all who wait take."""
        return sum(
            self._line_s(line)
            for client in self._clients.values()
            for line in client.lines.values()
        )

    def _line_s(self, line: Line) -> float:
        assert isinstance(line, CountedLine)
        return self._cost(line.num_prompt_tokens, line.max_output_tokens)
