"""The dense bias of a request."""

from __future__ import annotations

import math
import pickle

import torch

from handlers.lmi_trtllm.biases import embedding_bias
from lmi.executor import Request


def test_biases_and_banned_tokens_become_one_tensor_as_wide_as_the_logits() -> None:
    request = Request((1,), 4, embedding_bias=((2, 1.5), (5, -3.0), (2, 1.0), (4, 9.0)), bad_words=((4,), (6, 7)))
    biases = embedding_bias(request, 8)
    assert biases is not None and biases.dtype == torch.float32 and biases.shape == (8,) and biases.is_cpu
    assert biases.tolist() == [0, 0, 2.5, 0, -math.inf, -3, 0, 0]


def test_a_request_that_changes_no_logit_has_no_bias() -> None:
    assert embedding_bias(Request((1,), 4, bad_words=((6, 7),)), 8) is None


def test_a_bias_travels_to_another_process_as_it_is() -> None:
    biases = embedding_bias(Request((1,), 4, bad_words=((3,),)), 4)
    assert biases is not None and torch.equal(pickle.loads(pickle.dumps(biases)), biases)
