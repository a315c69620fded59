"""The object that `generate_async` returns: one for a request, changed by each step that its holder takes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

from torch import Tensor

from tests.handlers.trtllm.double.responses import Channel, Death, Finish, News, Refusal, Response

log = logging.getLogger("tensorrt_llm")

REASONS = {Finish.END_ID: "stop", Finish.STOP_WORDS: "stop", Finish.LENGTH: "length", Finish.CANCELLED: "cancelled"}


class RequestOutput:
    """Public names that the profile does not have are left out of the package's class."""

    _maker: Any  # of the package's classes
    _id: int
    _prompt: str | None
    _prompt_token_ids: list[int]
    _params: Any
    _channel: Channel
    _abort: Callable[[int], bool]
    _decode: Callable[[list[int]], str] | None
    _outputs: list[Any]
    _context_logits: Tensor | None
    _error: str | None

    def __init__(self) -> None:
        raise RuntimeError("RequestOutput is made by generate_async; users do not make one")

    @classmethod
    def _of(
        cls,
        request_id: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: Any,
        channel: Channel,
        abort: Callable[[int], bool],
        decode: Callable[[list[int]], str] | None,
    ) -> Any:
        self = cls.__new__(cls)
        self._id, self._prompt, self._prompt_token_ids = request_id, prompt, prompt_token_ids
        self._params, self._channel, self._abort, self._decode = params, channel, abort, decode
        make = cls._maker.made("CompletionOutput")
        self._outputs = [
            make(index=index, token_ids=[], logprobs=[], prompt_logprobs=[]) for index in range(params.best_of)
        ]
        for output in self._outputs:
            output._last_token_ids_len = output._last_logprobs_len = output._last_text_len = 0
        self._is_done = self._is_aborted = False
        self._context_logits = self._error = None
        self._num_iterations = self._num_cached_tokens = 0
        return self

    # What a holder reads.

    @property
    def request_id(self) -> int:
        return self._id

    @property
    def prompt(self) -> str | None:
        return self._prompt

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._prompt_token_ids

    @property
    def outputs(self) -> list[Any]:
        """The best `n` of the sequences. They are sorted and numbered anew only where there are more."""
        if self._params.use_beam_search or self._params.n == self._params.best_of:
            return self._outputs[: self._params.n]
        ranked = sorted(self._outputs, key=lambda one: _or_least(one.cumulative_logprob), reverse=True)
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
    def decoding_iter(self) -> int:
        return self._num_iterations

    @property
    def avg_decoded_tokens_per_iter(self) -> float | None:
        num_tokens = sum(len(output.token_ids) for output in self._outputs)
        return num_tokens / self._num_iterations if self._num_iterations else None

    @property
    def error(self) -> str | None:
        return self._error

    @property
    def metrics_dict(self) -> dict[str, float]:
        return {}

    @property
    def disaggregated_params(self) -> None:
        return None

    @property
    def mm_embedding_handle(self) -> None:
        return None

    # Its steps.

    def abort(self) -> None:
        """Ask the worker to end the request, which takes a step or longer. It only warns if the request has ended."""
        if not self._abort(self._id):
            log.warning("request %d has ended and cannot be aborted", self._id)
        self._is_aborted = True

    def aborted(self) -> bool:
        return self._is_aborted

    def result(self, timeout: float | None = None) -> Any:
        limit = timeout if self._maker.line.has_result_timeout else None
        while not self._is_done:
            self._take(self._channel.get(limit))
        return self

    async def aresult(self) -> Any:
        while not self._is_done:
            self._take(await self._channel.aget())
        return self

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.aresult().__await__()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._is_done:
            raise StopIteration
        self._take(self._channel.get())
        return self

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._is_done:
            raise StopAsyncIteration
        self._take(await self._channel.aget())
        return self

    def _take(self, news: News) -> None:
        """Apply one step. After an error the object is not done, so a further step would wait for ever."""
        if isinstance(news, Death):
            raise news.error
        if isinstance(news, Refusal):
            self._error = news.message
            raise self._maker.made("RequestError")(news.message)
        self._is_done = news.is_final
        self._num_iterations = news.num_iterations
        self._num_cached_tokens = news.num_cached_tokens
        if news.context_logits is not None:
            self._context_logits = news.context_logits
        for beam in range(len(news.tokens)):
            self._update(self._outputs[news.index + beam], news, beam)
        if self._params.detokenize and self._decode is not None:
            self._write_texts(self._decode)

    def _update(self, output: Any, news: Response, beam: int) -> None:
        output._last_token_ids_len = len(output.token_ids)
        if self._params.use_beam_search:
            output.token_ids = news.tokens[beam]
        else:
            output.token_ids.extend(news.tokens[beam])
        if news.sums is not None:
            output.cumulative_logprob = news.sums[beam]
        if news.log_probs is not None:
            self._update_log_probs(output, news.log_probs[beam])
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
        if news.is_final or news.reasons[beam] is Finish.CANCELLED:  # a sequence that ends before others is not told
            self._note_end(output, news.reasons[beam])

    def _update_log_probs(self, output: Any, log_probs: list[Any]) -> None:
        """Append, of a beam too, though its tokens are restated and may now be others."""
        known = output._last_logprobs_len = len(output.logprobs)
        output.logprobs = output.logprobs + log_probs[known:]

    def _note_end(self, output: Any, reason: Finish) -> None:
        output.finish_reason = REASONS.get(reason)
        if reason is not Finish.STOP_WORDS:
            return
        for name, word in self._params._get_stop_reasons_and_words():
            if output.token_ids[len(output.token_ids) - len(word) :] == word:
                output.stop_reason = name
                if not self._params.include_stop_str_in_output:
                    output.token_ids = output.token_ids[: len(output.token_ids) - len(word)]
                return

    def _write_texts(self, decode: Callable[[list[int]], str]) -> None:
        """Write the texts of the tokens, and end the request at a stop string, whose tokens stay."""
        names = [name for name, _ in self._params._get_stop_reasons_and_words() if isinstance(name, str)]
        for output in self.outputs:
            output._last_text_len = len(output.text)
            output.text = decode(output.token_ids)
            for name in names:
                if name in output.text:
                    end = output.text.index(name) + len(name) * self._params.include_stop_str_in_output
                    output.text, output.finish_reason, output.stop_reason = output.text[:end], "stop", name
                    self.abort()
                    self._is_done = True
                    break


class CompletionOutput:
    """One sequence, or one beam. The `_diff`s are what the last step brought."""

    token_ids: list[int]
    text: str
    logprobs: list[Any]
    _last_token_ids_len: int
    _last_logprobs_len: int
    _last_text_len: int

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> list[Any]:
        return self.logprobs[self._last_logprobs_len :]

    @property
    def text_diff(self) -> str:
        return self.text[self._last_text_len :]


def _or_least(value: float | None) -> float:
    return float("-inf") if value is None else value
