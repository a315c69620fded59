"""The log-probs of the tokens of a prompt, where a request wants them."""

import numpy as np

from handlers.base.sequence import Sequence
from handlers.lmi_dist.native.sampling_records import (
    CHOSEN,
    Floats,
    Sample,
    Sampling,
    new_row_params,
)
from handlers.lmi_dist.plan import Chunk
from handlers.lmi_dist.sampler import next_top
from lmi.executor import PromptLogProb


def note_prompt(sample: Sample, sequence: Sequence, chunk: Chunk, logits: Floats) -> bool:
    """Keep the log-probs of the prompt tokens that follow each position of the chunk.

    `logits` is (chunk length, vocab). Returns False, and keeps none, if one of them is not a
    number.
    """
    next_ids = sequence.token_ids[chunk.start + 1 : min(chunk.end + 1, sequence.num_prompt_tokens)]
    # Nothing is before the first token.
    log_probs = sequence.prompt_log_probs or [PromptLogProb(None)]
    log_probs = log_probs[: chunk.start + 1]
    if next_ids:
        num_positions = len(next_ids)
        num_top = min(sequence.request.output_config.num_prompt_log_probs or 0, logits.shape[1])
        params = new_row_params(
            num_positions,
            row=np.arange(num_positions),
            token_id=next_ids,
            num_top=num_top,
            wants_log_prob=1,
        )
        choices, best = sample(Sampling(logits, params))
        if (choices["status"] != CHOSEN).any():
            return False

        alternatives = iter(best.tolist())
        for log_prob in choices["log_prob"].tolist():
            log_probs.append(PromptLogProb(log_prob, next_top(alternatives, num_top)))

    sequence.prompt_log_probs = log_probs
    return True
