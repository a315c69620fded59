"""The arguments of formatters: the request, and the answer so far."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Token:
    """One token. `text` is the text that it added to the answer."""

    id: int | list[int]
    text: str
    log_prob: float | None = None
    special_token: bool | None = None
    error_msg: str | None = None

    def as_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"id": self.id, "text": self.text, "log_prob": self.log_prob}
        if self.special_token:
            fields["special_token"] = True

        if self.error_msg is not None:
            fields["error_msg"] = self.error_msg

        return fields

    def as_tgi_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"id": self.id, "text": self.text, "logprob": self.log_prob}
        if self.special_token:
            fields["special"] = True

        return fields


@dataclass
class Sequence:
    """One answer: its tokens so far, read one by one with `get_next_token`."""

    tokens: list[Token] = field(default_factory=list)
    top_tokens: list[list[Token]] = field(default_factory=list)
    cumulative_log_prob: float = 0.0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    _next: int = 0

    @property
    def num_read(self) -> int:
        """The number of tokens that were read. The reference does not have it."""
        return self._next

    def skip_tokens(self) -> None:
        """Count all tokens as read. The reference does not have it."""
        self._next = len(self.tokens)

    def has_next_token(self) -> bool:
        return self._next < len(self.tokens)

    def get_next_token(self) -> tuple[Token | None, bool, bool]:
        """Return the next token, and whether it is the answer's first and its last."""
        if not self.has_next_token():
            return None, False, self.finish_reason is not None

        token = self.tokens[self._next]
        is_first = self._next == 0
        self._next += 1
        is_last = self.finish_reason is not None and not self.has_next_token()
        return token, is_first, is_last

    def get_last_token(self) -> Token | None:
        if self.finish_reason is None or not self.tokens:
            return None

        return self.tokens[-1]

    def has_next_top_tokens(self) -> bool:
        return self._next < len(self.top_tokens)

    def get_next_top_tokens(self) -> list[Token]:
        """Return the top tokens at the position of the token that was read last."""
        position = self._next - 1
        if not 0 <= position < len(self.top_tokens):
            return []

        return self.top_tokens[position]


@dataclass
class RequestInput:
    """A request. The engine gets `server_parameters`, or `parameters` if they are None."""

    request_id: int | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    server_parameters: dict[str, Any] | None = None
    output_formatter: Callable[..., Any] | str | None = None
    tgi_compat: bool = False


@dataclass
class TextInput(RequestInput):
    input_text: str | list[int] | None = None
    input_ids: list[int] = field(default_factory=list)
    adapters: Any = None
    tokenizer: Any = None
    found_adapters: bool = False

    def prompt_tokens_length(self) -> int:
        return len(self.input_ids)


@dataclass
class RequestOutput:
    request_id: int
    input: RequestInput
    finished: bool = False


@dataclass
class TextGenerationOutput(RequestOutput):
    """The answer so far. `sequences` has its sequences by their index.

    `prompt_tokens_details` is set if the request asked for it.
    """

    sequences: dict[int, Sequence] = field(default_factory=dict)
    best_sequence_index: int = 0
    prompt_tokens_details: list[Token] = field(default_factory=list)
    other_sequences_indices: list[int] = field(default_factory=list)
