"""The answers that an output formatter of user code writes, by tokens or with responses.

Its parameters decide which (README.md, "Formatters"). Source: the reference's guides to output
formatters, of v0.28 and of today.
"""

from __future__ import annotations

import copy
import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lmi import types
from lmi.user_code.calls import Feed, Open
from lmi.user_code.functions import accepted, call, first_parameter, num_required
from lmi.user_code.outputs import as_bytes

if TYPE_CHECKING:
    from djl_python.request_io import Token

JSON = "application/json"
JSONLINES = "application/jsonlines"
# A formatter with so many parameters is called for each token: with the token, whether it is the
# first and the last, details, the text so far, and the id of the request.
NUM_TOKEN_PARAMETERS = 6
NO_TOKEN = types.Token(-1, "", is_special=True)
BODY_FIELDS = ("inputs", "parameters", "stream")


class TokenAnswer:
    """One answer by a formatter that reads tokens, all that are there or one in each call."""

    # The response has no content type, as in the reference.
    media_type = ""

    def __init__(
        self, formatter: Callable[..., Any], opened: Open, request: Any, model_name: str
    ) -> None:
        from djl_python.request_io import Sequence, TextGenerationOutput

        self._formatter = formatter
        self._opened = opened
        self._request = request
        self._is_called_by_token = num_required(formatter) == NUM_TOKEN_PARAMETERS
        self._sequence = Sequence()
        self._output = TextGenerationOutput(
            request.request_id, request, sequences={0: self._sequence}
        )

    @property
    def is_over(self) -> bool:
        return self._output.finished

    def feed(self, step: Feed) -> bytes:
        """Add the step to what the formatter may read. Returns what it writes."""
        sequence = self._sequence
        output = self._output
        if step.prompt_token_ids is not None and not getattr(self._request, "input_ids", None):
            self._request.input_ids = step.prompt_token_ids

        sequence.tokens += _tokens(step.tokens)
        if any(token.top is not None for token in step.tokens):
            for token in step.tokens:
                sequence.top_tokens.append(_tokens(token.top or ()))

        sequence.cumulative_log_prob += sum(token.log_prob or 0.0 for token in step.tokens)
        sequence.finish_reason = step.finish_reason
        sequence.stop_reason = step.stop_reason

        output.finished = step.finish_reason is not None
        output.prompt_tokens_details += _tokens(step.prefill or ())
        return self._write(step)

    def _write(self, step: Feed) -> bytes:
        """Call the formatter until all tokens are read."""
        sequence = self._sequence
        if self._output.finished and not step.tokens:
            sequence.tokens += _tokens([NO_TOKEN])

        pieces = []
        while sequence.has_next_token():
            num_read = sequence.num_read
            pieces.append(as_bytes(self._format()))
            # A formatter that read no token looks at whole answers.
            if sequence.num_read == num_read:
                sequence.skip_tokens()

        return b"".join(pieces)

    def _format(self) -> Any:
        if not self._is_called_by_token:
            return call(self._formatter, self._output)

        sequence = self._sequence
        token, is_first, is_last = sequence.get_next_token()
        tokens_so_far = sequence.tokens[: sequence.num_read]
        finish_reason = sequence.finish_reason if is_last else None
        details = self._details(tokens_so_far, finish_reason)
        details["tokens"] = _as_dicts(tokens_so_far)

        return call(
            self._formatter,
            token,
            is_first,
            is_last,
            details,
            _text(tokens_so_far),
            self._request.request_id,
        )

    def _details(self, tokens: list[Token], finish_reason: str | None) -> dict[str, Any]:
        return {
            "finish_reason": finish_reason,
            "generated_tokens": len(tokens),
            "inputs": self._request.input_text,
        }


