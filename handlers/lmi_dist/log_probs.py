"""The log-probs of a prompt.

As all log-probs they are a log_softmax of the model's logits in float32, before any rule changes them (as vLLM does by
default).
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from handlers.base.sequence import Sequence
from handlers.lmi_dist.plan import Chunk
from handlers.lmi_dist.wishes import CHOSEN, Choose, Floats, Sampling, new_wishes
from lmi.executor import PromptLogProb, TokenLogProb

MAX_TOP_LOG_PROBS = 20


def prompt_log_probs(choose: Choose, logits: Floats, token_ids: list[int], num_top: int) -> list[PromptLogProb] | None:
    """Log-probs of prompt tokens, each from the row of `logits` (num_tokens, vocab) of the position before it.

    Returns None if one of them is not a number.
    """
    if not token_ids:
        return []
    num_top = min(num_top, logits.shape[1])
    columns = {"row": np.arange(len(token_ids)), "token_id": token_ids, "num_top": num_top, "wants_log_prob": 1}
    choices, best = choose(Sampling(logits, new_wishes(len(token_ids), **columns)))
    if (choices["status"] != CHOSEN).any():
        return None
    tops = iter(best.tolist())
    return [
        PromptLogProb(log_prob, [TokenLogProb(one, value) for one, value, _ in islice(tops, num_top)])
        for log_prob in choices["log_prob"].tolist()
    ]


def note_prompt(choose: Choose, sequence: Sequence, chunk: Chunk, logits: Floats) -> bool:
    """Keep the log-probs of the prompt tokens that follow each position of the chunk.

    `logits` is (chunk length, vocab). Returns False if they are not numbers.
    """
    next_ids = sequence.token_ids[chunk.start + 1 : min(chunk.end + 1, sequence.num_prompt_tokens)]
    num_top = sequence.request.output_config.num_prompt_log_probs or 0
    log_probs = prompt_log_probs(choose, logits, next_ids, num_top)
    if log_probs is None:
        return False
    known = sequence.prompt_log_probs or [PromptLogProb(None)]  # nothing comes before the first token
    sequence.prompt_log_probs = known[: chunk.start + 1] + log_probs
    return True
