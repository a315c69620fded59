"""Answers of completions. Sources: OpenAI's API reference, and vLLM's fields."""

from typing import Any

from lmi.apis.base.body import Parsed
from lmi.apis.base.formatters import text_of
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.apis.openai.base_formatter import (
    OpenAIFormatter,
    OpenAILines,
    OpenAIStream,
    OpenAIWhole,
)
from lmi.apis.openai.log_probs import log_prob, name_of
from lmi.apis.openai.text_offsets import offsets_in
from lmi.types import Delta, Token


class Completion(OpenAIFormatter):
    """Writes the choices of completions, whole or streamed."""

    kind = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        # The characters of each choice so far, by index. They are counted if it has log-probs.
        self._num_chars: dict[int, int] = {}

    def _new_fields(self, number: int, delta: Delta) -> dict[str, Any]:
        """Return what a Delta adds to its choice. The first one adds the prompt, if it is asked
        for.
        """
        is_first = delta.index not in self._num_chars
        text = text_of(delta.tokens) if self._format.is_answer_wanted else ""
        if is_first:
            self._num_chars[delta.index] = 0
            if self._request.return_full_text:
                text = delta.prompt + text

        log_probs = None
        if self._format.has_log_probs:
            log_probs = self._log_probs(delta, is_first)

        fields = {
            "index": number,
            "text": text,
            "logprobs": log_probs,
            "finish_reason": delta.finish_reason and self._reason(delta.finish_reason),
            **self._ids(delta),
        }
        if is_first:
            fields |= self._prompt_ids(delta)

        return fields

    def _log_probs(self, delta: Delta, is_first: bool) -> dict[str, Any]:
        """Return four lists with an item for each token. An offset is the place in the choice's
        text where the token begins, also if it adds no text.
        """
        tokens = self._shown(delta)
        offsets: list[int] = []
        if is_first and self._request.return_full_text:
            prompt_tokens = self._prefill(delta)
            is_truncated = self._request.truncate is not None
            is_end_cut = is_truncated and self._request.truncation_side == "right"
            offsets += offsets_in(delta.prompt, prompt_tokens, is_end_cut=is_end_cut)
            self._num_chars[delta.index] = len(delta.prompt)
            tokens = [*prompt_tokens, *tokens]

        for token in tokens[len(offsets) :]:
            offsets.append(self._num_chars[delta.index])
            self._num_chars[delta.index] += len(token.spelling)

        return {
            "tokens": [name_of(token, self._format) for token in tokens],
            "token_logprobs": [log_prob(token) for token in tokens],
            "top_logprobs": [self._top_log_probs(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top_log_probs(self, token: Token) -> dict[str, float | None] | None:
        """Return the log-probs of the token itself and then of the best in its place, by name, as
        in vLLM. Of several with one name the first counts.
        """
        if token.log_prob is None:
            return None

        log_probs: dict[str, float | None] = {}
        for candidate in (token, *(token.top or ())):
            log_probs.setdefault(name_of(candidate, self._format), log_prob(candidate))

        return log_probs


class CompletionWhole(Completion, OpenAIWhole):
    """Writes a completion as one object."""

    def _choice(self, number: int, whole: Delta) -> dict[str, Any]:
        return self._new_fields(number, whole) | self._prompt_fields(whole)


class CompletionStream(Completion, OpenAIStream):
    """Writes a completion as server-sent events."""

    def _choices(self, delta: Delta) -> list[dict[str, Any]]:
        choice = self._new_fields(delta.index, delta)
        has_log_probs = choice["logprobs"] and delta.tokens
        if (
            choice["text"]
            or has_log_probs
            or delta.finish_reason is not None
            or self._format.has_token_ids
        ):
            return [choice]

        return []


class CompletionLines(OpenAILines, CompletionStream):
    """Writes a completion as lines."""