class ResponseAnswer(TokenAnswer):
    """One answer by a formatter that gets responses: an OpenAI completion with the keys of the LMI
    schema added.

    In a stream `choices` has the new text of each step, and the last step has the whole text in
    `generated_text`. What the formatter writes ends with a newline.
    """

    def __init__(
        self, formatter: Callable[..., Any], opened: Open, request: Any, model_name: str
    ) -> None:
        super().__init__(formatter, opened, request, model_name)
        self.media_type = JSONLINES if opened.is_streaming else JSON
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model_name,
        }
        self._prompt = request.input_text if opened.return_full_text else ""
        self._num_prompt_tokens = 0
        self._has_prefill = False

    def _write(self, step: Feed) -> bytes:
        """Call the formatter with the finished answer, or in a stream with each step that has
        tokens or ends it.
        """
        self._num_prompt_tokens += len(step.prompt_token_ids or ())
        self._has_prefill |= step.prefill is not None

        has_text_to_stream = self._opened.is_streaming and step.tokens
        if step.finish_reason is None and not has_text_to_stream:
            return b""

        response = json.dumps(self._response(step))
        return format_response(self._formatter, response, self._request, self._request.tokenizer)

    def _response(self, step: Feed) -> dict[str, Any]:
        tokens = self._sequence.tokens
        whole_text = ""
        if step.finish_reason is not None:
            whole_text = self._prompt + _text(tokens)

        response = self._head | {"choices": [self._choice(step, whole_text)]}
        if step.finish_reason is None:
            return response

        answer: dict[str, Any] = {"generated_text": whole_text}
        if self._opened.details:
            answer["details"] = self._whole_details(step.finish_reason)

        usage = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": len(tokens),
            "total_tokens": self._num_prompt_tokens + len(tokens),
        }
        return answer | response | {"usage": usage}

    def _choice(self, step: Feed, whole_text: str) -> dict[str, Any]:
        finish_reason = step.finish_reason
        if finish_reason and finish_reason != "length":
            finish_reason = "stop"

        return {
            "index": 0,
            "text": _text(step.tokens) if self._opened.is_streaming else whole_text,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": step.stop_reason,
        }

    def _whole_details(self, finish_reason: str) -> dict[str, Any]:
        sequence = self._sequence
        is_whole = not self._opened.is_streaming
        details = self._details(sequence.tokens, finish_reason)
        if is_whole:
            details["tokens"] = _as_dicts(sequence.tokens)

        if self._has_prefill:
            details["prefill"] = _as_dicts(self._output.prompt_tokens_details)

        if is_whole and sequence.top_tokens:
            details["top_tokens"] = list(map(_as_dicts, sequence.top_tokens))

        return details


def takes_responses(formatter: Callable[..., Any]) -> bool:
    """Whether the formatter is called with responses, because its parameters ask for no tokens."""
    annotation = first_parameter(formatter).annotation
    is_called_by_token = num_required(formatter) == NUM_TOKEN_PARAMETERS
    return not is_called_by_token and annotation not in ("TextGenerationOutput", "RequestOutput")


def format_response(
    formatter: Callable[..., Any], response: str | bytes, request: Any, tokenizer: Any
) -> bytes:
    """Return what the formatter writes for a response in JSON, as a line, or b"" if it writes
    nothing.
    """
    keywords = accepted(formatter, {"tokenizer": tokenizer, "request": request})
    decoded = json.loads(response, object_hook=Attributes)
    line = as_bytes(call(formatter, decoded, **keywords))
    if not line or line.endswith(b"\n"):
        return line

    return line + b"\n"


def request_input(request: Any, opened: Open, request_id: int, prompt: str, tokenizer: Any) -> Any:
    """Return the request for an output formatter: the input formatter's object, or a TextInput,
    with all fields.
    """
    from djl_python.request_io import TextInput

    if request is None:
        request = TextInput(parameters=dict(opened.fields.get("parameters") or {}))
        for name, value in opened.fields.items():
            if name not in BODY_FIELDS and getattr(request, name, None) is None:
                setattr(request, name, value)

    request = copy.copy(request)
    if request.request_id is None:
        request.request_id = request_id

    request.input_text = prompt
    if getattr(request, "tokenizer", None) is None:
        request.tokenizer = tokenizer

    return request


def _tokens(tokens: Iterable[types.Token]) -> list[Token]:
    from djl_python.request_io import Token

    return [Token(token.id, token.text, token.log_prob, token.is_special) for token in tokens]


def _as_dicts(tokens: Iterable[Token]) -> list[Mapping[str, Any]]:
    return [token.as_dict() for token in tokens]


def _text(tokens: Iterable[Token | types.Token]) -> str:
    return "".join(token.text for token in tokens)


class Attributes(dict[str, Any]):
    """A dict whose keys are attributes too: `response["model"]` and `response.model` are the same.

    A name that is not a key raises AttributeError.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the response has no {name}, only {', '.join(self)}") from None

    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return the object as plain dicts. pydantic's models have this method."""
        return json.loads(self.model_dump_json())  # type: ignore[no-any-return]

    def model_dump_json(self, **_: Any) -> str:
        return json.dumps(self, ensure_ascii=False)
