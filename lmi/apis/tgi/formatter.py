"""The answers of TGI's API, whole and as a stream, byte for byte as Text Generation Inference 3.3
writes them. The most probable of several sequences is the answer.
"""

from typing import Any

from orjson import dumps

from lmi.apis.base.errors import ErrorFields
from lmi.apis.base.formatters import NO_TOKEN, StepFormatter, WholeFormatter
from lmi.apis.base.media_types import SSE
from lmi.apis.tgi.schema import TgiFormat
from lmi.types import Answer, GenerationRequest, Token, WaitStatus, ranked


class TgiWhole(WholeFormatter[TgiFormat]):
    """Writes the best sequence as one object, and the others among its details."""

    def _whole(self, answers: list[Answer]) -> bytes:
        best, *lesser_answers = ranked(self._request, answers)
        whole: dict[str, Any] = {"generated_text": self._full_text(best.text)}
        if self._format.details:
            whole["details"] = self._sequence_details(best)
            if lesser_answers:
                whole["details"]["best_of_sequences"] = [
                    self._lesser_sequence(answer) for answer in lesser_answers
                ]

        return dumps([whole] if self._format.is_list else whole)

    def _lesser_sequence(self, answer: Answer) -> dict[str, Any]:
        text = self._full_text(answer.text)
        return {"generated_text": text} | self._sequence_details(answer)

    def _sequence_details(self, answer: Answer) -> dict[str, Any]:
        # All sequences are told the prompt's tokens, which come with the first one.
        prompt_tokens = self._answers[0].prefill or ()
        details = _end(self._request, answer, self._place_of(answer))
        details["prefill"] = [_prompt_token(token) for token in prompt_tokens]
        details["tokens"] = [_token(token) for token in answer.tokens]
        if self._request.num_top_log_probs:
            details["top_tokens"] = [_top_tokens(token) for token in answer.tokens]

        return details

    def _place_of(self, answer: Answer) -> int:
        """Return the place that an answer had before the answers were ranked."""
        for place, candidate in enumerate(self._answers):
            if candidate is answer:
                return place

        raise AssertionError("an answer of another request")

    @staticmethod
    def error(error: ErrorFields) -> bytes:
        return dumps({"error": error.message, "error_type": error.kind})


class TgiStream(StepFormatter[TgiFormat]):
    """Writes a server-sent event for each step."""

    media_type = SSE
    opening = b"data:"
    closing = b"\n\n"
    begins_early = True

    def waiting(self, status: WaitStatus, waited_s: float) -> list[bytes]:
        """Return the comment by which TGI keeps a stream alive: its clients pass it over."""
        return [b":\n\n"]

    def _step(self, token: Token) -> bytes:
        answer = self._answer
        index = len(answer.tokens) + (token is NO_TOKEN)
        event: dict[str, Any] = {"index": index, "token": _token(token)}
        if self._request.num_top_log_probs:
            event["top_tokens"] = _top_tokens(token)

        event["generated_text"] = None
        event["details"] = None
        if answer.finish_reason is not None:
            event["generated_text"] = self._full_text(answer.text)
            if self._format.details:
                details = _end(self._request, answer, place=0)
                event["details"] = details | {"input_length": answer.num_prompt_tokens}

        return self.record(dumps(event))

    @classmethod
    def error(cls, error: ErrorFields) -> bytes:
        return cls.record(TgiWhole.error(error))


def _end(request: GenerationRequest, answer: Answer, place: int) -> dict[str, Any]:
    """Return how an answer ended. The one at this `place` among those of a request has the
    request's seed + `place`.
    """
    seed = request.sampling.seed
    return {
        "finish_reason": answer.finish_reason,
        "generated_tokens": len(answer.tokens),
        "seed": None if seed is None else seed + place,
    }


def _token(token: Token) -> dict[str, Any]:
    return _prompt_token(token) | {"special": token.is_special}


def _top_tokens(token: Token) -> list[dict[str, Any]]:
    return [_token(candidate) for candidate in token.top or ()]


def _prompt_token(token: Token) -> dict[str, Any]:
    return {"id": token.id, "text": token.text, "logprob": token.log_prob}
