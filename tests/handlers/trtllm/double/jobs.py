"""One request in the worker: its sequences, the token that each gets in a step, and the news of
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.handlers.trtllm.double.beams import Beam, BeamSearch
from tests.handlers.trtllm.double.guide import Guide
from tests.handlers.trtllm.double.knobs import Knobs
from tests.handlers.trtllm.double.lines import Line
from tests.handlers.trtllm.double.model import Model
from tests.handlers.trtllm.double.responses import Channel, Finish, Response
from tests.handlers.trtllm.double.sampling import Params, allowed, choose, report

NUM_SEEDS = 2**64


@dataclass
class Sequence:
    index: int
    generator: torch.Generator
    guide: Guide | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[Any] = field(default_factory=list)
    sum: float = 0.0
    # The logits from which its tokens were chosen
    rows: list[Tensor] = field(default_factory=list)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    reason: Finish = Finish.NOT_FINISHED
    num_sent: int = 0
    is_told: bool = False  # its end was

    @property
    def is_over(self) -> bool:
        return self.reason is not Finish.NOT_FINISHED

    @property
    def has_news(self) -> bool:
        return not self.is_told and (self.is_over or len(self.tokens) > self.num_sent)


@dataclass(eq=False)
class Job:
    """`params` are the worker's own copy. `max_tokens` is what the context has room for."""

    id: int
    prompt: list[int]
    params: Params
    is_streamed: bool
    channel: Channel
    priority: float
    line: Line
    model: Model
    max_tokens: int
    make_log_prob: Callable[..., Any]
    adapter: Tensor | None = None
    cache_key: tuple[Any, ...] = ()
    # The sampler reports no other token's log-prob
    knows_chosen_only: bool = False
    # A processor does not see the last token yet
    overlaps: bool = False
    sequences: list[Sequence] = field(default_factory=list)
    search: BeamSearch | None = None
    num_cached: int = 0
    num_iterations: int = 0
    is_cancelled: bool = False
    cancelled_at: int | None = None  # the step
    arrived: float = field(default_factory=time.monotonic)
    scheduled: float | None = None
    first: float | None = None

    @property
    def width(self) -> int:
        return self.params.best_of if self.params.use_beam_search else 1

    @property
    def num_slots(self) -> int:
        return self.params.best_of if not self.params.use_beam_search else 1

    @property
    def is_over(self) -> bool:
        if self.search is not None:
            return self.search.is_over

        return all(sequence.is_over for sequence in self.sequences)

    @property
    def wants_log_probs(self) -> bool:
        num_asked = self.params.logprobs
        return bool(num_asked) if self.line.is_zero_log_probs_none else num_asked is not None

    @property
    def wants_prompt_log_probs(self) -> bool:
        num_asked = self.params.prompt_logprobs
        return bool(num_asked) if self.line.is_zero_log_probs_none else num_asked is not None

    def begin(self, guide: Callable[[], Guide | None], shared: torch.Generator | None) -> None:
        """`shared` draws for every request without a seed, where the sampler does not take seed 0
        for them.
        """
        self.scheduled = time.monotonic()
        if self.params.use_beam_search:
            stopping = self.params.early_stopping
            self.search = BeamSearch(
                self.params.best_of,
                self.params.length_penalty or 0.0,
                1 if stopping is None else stopping,
                self._beam_end,
            )
            return

        for index in range(self.params.best_of):
            self.sequences.append(Sequence(index, self._generator(index, shared), guide()))

    def _generator(self, index: int, shared: torch.Generator | None) -> torch.Generator:
        if self.params.seed is None and shared is not None:
            return shared

        return torch.Generator().manual_seed(((self.params.seed or 0) + index) % NUM_SEEDS)

    # A step.

    def advance(self, knobs: Knobs) -> None:
        """Give each sequence its next token. Raises what a logits processor raises."""
        self.num_iterations += 1
        if self.search is not None:
            if not self.search.is_over:
                self.search.advance(self._beam_row)

        for sequence in self.sequences:
            if not sequence.is_over:
                self._extend(sequence, knobs)

        self.first = self.first or time.monotonic()

    def _extend(self, sequence: Sequence, knobs: Knobs) -> None:
        tokens = [*self.prompt, *sequence.tokens]
        logits = self._processed(tokens)
        row = allowed(logits, self.params, self.prompt, sequence.tokens)
        if sequence.guide is not None:
            sequence.guide.restrict(row)

        token = choose(row, self.params, sequence.generator)
        if sequence.guide is not None:
            sequence.guide.accept(token)

        if self.wants_log_probs:
            sequence.log_probs.append(self._log_probs(logits, token, knobs))
            sequence.sum += float(logits.log_softmax(-1)[token])

        if self.params.return_generation_logits:
            sequence.rows.append(logits)

        for name in self.output_names:
            sequence.outputs.setdefault(name, []).append(self._output(name, tokens))

        sequence.tokens.append(token)
        sequence.reason = self._reason_after(sequence.tokens)
        if sequence.reason is Finish.END_ID and knobs.end_token != "kept":
            del sequence.tokens[-1], sequence.rows[len(sequence.tokens) :]
            if knobs.end_token == "dropped whole":
                del sequence.log_probs[len(sequence.tokens) :]

    def _processed(self, tokens: list[int]) -> Tensor:
        """The logits (vocab,) after the request's processors, which change them in
        place for good.
        """
        logits = self.model.logits(tokens, self.adapter)
        processors_given = self.params.logits_processor
        processors = (
            processors_given
            if isinstance(processors_given, list)
            else []
            if processors_given is None
            else [processors_given]
        )
        is_behind = self.overlaps and len(tokens) > len(self.prompt)
        for processor in processors:
            processor(
                self.id, logits.view(1, 1, -1), [tokens[: len(tokens) - is_behind]], None, None
            )

        return logits

    def _reason_after(self, tokens: list[int]) -> Finish:
        if tokens[-1] == self.params.end_id and not self.params.ignore_eos:
            return Finish.END_ID

        if len(tokens) >= self.max_tokens:
            return Finish.LENGTH

        everything = [*self.prompt, *tokens]
        words = (
            []
            if self.params.ignore_eos
            else [[token_id] for token_id in self.params.stop_token_ids or ()]
        )
        if any(everything[len(everything) - len(word) :] == word for word in words):
            return Finish.STOP_WORDS

        return Finish.NOT_FINISHED

    def _beam_row(self, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        logits = self._processed([*self.prompt, *tokens])
        return logits, allowed(logits, self.params, self.prompt, tokens)

    def _beam_end(self, tokens: tuple[int, ...]) -> Finish | None:
        reason = self._reason_after(list(tokens))
        return None if reason is Finish.NOT_FINISHED else reason

    def _log_probs(self, logits: Tensor, token: int, knobs: Knobs) -> Any:
        if knobs.log_prob_form == "floats":
            return float(logits.log_softmax(-1)[token])

        if self.knows_chosen_only:
            return report(logits, 0, token, self.make_log_prob)

        value = None if knobs.chosen_log_prob == "missing" else token
        return report(
            logits,
            self.params.logprobs,
            value,
            self.make_log_prob,
            is_first=self.line.is_chosen_first,
        )

    # What else the model returns.

    @property
    def output_names(self) -> list[str]:
        outputs_asked = self.params.additional_model_outputs or []
        return [output if isinstance(output, str) else output.name for output in outputs_asked]

    def _output(self, name: str, tokens: list[int]) -> Tensor:
        """A row of one of the model's outputs. Raises KeyError for others, which fails the step."""
        return {"logits": self.model.logits, "hidden_states": self.model.hidden_state}[name](tokens)

    def _context(self) -> list[list[int]]:
        """The parts of the prompt behind each of its tokens that was computed."""
        return [self.prompt[: end + 1] for end in range(self.num_cached, len(self.prompt))]

    def _context_rows(self) -> list[Tensor]:
        return [self.model.logits(part, self.adapter) for part in self._context()]

    def _prompt_log_probs(self, first_token: int) -> list[Any]:
        followers: list[int | None] = [*self.prompt[self.num_cached + 1 :], first_token]
        if not self.line.has_prompt_tokens:
            followers = [None] * len(followers)

        num_best = self.params.prompt_logprobs
        rows = zip(self._context_rows(), followers, strict=True)
        return [report(row, num_best, token, self.make_log_prob) for row, token in rows]

    # News.

    def news(self, interval: int, num_new: int) -> list[Response]:
        """What a step tells. A request that is not streamed gets the news of a sequence
        at its end.
        """
        if self.search is not None:
            return self._beam_news(interval)

        due = [
            sequence
            for sequence in self.sequences
            if sequence.has_news and self._is_due(sequence.is_over, interval)
        ]
        return [self._response(sequence, num_new) for sequence in due]

    def _is_due(self, is_over: bool, interval: int) -> bool:
        return is_over or (
            self.is_streamed and (self.num_iterations == 1 or self.num_iterations % interval == 0)
        )

    def _response(self, sequence: Sequence, num_new: int) -> Response:
        is_first = sequence.num_sent == 0
        new = sequence.tokens[sequence.num_sent :]
        sequence.num_sent = len(sequence.tokens)
        sequence.is_told = sequence.is_over
        is_final = all(job_sequence.is_told for job_sequence in self.sequences)
        response = Response(sequence.index, [new], [sequence.reason], is_final)
        if self.wants_log_probs:
            response.log_probs = [list(sequence.log_probs)]
            response.sums = [sequence.sum]

        if sequence.rows:
            rows = sequence.rows[-num_new:] if self.is_streamed else sequence.rows
            response.generation_logits = [torch.stack(rows)]

        if sequence.outputs:
            response.generation_outputs = {
                name: torch.stack(rows).unsqueeze(1) for name, rows in sequence.outputs.items()
            }

        if is_first and sequence.index == 0 and sequence.tokens:
            self._add_context(response, sequence.tokens[0])

        self._add_counts(response)
        return response

    def _beam_news(self, interval: int) -> list[Response]:
        assert self.search is not None
        if not self._is_due(self.search.is_over, interval):
            return []

        beams = self.search.best(self.params.best_of)
        reasons = [beam.reason if self.search.is_over else Finish.NOT_FINISHED for beam in beams]
        response = Response(0, [list(beam.tokens) for beam in beams], reasons, self.search.is_over)
        if self.wants_log_probs:
            response.log_probs = list(map(self._beam_log_probs, beams))
            response.sums = [beam.sum for beam in beams]

        if self.params.return_generation_logits:
            response.generation_logits = [torch.stack(beam.rows) for beam in beams]

        if self.num_iterations == 1 or not self.is_streamed:
            self._add_context(response, beams[0].tokens[0])

        self._add_counts(response)
        return [response]

    def _beam_log_probs(self, beam: Beam) -> list[Any]:
        return [
            report(
                row,
                self.params.logprobs,
                token,
                self.make_log_prob,
                is_first=self.line.is_chosen_first,
            )
            for row, token in zip(beam.rows, beam.tokens, strict=True)
        ]

    def _add_context(self, response: Response, first_token: int) -> None:
        if self.params.return_context_logits:
            response.context_logits = torch.stack(self._context_rows())

        if self.wants_prompt_log_probs:
            response.prompt_log_probs = self._prompt_log_probs(first_token)

        # The only output with a row for each token of the prompt
        if "hidden_states" in self.output_names:
            response.context_outputs = {
                "hidden_states": torch.stack(list(map(self.model.hidden_state, self._context())))
            }

    def _add_counts(self, response: Response) -> None:
        response.num_cached_tokens = self.num_cached
        if self.params.return_perf_metrics and response.is_final:
            names = {
                "arrival_time": self.arrived,
                "first_scheduled_time": self.scheduled,
                "first_token_time": self.first,
            }

            times = {
                name: timedelta(seconds=seconds)
                for name, seconds in names.items()
                if seconds is not None
            }
            now = timedelta(seconds=time.monotonic())
            response.perf_metrics = SimpleNamespace(
                timing_metrics=SimpleNamespace(**times, last_token_time=now)
            )

    def cancelled(self) -> list[Response]:
        """The last news of a request that was cancelled: no new tokens."""
        if self.params.use_beam_search:
            beams = [] if self.search is None else self.search.best(self.params.best_of)
            tokens = [list(beam.tokens) for beam in beams] or [
                [] for _ in range(self.params.best_of)
            ]
            responses = [Response(0, tokens, [Finish.CANCELLED] * len(tokens), is_final=True)]
        else:
            told_indices = {sequence.index for sequence in self.sequences if sequence.is_told}
            untold = [index for index in range(self.params.best_of) if index not in told_indices]
            responses = [
                Response(sequence, [[]], [Finish.CANCELLED], is_final=sequence == untold[-1])
                for sequence in untold
            ]

        for response in responses:
            self._add_counts(response)

        return responses
