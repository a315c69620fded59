"""The dense bias that TensorRT-LLM adds to the logits of a request, which also bans single tokens.

The engine has a list of banned tokens too, but an older torch sampler leaves that list out without a word.
All add the bias, so a bad word of one token is a bias of minus infinity.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmi.executor import Request


def embedding_bias(request: Request, vocab_size: int) -> Tensor | None:
    """The bias of each token, float32 (vocab_size,) on the CPU, or None if the request changes no logit.

    Biases of one token add up, as in the other engines. `vocab_size` is the width of the logits: the engine's whole
    batch fails if it differs.
    """
    banned = [word[0] for word in request.bad_words if len(word) == 1]
    if not request.embedding_bias and not banned:
        return None
    biases = torch.zeros(vocab_size, dtype=torch.float32)
    for token_id, bias in request.embedding_bias:
        biases[token_id] += bias
    biases[banned] = -math.inf
    return biases
