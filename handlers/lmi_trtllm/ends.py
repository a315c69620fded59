"""The tokens at which TensorRT-LLM ends a sequence.

It knows one end token, and stop words of one token. So further end tokens are stop words there. Its `min_tokens` holds
back only the end token: where it is given, TensorRT-LLM gets no stop words, and our own rules find them.
"""

from __future__ import annotations

from handlers.base.sequence import Sequence


def end_token(sequence: Sequence) -> int | None:
    """The end token, or None if there is none or it is ignored."""
    if sequence.request.ignore_eos or not sequence.end_ids:
        return None
    first = sequence.request.end_id
    return int(min(sequence.end_ids) if first is None else first)


def stop_token_ids(sequence: Sequence) -> list[int]:
    """Every other single token that ends the sequence there."""
    if sequence.min_tokens:
        return []
    ends = [] if sequence.request.ignore_eos else sorted(sequence.end_ids - {end_token(sequence)})
    words = [word[0] for word in sequence.request.stop_words if len(word) == 1]
    return [int(token_id) for token_id in dict.fromkeys([*ends, *words])]
