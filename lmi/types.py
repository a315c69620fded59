"""The types of the front end: a schema turns bytes into a GenerationRequest, a formatter turns
Deltas into bytes.

Where a word is needed it is that of the LMI API.
"""

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from sys import getsizeof
from typing import Any, Self, TypeVar

import msgspec
from msgspec.structs import replace

from lmi.executor import (
    GuidedDecodingParams,
    PoolingParams,
    RequestPerfMetrics,
    SamplingConfig,
    Tensor,
)
from lmi.executor.request import DEFAULT_PRIORITY


class AnswerEnd(enum.StrEnum):
    """Why an answer ended, in the words of the LMI API. Other APIs translate them."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


class OutputFormat(enum.StrEnum):
    """The framing of an answer: one JSON value, JSON lines or server-sent events."""

    JSON = "json"
    JSONLINES = "jsonlines"
    SSE = "sse"


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The format of the answer to a request. It is known before the parameters are checked, so that
    errors can use it.

    An API with more to say has a subclass in its schema. Fields that depend on the parameters are
    set when those are checked.
    """

    output_format: OutputFormat = OutputFormat.JSON
    # Whether the answer holds more than its text.
    details: bool = False
    # This request's names for fields of the engines' contract, in addition to those of the API.
    field_names: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def is_streamed(self) -> bool:
        """Whether the body is a sequence of records."""
        return self.output_format is not OutputFormat.JSON

    @property
    def holds_fields(self) -> bool:
        """Whether objects of the request's body are part of it, as tools are."""
        return False


Format = TypeVar("Format", bound=AnswerFormat)


class Image(msgspec.Struct, frozen=True):
    """A file in the content of a message."""

    data: bytes
    # Where its part stands in the request, as errors name it, and the type of that part.
    place: str
    kind: str


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation for the model's chat template, in the words of transformers."""

    # The content of each is a text, or a list of texts and Images in their order.
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    # Further names for the template (`enable_thinking` …).
    variables: Mapping[str, Any] = msgspec.field(default_factory=dict)
    # Whether the prompt ends where the model's next answer begins.
    add_generation_prompt: bool = True
    # Whether the prompt ends where the content of the last message does.
    continue_final_message: bool = False

    @property
    def images(self) -> list[Image]:
        images = []
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, list):
                images += [part for part in content if isinstance(part, Image)]

        return images

    @property
    def texts(self) -> Iterator[str]:
        """The texts of the messages, in their order."""
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, str):
                yield content
            elif isinstance(content, list):
                for part in content:
                    if isinstance(part, str):
                        yield part

    def without_messages(self) -> Self:
        """The chat for what needs to know only that it is one."""
        return replace(self, messages=(), tools=None, variables={})


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """Where a request comes from, for the queue in front of the engine. Times are those of
    time.monotonic().
    """

    # Requests of one client share its part of the engine.
    client: str = ""
    # Since when its client waits.
    arrived_s: float | None = None
    deadline_s: float = math.inf
    # Whether it belongs to a body of which another request was let in. Then it waits for as long as
    # its deadline lets it.
    is_further: bool = False
    # When the server had all of it. From then on counts what it waits for a place, in all queues
    # together.
    received_s: float | None = None


class WaitStatus(msgspec.Struct, frozen=True, array_like=True):
    """How far an answer is that has no token yet."""

    num_prompt_tokens: int = 0
    # How many tokens of the prompt are computed, and how many of those were cached. None where the
    # engine does not know.
    num_computed_tokens: int | None = None
    num_cached_tokens: int | None = None
    # 1 for the request that starts next, 0 for one that runs. None if nobody has said it.
    queue_position: int | None = None
    # The time until its first token, as the engine's queue expects it. None without a known speed.
    wait_s: float | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request: what to generate and how, in one vocabulary for every API."""

    # The prompt is this text, unless ids or a chat are given.
    prompt: str = ""
    prompt_token_ids: tuple[int, ...] | None = None
    chat: Chat | None = None
    # With None they are added to a prompt, and not to a chat, whose template writes them.
    add_special_tokens: bool | None = None
    # The most tokens of the prompt. What is over at the side, left or right, is cut off.
    truncate: int | None = None
    truncation_side: str = "left"

    # Only values with an effect: "off" values are None.
    sampling: SamplingConfig
    # The fields of `sampling` that the model's defaults have filled. An engine that lacks one does
    # without.
    defaulted: frozenset[str] = frozenset()
    guided_decoding: GuidedDecodingParams | None = None
    # Pairs of a token id and what is added to its logit.
    token_biases: tuple[tuple[int, float], ...] = ()
    bad_sequences: tuple[str, ...] = ()
    logits_post_processor_name: str | None = None

    # With None the answer may fill the context.
    max_new_tokens: int | None
    # Whether the request is refused where these have no room there. Else its answer is shorter.
    needs_full_room: bool = False
    stop_sequences: tuple[str, ...] = ()
    # They end the answer like a stop string.
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    # Whether the answer is wanted piece by piece.
    is_streaming: bool = False
    return_full_text: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    # Whether the log-probs of the generated tokens are wanted, which cost the engine time.
    needs_log_probs: bool = False
    # How many of the best tokens are told with each token of the answer.
    num_top_log_probs: int | None = None
    # The same of the prompt, whose tokens the answer shows unless it is None.
    num_prompt_log_probs: int | None = None
    # With it the answer is the embedding of the prompt, and no text.
    pooling: PoolingParams | None = None

    adapter: str | None = None
    # All requests of a session go to one engine.
    session: str | None = None
    # Prompts with different salts share nothing in an engine's cache, so no user can find out by
    # its time what another one asked. Without one they share whole blocks.
    cache_salt: str | None = None
    # Requests with one key go to one engine where loads allow it, since their prompts are alike.
    prompt_cache_key: str | None = None
    # The numbers are the contract's: 1 is the most urgent.
    priority: float = DEFAULT_PRIORITY
    origin: Origin = Origin()

    @property
    def images(self) -> list[Image]:
        return [] if self.chat is None else self.chat.images

    @property
    def num_sequences(self) -> int:
        return self.sampling.num_return_sequences

    @property
    def prefill_details(self) -> bool:
        """Whether the answer shows the prompt's tokens."""
        return self.num_prompt_log_probs is not None

    @property
    def is_beam_search(self) -> bool:
        return self.sampling.beam_width > 1

    @property
    def num_prompt_chars(self) -> int:
        """The characters of its prompt, those of a chat without what the template adds."""
        if self.chat is None:
            return len(self.prompt)

        return sum(map(len, self.chat.texts))

    @property
    def num_bytes(self) -> int:
        """The bytes of memory that its texts, ids and images take."""
        texts = [self.prompt, *self.bad_sequences, *self.stop_sequences]
        if self.guided_decoding is not None:
            texts.append(self.guided_decoding.guide or "")

        if self.chat is not None:
            texts += self.chat.texts

        num_text_bytes = sum(getsizeof(text) for text in texts if text)
        num_id_bytes = getsizeof(0) * len(self.prompt_token_ids or ())
        num_image_bytes = sum(len(image.data) for image in self.images)
        return num_text_bytes + num_id_bytes + num_image_bytes

    def for_answer(self, *, keeps_prompt: bool = False) -> Self:
        """The request without what only its engine needs, for what writes the answer and holds it
        until the end.

        The prompt stays if the answer begins with it, or with `keeps_prompt`.
        """
        return replace(
            self,
            prompt=self.prompt if keeps_prompt or self.return_full_text else "",
            prompt_token_ids=None,
            chat=None if self.chat is None else self.chat.without_messages(),
            guided_decoding=None,
            bad_sequences=(),
            token_biases=(),
        )

    @property
    def num_places(self) -> int:
        """The number of sequences that the engine runs, each of which has a place in the queue."""
        return max(self.sampling.beam_width, self.num_sequences)


