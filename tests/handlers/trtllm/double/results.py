"""The object that `generate_async` returns: one for a request, changed by each step that its holder
takes.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

from torch import Tensor

from tests.handlers.trtllm.double.responses import Channel, Death, Finish, News, Refusal, Response

log = logging.getLogger("tensorrt_llm")

REASONS = {
    Finish.END_ID: "stop",
    Finish.STOP_WORDS: "stop",
    Finish.LENGTH: "length",
    Finish.CANCELLED: "cancelled",
}


class RequestOutput:
    """Public names that the profile does not have are left out of the package's class."""

    # Of the package's classes
    _maker: Any
    _id: int
    _params: Any
    _channel: Channel
    _abort: Callable[[int], bool]
    _outputs: list[Any]
    _context_logits: Tensor | None
    _error: str | None

    def __init__(self) -> None:
        raise RuntimeError("RequestOutput is made by generate_async; users do not make one")

    @classmethod
    def _of(
        cls, request_id: int, params: Any, channel: Channel, abort: Callable[[int], bool]
    ) -> Any:
        self = cls.__new__(cls)
        self._id = request_id
        self._params = params
        self._channel = channel
        self._abort = abort
        make = cls._maker.made("CompletionOutput")
        self._outputs = [
            make(index=index, token_ids=[], logprobs=[], prompt_logprobs=[])
            for index in range(params.best_of)
        ]
        self._is_done = False
        self._context_logits = self._error = None
        self._num_cached_tokens = 0
        return self

    # What a holder reads.

    @property
    def outputs(self) -> list[Any]:
        """The best `n` of the sequences. They are sorted and numbered anew only where there are
        more.
        """
        if self._params.use_beam_search or self._params.n == self._params.best_of:
            return self._outputs[: self._params.n]

        ranked = sorted(
            self._outputs, key=lambda one: _or_least(one.cumulative_logprob), reverse=True
        )
        for index, output in enumerate(ranked):
            output.index = index

        return ranked[: self._params.n]

    @property
    def context_logits(self) -> Tensor | None:
        return self._context_logits

    @property
    def finished(self) -> bool:
        return self._is_done

    @property
    def cached_tokens(self) -> int:
        return self._num_cached_tokens

    @property
    def error(self) -> str | None:
        return self._error

    # Its steps.

    def abort(self) -> None:
        """Ask the worker to end the request, which takes a step or longer. It only warns if the
        request has ended.
        """
        if not self._abort(self._id):
            log.warning("request %d has ended and cannot be aborted", self._id)

    async def aresult(self) -> Any:
        while not self._is_done:
            self._take(await self._channel.aget())

        return self

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.aresult().__await__()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._is_done:
            raise StopAsyncIteration

        self._take(await self._channel.aget())
        return self

    def _take(self, news: News) -> None:
        """Apply one step. After an error the object is not done, so a further step would wait for
        ever.
        """
        if isinstance(news, Death):
            raise news.error

        if isinstance(news, Refusal):
            self._error = news.message
            raise self._maker.made("RequestError")(news.message)

        self._is_done = news.is_final
        self._num_cached_tokens = news.num_cached_tokens
        if news.context_logits is not None:
            self._context_logits = news.context_logits

        for beam in range(len(news.tokens)):
            self._update(self._outputs[news.index + beam], news, beam)

    def _update(self, output: Any, news: Response, beam: int) -> None:
        if self._params.use_beam_search:
            output.token_ids = news.tokens[beam]
        else:
            output.token_ids.extend(news.tokens[beam])

        if news.sums is not None:
            output.cumulative_logprob = news.sums[beam]

        # Appended, of a beam too, though its tokens are restated and may be others
        if news.log_probs is not None:
            output.logprobs = output.logprobs + news.log_probs[beam][len(output.logprobs) :]

        if news.prompt_log_probs is not None:
            output.prompt_logprobs = news.prompt_log_probs

        if news.generation_logits is not None:
            output.generation_logits = news.generation_logits[beam][: len(output.token_ids)]

        if news.context_outputs is not None:
            output.additional_context_outputs = news.context_outputs

        if news.generation_outputs is not None:
            output.additional_generation_outputs = news.generation_outputs

        if news.perf_metrics is not None:
            output.request_perf_metrics = news.perf_metrics

        # A sequence that ends before others is not told
        if news.is_final or news.reasons[beam] is Finish.CANCELLED:
            self._note_end(output, news.reasons[beam])

    def _note_end(self, output: Any, reason: Finish) -> None:
        output.finish_reason = REASONS.get(reason)
        if reason is not Finish.STOP_WORDS:
            return

        if output.token_ids[-1:] and output.token_ids[-1] in (self._params.stop_token_ids or ()):
            output.stop_reason = output.token_ids[-1]
            if not self._params.include_stop_str_in_output:
                output.token_ids = output.token_ids[:-1]


def _or_least(value: float | None) -> float:
    return float("-inf") if value is None else value
