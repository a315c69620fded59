"""The wire dialects that the load speaks: a row each, with where to send a prompt and how to read
what comes back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """One request, in no dialect yet."""

    prompt: str
    max_tokens: int


@dataclass(frozen=True)
class Dialect:
    """`body` makes a body of the model, the request and whether to stream the answer.

    `text_of` returns the text of an event. `num_tokens_of` returns how many tokens an answer has so
    far, of its last event or of the whole, and None where the server does not report it.
    `ends_answer` returns whether an event ends the answer: only its usage may come after it.
    """

    # The path of a streamed answer, and that of a whole one.
    path: str
    whole_path: str
    body: Callable[[str, Ask, bool], Json]
    text_of: Callable[[Json], str]
    num_tokens_of: Callable[[Json], int | None]
    ends_answer: Callable[[Json], bool]
    needs_model: bool = False


def _chat_body(model: str, ask: Ask, is_streamed: bool) -> Json:
    messages = [{"role": "user", "content": ask.prompt}]
    return {"messages": messages, **_openai_body(model, ask, is_streamed)}


def _completion_body(model: str, ask: Ask, is_streamed: bool) -> Json:
    return {"prompt": ask.prompt, **_openai_body(model, ask, is_streamed)}


def _openai_body(model: str, ask: Ask, is_streamed: bool) -> Json:
    body: Json = {"model": model, "max_tokens": ask.max_tokens}
    if is_streamed:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}

    return body


def _lmi_body(model: str, ask: Ask, is_streamed: bool) -> Json:
    return {**_tgi_body(model, ask, is_streamed), "stream": is_streamed}


def _tgi_body(model: str, ask: Ask, is_streamed: bool) -> Json:
    parameters = {"max_new_tokens": ask.max_tokens, "details": True}
    return {"inputs": ask.prompt, "parameters": parameters}


def _triton_body(model: str, ask: Ask, is_streamed: bool) -> Json:
    return {
        "text_input": ask.prompt,
        "parameters": {"max_tokens": ask.max_tokens, "stream": is_streamed},
    }


def _chat_text(event: Json) -> str:
    """Return what is said, thought or called."""
    text = ""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        for name in ("content", "reasoning_content", "reasoning", "tool_calls"):
            if delta.get(name):
                text += str(delta[name])

    return text


def _completion_text(event: Json) -> str:
    return "".join(choice.get("text") or "" for choice in event.get("choices") or ())


def _token_text(event: Json) -> str:
    return str((event.get("token") or {}).get("text") or "")


def _tokens_in_usage(event: Json) -> int | None:
    return (event.get("usage") or {}).get("completion_tokens")


def _tokens_in_details(event: Json) -> int | None:
    return (event.get("details") or {}).get("generated_tokens")


def _is_finished(event: Json) -> bool:
    return any(choice.get("finish_reason") for choice in event.get("choices") or ())


def _has_text(event: Json) -> bool:
    return event.get("generated_text") is not None


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TRITON = "/v2/models/{model}/generate"
DIALECTS = {
    "chat": Dialect(
        CHAT, CHAT, _chat_body, _chat_text, _tokens_in_usage, _is_finished, needs_model=True
    ),
    "completions": Dialect(
        COMPLETIONS,
        COMPLETIONS,
        _completion_body,
        _completion_text,
        _tokens_in_usage,
        _is_finished,
        needs_model=True,
    ),
    "lmi": Dialect(
        "/invocations", "/invocations", _lmi_body, _token_text, _tokens_in_details, _has_text
    ),
    "tgi": Dialect(
        "/generate_stream", "/generate", _tgi_body, _token_text, _tokens_in_details, _has_text
    ),
    "triton": Dialect(
        f"{TRITON}_stream",
        TRITON,
        _triton_body,
        lambda event: str(event.get("text_output") or ""),
        lambda event: None,
        # An end looks like any other event.
        lambda event: True,
        needs_model=True,
    ),
}
