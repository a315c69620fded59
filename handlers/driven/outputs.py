"""What a foreign engine outputs for a sequence after a step, and the code that adds it to a
Sequence.
"""

from dataclasses import dataclass
from typing import Any

from handlers.base.beams import Beam
from handlers.base.sequence import Sequence
from lmi.executor import FinishReason, PromptLogProb, Tensor, TokenLogProb


@dataclass(slots=True)
class LogProbs:
    """Log-probs at some positions, one list for each position.

    A list starts with the token at its position. The best tokens follow in order, though it may be
    one of them. A list may be longer than the request asked for.
    """

    token_ids: list[list[int]]
    # Parallel to `token_ids`.
    values: list[list[float]]


@dataclass(slots=True)
class SequenceOutput:
    """The new tokens of one sequence."""

    # The name of the sequence, or of its beam, at the engine.
    id: str
    token_ids: list[int]
    # Parallel to `token_ids`.
    log_probs: LogProbs | None = None
    # They begin at the prompt's second token.
    prompt_log_probs: LogProbs | None = None
    # None while the sequence goes on, and an exception if the engine gave it up.
    end: FinishReason | Exception | None = None
    # Tokens of the prompt that were cached. The number counts with the first token.
    num_cached_tokens: int = 0
    # All beams anew, the best first, in place of new tokens, from an engine that searches by
    # itself.
    beams: list[Beam] | None = None
    # The embedding of the prompt, if the request asks for it.
    embedding: Tensor | None = None
    # Rows of tensors that the request asks for, a type of the engine.
    rows: Any = None


def ending_tokens(sequence: Sequence) -> list[int]:
    """Return every single token that ends a sequence, for an engine that is to stop there."""
    words = [word[0] for word in sequence.request.stop_words if len(word) == 1]
    ends = [] if sequence.request.ignore_eos else sorted(sequence.end_ids)
    return [int(token_id) for token_id in dict.fromkeys([*ends, *words])]


def feed(sequence: Sequence, output: SequenceOutput) -> None:
    """Append the new tokens, or take the beams. End the sequence at its last token and drop the
    tokens after it.

    An output that the engine gave up leaves the sequence live: the caller fails it.
    """
    note_prompt(sequence, output)
    sequence.num_computed = sequence.num_tokens
    if output.beams is not None:
        sequence.restate(output.beams, is_over=isinstance(output.end, FinishReason))

    log_probs = output.log_probs
    num_top = sequence.request.output_config.num_top_log_probs
    for position, token_id in enumerate(output.token_ids):
        if sequence.is_finished:
            return

        if log_probs is None:
            sequence.append(token_id)
        else:
            top = best_tokens(log_probs, position, num_top) if num_top else None
            sequence.append(token_id, log_probs.values[position][0], top)

    if output.embedding is not None:
        sequence.embed(output.embedding)

    if isinstance(output.end, FinishReason) and not sequence.is_finished:
        sequence.finish_reason = output.end


def best_tokens(log_probs: LogProbs, position: int, num_tokens: int) -> list[TokenLogProb]:
    """Return the best tokens at a position, of which there may be fewer."""
    # The first one is the token at the position itself.
    best = slice(1, num_tokens + 1)
    token_ids = log_probs.token_ids[position][best]
    values = log_probs.values[position][best]
    return [
        TokenLogProb(token_id, value) for token_id, value in zip(token_ids, values, strict=True)
    ]


def note_prompt(sequence: Sequence, output: SequenceOutput) -> None:
    """Note what an output says of the prompt, before its tokens are appended."""
    if not sequence.num_generated:
        sequence.count_cached(output.num_cached_tokens)

    log_probs = output.prompt_log_probs
    if log_probs is None or not sequence.lacks_prompt_log_probs:
        return

    num_top = sequence.request.output_config.num_prompt_log_probs or 0
    # The first token of a prompt has no log-prob.
    prompt_log_probs = sequence.prompt_log_probs.copy() or [PromptLogProb(None)]
    for position, values in enumerate(log_probs.values):
        top = best_tokens(log_probs, position, num_top)
        prompt_log_probs.append(PromptLogProb(values[0], top))

    sequence.prompt_log_probs = prompt_log_probs
