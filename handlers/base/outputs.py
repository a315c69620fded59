"""The output of a foreign engine for one sequence after a step, and the code that adds it to a Sequence."""

from __future__ import annotations

from dataclasses import dataclass

from handlers.base.beams import Beam
from handlers.base.sequence import Sequence
from lmi.executor import FinishReason, PromptLogProb, TokenLogProb


@dataclass(slots=True)
class LogProbs:
    """Log-probs at some positions, one list for each position.

    A list starts with the token at its position. The best tokens follow in order and may repeat it. A list may be
    longer than the request asked for.
    """

    token_ids: list[list[int]]
    values: list[list[float]]


@dataclass(slots=True)
class SequenceOutput:
    """The new tokens of one sequence. `log_probs` is parallel to `token_ids`.

    `prompt_log_probs` begins at the prompt's second token. `end` is None while the sequence goes on, and an exception
    if the engine gave it up. An engine that searches beams by itself reports all of them anew, the best first, in place
    of new tokens.
    """

    id: str
    token_ids: list[int]
    log_probs: LogProbs | None = None
    prompt_log_probs: LogProbs | None = None
    end: FinishReason | Exception | None = None
    num_cached_tokens: int = 0  # of the prompt, reported with its first token
    beams: list[Beam] | None = None


def feed(sequence: Sequence, output: SequenceOutput) -> None:
    """Append the new tokens, or take the beams. End the sequence at its last token and drop the tokens after it."""
    sequence.num_computed = sequence.num_tokens
    if not sequence.num_generated:
        sequence.count_cached(output.num_cached_tokens)
    if output.prompt_log_probs is not None and sequence.lacks_prompt_log_probs:
        note_prompt(sequence, output.prompt_log_probs)
    if output.beams is not None:
        sequence.restate(output.beams, is_over=isinstance(output.end, FinishReason))
    known, num_top = output.log_probs, sequence.request.output_config.num_top_log_probs
    for position, token_id in enumerate(output.token_ids):
        if sequence.is_finished:
            return
        if known is None:
            sequence.append(token_id)
        else:
            top = best(known, position, num_top) if num_top else None
            sequence.append(token_id, known.values[position][0], top)
    if isinstance(output.end, FinishReason) and not sequence.is_finished:
        sequence.finish_reason = output.end


def best(log_probs: LogProbs, position: int, num_top: int) -> list[TokenLogProb]:
    pairs = list(zip(log_probs.token_ids[position], log_probs.values[position], strict=True))
    others = pairs[1:]
    if len(others) < num_top:  # the chosen token is among the best and was written only once
        others = sorted(pairs, key=lambda pair: -pair[1])
    return [TokenLogProb(token_id, log_prob) for token_id, log_prob in others[:num_top]]


def note_prompt(sequence: Sequence, log_probs: LogProbs) -> None:
    num_top = sequence.request.output_config.num_prompt_log_probs or 0
    known = sequence.prompt_log_probs or [PromptLogProb(None)]
    sequence.prompt_log_probs = known + [
        PromptLogProb(values[0], best(log_probs, position, num_top)) for position, values in enumerate(log_probs.values)
    ]
