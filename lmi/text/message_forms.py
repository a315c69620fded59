"""Messages in the form that a chat template takes."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]


def are_in_turns(messages: Messages) -> bool:
    """Whether the system speaks only at the beginning, and the user once in each turn."""
    roles = [message.get("role") for message in messages]
    return "system" not in roles[1:] and ("user", "user") not in itertools.pairwise(roles)


def in_turns(messages: Messages, refused: Container[str]) -> Messages:
    """Return the messages without late ones of the system and second ones of the user, if these are `refused`.

    The message before says the same, so that the prompt grows at its end alone. After an answer the user says it.
    """
    said: list[Mapping[str, Any]] = []
    for message in messages:
        role, last = message["role"], said[-1]["role"] if said else None
        if role == "system" and last is not None and role in refused:
            role, is_joined = "user", last != "assistant"
        else:
            is_joined = role == last == "user" and role in refused
        if is_joined:
            said[-1] = {**said[-1], "content": _joined(said[-1].get("content"), message.get("content"))}
        else:
            said.append({**message, "role": role})
    return said


def _joined(first: object, second: object) -> object:
    both: list[Any] = [part for each in (first, second) for part in (each if isinstance(each, list) else [each or ""])]
    return both if isinstance(first, list) or isinstance(second, list) else "\n".join(both)


def of_parts(messages: Messages) -> Messages:
    """Return messages whose contents are lists of parts, as templates of models with images take them."""
    return [{**message, "content": parts(message.get("content"))} for message in messages]


def parts(content: object) -> list[dict[str, str]]:
    said = content if isinstance(content, list) else [content or ""]
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in said]


def of_texts(messages: Messages, placeholder: str) -> Messages:
    """Return messages whose contents are texts, with a placeholder for each image."""
    numbers = itertools.count(1)
    return [{**message, "content": _text(message.get("content"), placeholder, numbers)} for message in messages]


def _text(content: object, placeholder: str, numbers: Iterator[int]) -> object:
    if not isinstance(content, list):
        return content
    said = (part if isinstance(part, str) else placeholder.replace("{n}", str(next(numbers))) for part in content)
    return "\n".join(said)
