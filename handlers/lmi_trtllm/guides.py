"""Structures that TensorRT-LLM follows: which of its backends has which kind, and a check before each is submitted.

The engine compiles a structure in the process that steps all requests, with no limit of time, and counts each wrong one
towards the errors after which it ends itself. So a structure is compiled first in a process with limits.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from tensorrt_llm.llmapi import GuidedDecodingParams as TheirParams

from handlers.base.sequence import Sequence
from handlers.guides.compiler import MAX_COMPILE_WAIT_S, GuideCompiler
from handlers.guides.json_schemas import ANY_OBJECT
from handlers.guides.turns import GuideOutcomes
from handlers.guides.vocabulary import NO_TEXTS, read_config, why_no_guides
from lmi.errors import GenerationFailed, LmiError, Unsupported, cause_line
from lmi.executor import GuidedDecodingParams, GuideType, Request
from lmi.settings.config import EngineConfig
from lmi.settings.kinds import is_true

OPTION, XGRAMMAR, LLGUIDANCE = "guided_decoding_backend", "xgrammar", "llguidance"
# llguidance reads what is called a grammar as one of Lark, which is another language than EBNF.
KINDS = {XGRAMMAR: tuple(GuideType), LLGUIDANCE: (GuideType.JSON, GuideType.JSON_SCHEMA, GuideType.REGEX)}

log = logging.getLogger("lmi.trtllm")


def kinds(config: EngineConfig, model_path: str) -> tuple[tuple[GuideType, ...], str]:
    """The kinds of structures that requests may have, or none and the reason."""
    backend = config.options.get(OPTION, XGRAMMAR)
    if backend not in KINDS:
        return (), f"option.{OPTION}={backend} is neither {XGRAMMAR} nor {LLGUIDANCE}"
    if is_true(config.options.get("skip_tokenizer_init", "")):
        return (), NO_TEXTS
    if reason := why_no_guides(Path(model_path)):
        return (), reason
    return KINDS[backend], ""


def guided(params: GuidedDecodingParams | None) -> TheirParams | None:
    """TensorRT-LLM's form. JSON is one object, as in the other engines; the engine's own JSON may be any value."""
    if params is None:
        return None
    if params.guide_type is GuideType.JSON:
        return TheirParams(json=ANY_OBJECT)
    if params.guide_type is GuideType.JSON_SCHEMA:
        return TheirParams(json=params.guide)
    if params.guide_type is GuideType.REGEX:
        return TheirParams(regex=params.guide)
    return TheirParams(grammar=params.guide)


def check(request: Request) -> None:
    """Raise Unsupported for what cannot stand beside a structure.

    At its end the engine allows only end tokens, and behind them it follows it no more.
    """
    if request.guided_decoding_params is None:
        return
    if request.ignore_eos:
        raise Unsupported("ignore_eos", "TensorRT-LLM follows a structure only up to its end")
    if request.sampling_config.min_tokens:
        raise Unsupported("min_tokens", "TensorRT-LLM ends an answer where its structure ends")


class GuideChecks:
    """The structures of an engine whose `kinds` are not empty. Any thread may use it."""

    def __init__(self, model_path: str, vocab_size: int, max_compile_s: float = MAX_COMPILE_WAIT_S) -> None:
        """`vocab_size` is the width of the logits. Reads the tokenizer's files."""
        vocabulary = read_config(model_path)
        self._end_ids = frozenset(vocabulary.stop_token_ids or ())
        compiler = GuideCompiler(lambda: vocabulary, vocab_size, max_compile_s)
        self.outcomes = GuideOutcomes(compiler, compiler.check)

    def follow(self, sequence: Sequence) -> None:
        """Let the tokenizer's end tokens end a sequence: the engine closes its structure with one of them."""
        sequence.end_ids |= self._end_ids

    async def check(self, params: GuidedDecodingParams, client: int | None = None) -> None:
        """Raise InvalidRequest for a structure that is wrong or too large, another LmiError if that is not found out.

        No other error leaves it: one would end the engine. Call it on one event loop.
        """
        try:
            await asyncio.shield(asyncio.wrap_future(self.outcomes.of(params, client)))
        except LmiError:
            raise
        except Exception as error:
            log.exception("a structure was not compiled")
            raise GenerationFailed(f"the structure was not compiled: {cause_line(error)}") from error

    def close(self) -> None:
        self.outcomes.close()
