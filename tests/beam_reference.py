"""transformers' beam search, and a comparison that knows ties.

Two beams tie if their scores differ by less than the rounding of different sums: either order is
then right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lmi.executor import Request

# Of a score, and between beams that tie
TOLERANCE = 2e-4


@dataclass(slots=True)
class Found:
    """Beams with their scores, best first."""

    beams: list[list[int]]
    scores: list[float]


@dataclass(slots=True)
class Comparison:
    """How many cases were equal, and the names of those in which beams tie."""

    num_equal: int = 0
    ties: list[str] = field(default_factory=list)

    def check(self, name: str, found: Found, expected: Found) -> None:
        if found.beams == expected.beams:
            differences = [
                abs(score - expected_score)
                for score, expected_score in zip(found.scores, expected.scores, strict=True)
            ]
            assert max(differences) < TOLERANCE, f"{name}: {found} is not {expected}"
            self.num_equal += 1
        else:
            assert _tie(found, expected), f"{name}: {found} is not {expected}"
            self.ties.append(name)


def _tie(found: Found, expected: Found) -> bool:
    """Whether both found beams of the same scores, in an order or a choice that
    rounding decides.
    """
    pairs = list(zip(found.scores, expected.scores, strict=True))
    return all(abs(score - expected_score) < TOLERANCE for score, expected_score in pairs)


def transformers_beams(model: Any, request: Request) -> Found:
    """What transformers finds for a request, without padding."""
    sampling = request.sampling_config
    num_prompt_tokens = len(request.input_token_ids)
    end_ids = [] if request.ignore_eos else [*request.end_ids]
    stopping = early_stopping(sampling.early_stopping)
    rules: dict[str, Any] = {
        "repetition_penalty": sampling.repetition_penalty,
        "no_repeat_ngram_size": sampling.no_repeat_ngram_size,
        "min_new_tokens": sampling.min_tokens and min(sampling.min_tokens, request.max_tokens),
        "bad_words_ids": [list(word) for word in request.bad_words] or None,
        "sequence_bias": [[[token_id], bias] for token_id, bias in request.embedding_bias] or None,
    }

    output = model.generate(
        torch.tensor([request.input_token_ids]),
        attention_mask=torch.ones(1, num_prompt_tokens, dtype=torch.long),
        do_sample=False,
        num_beams=sampling.beam_width,
        num_return_sequences=sampling.num_return_sequences,
        length_penalty=1.0 if sampling.length_penalty is None else sampling.length_penalty,
        early_stopping=stopping,
        max_new_tokens=request.max_tokens,
        eos_token_id=end_ids or None,
        pad_token_id=PADDING,
        stopping_criteria=[Stops(request, num_prompt_tokens)] if request.stop_words else None,
        return_dict_in_generate=True,
        output_scores=True,
        **{name: value for name, value in rules.items() if value is not None},
    )
    lengths = (output.beam_indices >= 0).sum(dim=1).tolist()
    beams = [
        ids[num_prompt_tokens : num_prompt_tokens + length]
        for ids, length in zip(output.sequences.tolist(), lengths, strict=True)
    ]
    return Found(beams, output.sequences_scores.tolist())


PADDING = 0


def early_stopping(value: int | None) -> bool | str:
    return "never" if (value or 0) > 1 else bool(value)


class Stops:
    """A stopping criterion of transformers: a stop word of the request ends the
    generated tokens.
    """

    def __init__(self, request: Request, num_prompt_tokens: int) -> None:
        self._words = [list(word) for word in request.stop_words]
        self._num_prompt_tokens = num_prompt_tokens

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
        rows = [row[self._num_prompt_tokens :] for row in input_ids.tolist()]
        return torch.tensor(
            [any(row[-len(word) :] == word for word in self._words) for row in rows]
        )