class Token(msgspec.Struct, gc=False):
    """One token of prompt or answer."""

    id: int
    # The text that this token completes. It is "" while part of a character or a possible stop
    # string is held back, so the texts of an answer's tokens concatenate to the whole text.
    text: str
    # None where it is unknown, as of the first token of a prompt.
    log_prob: float | None = None
    is_special: bool = False
    # The best tokens at its place.
    top: "list[Token] | None" = None
    # The text before the search for stop strings, None without a search.
    raw_text: str | None = None
    # What lists of log-probs call a token without text: one that has ended the answer, or a special
    # one that is not shown.
    name: str = ""

    @property
    def spelling(self) -> str:
        """The text that the token adds, even if it is held back for a stop string."""
        return self.text if self.raw_text is None else self.raw_text

    @property
    def spelled_name(self) -> str:
        """The token as lists of log-probs call it."""
        return self.spelling or self.name


class Delta(msgspec.Struct, gc=False):
    """The new tokens of one sequence from one engine Result.

    A sequence's whole text is the concatenation of its token texts. The pipeline raises an error
    inside a stream and never puts it into a Delta.

    - `finish_reason`: the last Delta of a sequence has one.
    - `stop_reason`: the stop string, or the id of the stop token, that ended the sequence.
    - `index`: the number of the sequence among those of all requests that are answered together:
      those of the first request, then those of the second.
    - `num_prompt_tokens`, `num_cached_tokens` (those of them that the engine did not compute
      again), `prefill` (the prompt's tokens, if the request asks for them): in the first Delta of a
      request's first sequence, which may come after those of others.
    - `prompt`: the text that the answer continues, in every Delta: as given, as rendered from a
      chat, or, if `return_full_text` asks for it, as decoded from ids.
    - `times`: those of the engine, which the last Delta may have.
    - `is_followed`: the next Delta has already arrived, so a writer may put both into one record.
    """

    tokens: list[Token]
    finish_reason: AnswerEnd | None = None
    prefill: list[Token] | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    prompt: str = ""
    index: int = 0
    prompt_token_ids: Sequence[int] = ()
    stop_reason: str | int | None = None
    times: RequestPerfMetrics | None = None
    is_followed: bool = False
    embedding: Tensor | None = None


class Answer(msgspec.Struct):
    """A whole sequence, joined from its Deltas."""

    text: str = ""
    tokens: list[Token] = msgspec.field(default_factory=list)
    finish_reason: AnswerEnd | None = None
    prefill: list[Token] | None = None
    num_prompt_tokens: int = 0

    @property
    def cum_log_prob(self) -> float:
        return sum(token.log_prob or 0.0 for token in self.tokens)

    def add(self, delta: Delta) -> None:
        self.tokens.extend(delta.tokens)
        self.finish_reason = delta.finish_reason
        self.num_prompt_tokens += delta.num_prompt_tokens
        if delta.prefill is not None:
            self.prefill = delta.prefill

        if delta.finish_reason is not None:
            self.text = "".join(token.text for token in self.tokens)


def ranked(request: GenerationRequest, answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers to a request, the best first. A beam search has ranked its own, with a
    penalty for length.

    Others are ranked by probability. Equal ones stay in order.
    """
    if request.is_beam_search:
        return list(answers)

    return sorted(answers, key=lambda answer: -answer.cum_log_prob)
