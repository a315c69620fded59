"""The whole way of a request: encode, check, submit, decode, stop, cancel.

    GenerationRequest --tokenizer--> Request ==engine socket==> Result --answer text--> Delta

Every sequence ends with a Delta that has a finish reason, or the request ends with an LmiError.
However it ends, its stream is closed, which sends Cancel unless the engine has finished.

The way has two halves. `prepare` turns requests into frames for the engine, and frees them: of a
long one only the frame is left, and what the answer needs. `generate` sends the frames.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from msgspec.structs import replace

from lmi import errors
from lmi.capabilities import check_request, fitted
from lmi.engine.client import Engines, ResponseStream
from lmi.engine.misses import BeginningWatch
from lmi.executor import EngineInfo, LoraConfig, OutputConfig, Request, Result
from lmi.sequences import KeptRequest, Sequences
from lmi.settings.config import ModelConfig
from lmi.text.tokenizer import NUM_THREADS, Tokenizer, truncated
from lmi.types import Delta, GenerationRequest

# It takes a Delta. What it returns is awaited before the next one is passed to it.
DeltaTaker = Callable[[Delta], Awaitable[None] | None]
# Words by their token ids.
Words = Sequence[tuple[int, ...]]

# Of prompts with more characters, only a few are prepared at the same time.
LONG_CHARS = 64 << 10
# The message with which the tasks of an answer that has ended are cancelled.
OVER = "the answer is over"


class Pipeline:
    """Turns requests into Deltas, for every API and every engine."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        engines: Engines,
        model: ModelConfig,
        *,
        shares_prompts: bool = True,
    ) -> None:
        """Make the pipeline of a model with these settings. Raises ModelUnusable or
        BadConfiguration if its chat template cannot be used.

        `shares_prompts` says whether engines cache prompts.
        """

        from lmi.chats.prompts import ChatPrompts

        self.tokenizer = tokenizer
        self._engines = engines
        self.chats = ChatPrompts.of(model, tokenizer)
        self._prefix_cache_scope = model.prefix_cache_scope
        self._beginnings = BeginningWatch() if shares_prompts else None
        self._max_new_tokens = model.generation_defaults.server_max_new_tokens
        self._long_prompts = asyncio.Semaphore(NUM_THREADS)

    async def prepare(self, requests: Sequence[GenerationRequest]) -> list[Sequences]:
        """Encode the requests of an answer, and check them. Raises LmiError if one is refused.

        A caller that keeps no request has each freed as soon as it is encoded.

        Requests share cached prompts if they have the same salt: the `cache_salt` of their clients
        or, with the scope `request`, a salt of this answer alone. An API key is no salt: clients
        with a key share whole blocks, as clients without a salt do.
        """
        if self._prefix_cache_scope == "request":
            salt = secrets.token_hex(16)
            requests = [replace(request, cache_salt=salt) for request in requests]

        # Nearly always all requests have the same list.
        spellings: dict[Sequence[str], Words] = {}
        for words in {request.bad_sequences for request in requests}:
            spellings[words] = await self.tokenizer.spellings_async(words)

        preparations = self._preparations(requests, spellings)
        # From here on each request belongs to its preparation.
        del requests

        if len(preparations) == 1:
            return [await preparations.pop()]

        return await asyncio.gather(*preparations)

    async def generate(
        self,
        prepared: Sequence[Sequences],
        take: DeltaTaker,
        streams: list[ResponseStream] | None = None,
    ) -> None:
        """Send what `prepare` has returned, and pass the Deltas of the answer to `take`. Raises
        LmiError, before the first Delta or after some.

        Requests that are answered together run concurrently, and the first failure ends the whole
        answer. The stream of each request that an engine gets is added to `streams`.
        """
        if streams is None:
            streams = []

        if len(prepared) == 1:
            await self._generate(prepared[0], take, streams)
        else:
            await self._generate_all(prepared, take, streams)

    def _preparations(
        self, requests: Sequence[GenerationRequest], spellings: Mapping[Sequence[str], Words]
    ) -> list[Coroutine[Any, Any, Sequences]]:
        """Return a coroutine that prepares each request."""
        preparations = []
        first_index = 0
        for request in requests:
            bad_words = spellings[request.bad_sequences]
            preparations.append(self._prepare(request, bad_words, first_index))
            first_index += request.num_sequences

        return preparations

    async def _prepare(
        self, request: GenerationRequest, bad_words: Words, first_index: int
    ) -> Sequences:
        """Encode a request and check it against what the engine can do. Raises InvalidRequest, or
        Unavailable if no engine is ready.
        """
        info = await self._engines.ready(request.adapter)
        if request.images and not info.capabilities.max_images:
            image = request.images[0]
            kind = errors.shorten(image.kind)
            raise errors.Unsupported(
                image.place, f"messages are text alone, given a part of type {kind}"
            )

        if request.is_beam_search and request.guided_decoding is not None:
            raise errors.Unsupported("guided_decoding_params", "a beam search follows no structure")

        async with self._turn_of(request):
            prompt, prompt_ids = await self.encode(request, info)
            submitted = self._engine_request(request, prompt_ids, bad_words, info)
            check_request(submitted, info)
            if request.needs_full_room and request.max_new_tokens is not None:
                check_room(len(prompt_ids), request.max_new_tokens, info)

            submission = self._engines.encoded(submitted, request.origin)
            kept = KeptRequest.of(request, prompt, submitted.input_token_ids, submission)
            return Sequences(self.tokenizer, kept, submission, first_index)

    def _turn_of(self, request: GenerationRequest) -> AbstractAsyncContextManager[object]:
        """Return what a prompt has to enter before it is prepared. A long one waits there for its
        turn: while a prompt of a megabyte is encoded, it takes many megabytes.
        """
        if request.num_prompt_chars > LONG_CHARS:
            return self._long_prompts

        return nullcontext()

    async def _generate(
        self, sequences: Sequences, take: DeltaTaker, streams: list[ResponseStream]
    ) -> None:
        """Send one request, and pass its Deltas to `take` until it ends.

        If its engine is lost or refuses it before the first Result, another engine gets it, but
        only once: a request may be what ends an engine.
        """
        request = sequences.request
        submission = sequences.submission
        stream = self._engines.send(submission, request.session, request.prompt_cache_key)
        streams.append(stream)

        def take_result(result: Result) -> Awaitable[None] | None:
            delta = sequences.read(result)
            if delta is not None and delta.num_prompt_tokens and self._beginnings is not None:
                prompt_ids = delta.prompt_token_ids
                self._beginnings.note(prompt_ids, submission.owner, delta.num_cached_tokens)

            if not sequences.open_texts:
                stream.close()

            return None if delta is None else take(delta)

        async def take_beams(result: Result) -> None:
            for delta in sequences.read_beams(result):
                pause = take(delta)
                if pause is not None:
                    await pause

        take_any = take_beams if request.is_beam_search else take_result
        try:
            try:
                await stream.forward(take_any)
            except (errors.EngineLost, errors.Overloaded):
                next_stream = None
                if not stream.has_begun:
                    next_stream = self._engines.send_elsewhere(stream)

                if next_stream is None:
                    raise

                stream = next_stream
                streams.append(stream)
                await stream.forward(take_any)
        except asyncio.CancelledError as error:
            # Unless another request of this answer has ended it, its client has left.
            stream.close(has_left=error.args != (OVER,))
            raise
        finally:
            stream.close()

    async def _generate_all(
        self, prepared: Sequence[Sequences], take: DeltaTaker, streams: list[ResponseStream]
    ) -> None:
        """Generate the answers of several requests at once, and pass their Deltas to `take` in the
        order in which they arrive. Each says whether another one has arrived behind it.
        """
        arrived: asyncio.Queue[Delta | Exception] = asyncio.Queue()

        async def collect(sequences: Sequences) -> None:
            try:
                await self._generate(sequences, arrived.put_nowait, streams)
            except Exception as error:
                arrived.put_nowait(error)

        num_open = sum(len(sequences.open_texts) for sequences in prepared)
        tasks = [asyncio.create_task(collect(sequences)) for sequences in prepared]
        following: Delta | Exception | None = None
        reason: tuple[object, ...] = (OVER,)
        try:
            while num_open:
                delta = following or await arrived.get()
                if isinstance(delta, Exception):
                    raise delta

                following = None if arrived.empty() else arrived.get_nowait()
                delta.is_followed = isinstance(following, Delta)
                num_open -= delta.finish_reason is not None
                pause = take(delta)
                if pause is not None:
                    await pause
        except asyncio.CancelledError as error:
            # The arguments are empty if the client has left.
            reason = error.args
            raise
        finally:
            for task in tasks:
                task.cancel(*reason)

            await asyncio.gather(*tasks, return_exceptions=True)

    async def encode(self, request: GenerationRequest, info: EngineInfo) -> tuple[str, list[int]]:
        """Return the text that the answer continues, and its token ids.

        Raises InvalidRequest if they leave no room for an answer, or are none.
        """
        if request.prompt_token_ids is not None:
            prompt_ids = list(request.prompt_token_ids)
            ids = truncated(prompt_ids, request.truncate, request.truncation_side)
            text = self.tokenizer.decode(ids) if request.return_full_text else request.prompt
            return text, ids

        text, forged = await self.text_of(request, info.image_placeholder)
        ids = await self.tokenizer.encode_prompt(
            text,
            # One token is left for the answer.
            max_tokens=info.max_sequence_length - 1,
            truncate=request.truncate,
            truncation_side=request.truncation_side,
            add_special_tokens=adds_special_tokens(request),
            forged=forged,
        )
        return text, ids

    async def text_of(
        self, request: GenerationRequest, image_placeholder: str = ""
    ) -> tuple[str, list[int]]:
        """Return the text of a prompt, and the places in it where the content of a chat spells
        special tokens.
        """
        if request.chat is None:
            return request.prompt, []

        if self.chats is None:
            raise errors.Unsupported(
                "messages", "this model has no chat template, and option.chat_template gives none"
            )

        return await asyncio.to_thread(self.chats.render, request.chat, image_placeholder)

    def _engine_request(
        self, request: GenerationRequest, prompt_ids: list[int], bad_words: Words, info: EngineInfo
    ) -> Request:
        """Build the request for the engine. Its `max_tokens` is bounded by the room that the prompt
        leaves in the context, and by the limit that all requests have.
        """
        room = max(1, info.max_sequence_length - len(prompt_ids))
        limits = (room, request.max_new_tokens, self._max_new_tokens)

        return Request(
            input_token_ids=tuple(prompt_ids),
            max_tokens=min(limit for limit in limits if limit is not None),
            streaming=comes_in_parts(request),
            sampling_config=fitted(request.sampling, request.defaulted, info.capabilities),
            output_config=OutputConfig(
                return_log_probs=request.needs_log_probs,
                num_top_log_probs=request.num_top_log_probs or 0,
                num_prompt_log_probs=request.num_prompt_log_probs,
                return_perf_metrics=info.capabilities.perf_metrics,
            ),
            end_ids=self.tokenizer.eos_ids,
            ignore_eos=request.ignore_eos,
            stop_words=tuple((token_id,) for token_id in request.stop_token_ids),
            bad_words=tuple(bad_words),
            embedding_bias=request.token_biases,
            guided_decoding_params=request.guided_decoding,
            lora_config=LoraConfig(request.adapter) if request.adapter else None,
            logits_post_processor_name=request.logits_post_processor_name,
            priority=request.priority,
            cache_salt=request.cache_salt,
            pooling_params=request.pooling,
            images=tuple(image.data for image in request.images),
        )


def check_room(num_prompt_tokens: int, max_new_tokens: int, info: EngineInfo) -> None:
    """Raise InvalidParameter if the context has no room for the answer, in words that clients of
    TGI look for.
    """
    context = info.max_sequence_length
    room = context - num_prompt_tokens
    if max_new_tokens > room:
        rule = f"at most {room} here (`inputs` tokens + `max_new_tokens` must be <= {context})"
        raise errors.InvalidParameter("max_tokens", rule, max_new_tokens)


def adds_special_tokens(request: GenerationRequest) -> bool:
    """Whether the tokenizer adds what begins every text, such as `<s>`. The template of a chat
    writes that itself.
    """
    if request.add_special_tokens is None:
        return request.chat is None

    return request.add_special_tokens


def comes_in_parts(request: GenerationRequest) -> bool:
    """Whether the engine sends tokens as they come. For an answer that is sent whole it does so too
    if there are stop strings, which are found here.
    """
    return request.is_streaming or (bool(request.stop_sequences) and not request.is_beam_search)
