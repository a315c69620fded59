"""The whole way of a request on one page: encode, check, submit, decode, stop, cancel.

    GenerationRequest --tokenizer--> Request ==engine socket==> Result --answer text--> Delta

Nothing here knows a wire format or a device. A bad request is refused before it is sent, so it can never hurt its
neighbours; every request ends with a Delta that has a finish reason or with an LmiError; Cancel is sent from the one
`finally` below, whoever gave up.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from lmi.capabilities import check_request
from lmi.engine.client import Engines
from lmi.errors import DeadlineExceeded, EngineLost, InvalidParameter
from lmi.executor import EngineInfo, LoraConfig, OutputConfig, PromptLogProb, Request, Result, TokenLogProb
from lmi.executor import FinishReason as EngineReason
from lmi.text.answer import AnswerText
from lmi.text.tokenizer import Tokenizer
from lmi.types import Delta, FinishReason, GenerationRequest, Token

REASONS = {
    EngineReason.NOT_FINISHED: None,
    EngineReason.END_ID: FinishReason.EOS_TOKEN,
    EngineReason.STOP_WORDS: FinishReason.STOP_SEQUENCE,
    EngineReason.LENGTH: FinishReason.LENGTH,
}


class Pipeline:
    """Turns requests into streams of Deltas, for every door and every engine."""

    def __init__(self, tokenizer: Tokenizer, engines: Engines) -> None:
        self._tokenizer = tokenizer
        self._engines = engines

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta]:
        """The answer, piece by piece. Raises LmiError, before the first Delta or after some."""
        info = await self._engines.ready()
        prompt_ids = await self._encode(request, info)
        submitted = self._engine_request(request, prompt_ids, info)
        check_request(submitted, info)
        stream = self._engines.submit(submitted)
        answer = AnswerText(self._tokenizer, prompt_ids, request)
        try:
            delta = self._first_delta(answer, await stream.next(), prompt_ids, request)
            yield delta
            while delta.finish_reason is None:
                delta = self._delta(answer, await stream.next())
                yield delta
        finally:
            stream.close()

    async def _encode(self, request: GenerationRequest, info: EngineInfo) -> list[int]:
        """The prompt's token ids. Raises InvalidParameter for a prompt that alone is too long."""
        if request.truncate is None:
            self._tokenizer.check_length(request.prompt, info.max_sequence_length)
        ids = await self._tokenizer.encode_async(request.prompt)
        if not ids:
            raise InvalidParameter("inputs", "a text of at least one token", request.prompt)
        return ids if request.truncate is None else ids[-request.truncate :]

    def _engine_request(self, request: GenerationRequest, prompt_ids: list[int], info: EngineInfo) -> Request:
        """In the engine's words. An answer that would outgrow the context is shortened to what fits."""
        room = max(1, info.max_sequence_length - len(prompt_ids))
        return Request(
            input_token_ids=tuple(prompt_ids),
            max_tokens=min(request.max_new_tokens, room),
            streaming=request.is_streaming or bool(request.stop_sequences),
            sampling_config=request.sampling,
            output_config=output_config(request),
            end_ids=self._tokenizer.eos_ids,
            ignore_eos=request.ignore_eos,
            stop_words=tuple((token_id,) for token_id in request.stop_token_ids),
            bad_words=tuple(word for text in request.bad_sequences for word in self._tokenizer.encode_word(text)),
            guided_decoding_params=request.guided_decoding,
            lora_config=LoraConfig(request.adapter) if request.adapter else None,
        )

    def _first_delta(
        self, answer: AnswerText, result: Result, prompt_ids: list[int], request: GenerationRequest
    ) -> Delta:
        delta = self._delta(answer, result)
        if request.prefill_details and result.prompt_log_probs is not None:
            delta.prefill = [
                self._token(token_id, log_prob)
                for token_id, log_prob in zip(prompt_ids, result.prompt_log_probs, strict=True)
            ]
        return delta

    def _delta(self, answer: AnswerText, result: Result) -> Delta:
        """What one Result says, as text. A stop string ends the answer wherever in it it was found."""
        engine_reason = result.finish_reasons[0]
        if engine_reason is EngineReason.TIMED_OUT:
            raise DeadlineExceeded("the engine's time for this request ran out")
        if engine_reason is EngineReason.CANCELLED:
            raise EngineLost("the engine gave up this request because it is shutting down")
        reason = REASONS[engine_reason]
        tokens = answer.feed(
            result.output_token_ids[0],
            result.log_probs[0] if result.log_probs else None,
            result.top_log_probs[0] if result.top_log_probs else None,
            engine_reason,
        )
        return Delta(tokens, FinishReason.STOP_SEQUENCE if answer.is_stopped else reason)

    def _token(self, token_id: int, position: PromptLogProb) -> Token:
        token = self._alternative(TokenLogProb(token_id, 0.0))
        token.log_prob = position.log_prob
        token.top = [self._alternative(other) for other in position.top] or None
        return token

    def _alternative(self, other: TokenLogProb) -> Token:
        text, is_special = self._tokenizer.token_text(other.token_id), other.token_id in self._tokenizer.special_ids
        return Token(other.token_id, text, other.log_prob, is_special)


def output_config(request: GenerationRequest) -> OutputConfig:
    """Log-probs cost an engine time, so they are asked for only where the answer shows them."""
    shows_tokens = request.is_streaming or request.details
    num_prompt = request.num_prompt_log_probs
    return OutputConfig(
        return_log_probs=shows_tokens,
        num_top_log_probs=(request.num_top_log_probs or 0) if shows_tokens else 0,
        num_prompt_log_probs=0 if num_prompt is None and request.prefill_details else num_prompt,
    )
