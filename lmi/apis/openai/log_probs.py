"""Log-probs in answers of OpenAI's API. Sources: its reference, and vLLM's fields."""

import math
from typing import Any

from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.types import Token

# JSON has no infinity, so this stands for it.
LEAST_LOG_PROB = -9999.0


def log_prob_fields(tokens: list[Token], format: OpenAIFormat) -> dict[str, Any]:
    """Return the log-probs of tokens in the form of chats."""

    def fields(token: Token) -> dict[str, Any]:
        return {
            "token": name_of(token, format),
            "logprob": log_prob(token),
            "bytes": list(token.spelled_name.encode()),
        }

    content = []
    for token in tokens:
        top_log_probs = [fields(candidate) for candidate in token.top or ()]
        content.append(fields(token) | {"top_logprobs": top_log_probs})

    return {"content": content, "refusal": None}


def prompt_log_prob(token: Token, num_top: int) -> dict[str, Any] | None:
    """Return the log-probs of a token of the prompt and of the best in its place, by their ids.

    It is None for the first token, which nothing comes before. The rank of a token that is not
    among the best is not known.
    """
    if token.log_prob is None:
        return None

    best = (token.top or ())[:num_top]
    log_probs = {}
    for rank, candidate in [(None, token), *enumerate(best, 1)]:
        log_probs[str(candidate.id)] = {
            "logprob": log_prob(candidate),
            "rank": rank,
            "decoded_token": candidate.text,
        }

    return log_probs


def name_of(token: Token, format: OpenAIFormat) -> str:
    """Return a token's name in log-probs: how it is spelled, or its id if the client wants that."""
    if format.names_tokens_by_id:
        return f"token_id:{token.id}"

    return token.spelled_name


def log_prob(token: Token) -> float | None:
    """Return the log-prob as a finite number, or None for the first token of a prompt."""
    if token.log_prob is None:
        return None

    if not math.isfinite(token.log_prob):
        return LEAST_LOG_PROB

    return max(token.log_prob, LEAST_LOG_PROB)
