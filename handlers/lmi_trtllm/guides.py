"""Structures that TensorRT-LLM follows: which of its backends has which kind, and a check before each is submitted.

The engine compiles a structure in the process that steps, with no limit of time, and counts each wrong one towards the
errors after which it ends itself. So a structure is compiled first in a process with limits.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from tensorrt_llm.llmapi import GuidedDecodingParams as TheirParams

from handlers.base.sequence import Sequence
from handlers.driven.executor import Preparation
from handlers.guides.compiler import GuideCompiler, Wait
from handlers.guides.json_schemas import ANY_OBJECT
from handlers.guides.process import Start
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
    field = {GuideType.REGEX: "regex", GuideType.EBNF_GRAMMAR: "grammar"}.get(params.guide_type, "json")
    return TheirParams(**{field: params.guide or ANY_OBJECT})


def check(request: Request) -> None:
    """Raise Unsupported for what goes on behind a structure's end, where the engine allows only end tokens."""
    if request.guided_decoding_params is None:
        return
    if request.ignore_eos:
        raise Unsupported("ignore_eos", "TensorRT-LLM follows a structure only up to its end")
    if request.sampling_config.min_tokens:
        raise Unsupported("min_tokens", "TensorRT-LLM ends an answer where its structure ends")


class GuideChecks(Preparation[None]):
    """The check of structures, for an engine whose `kinds` are not empty."""

    is_of_guides = True

    def __init__(self, model_path: str, vocab_size: int, max_compile_s: float, wake_engine: Callable[[], None]) -> None:
        """`vocab_size` is the width of the logits. Reads the tokenizer's files."""
        super().__init__(wake_engine)
        vocabulary = read_config(model_path)
        self._end_ids = frozenset(vocabulary.stop_token_ids or ())
        self._compiler = GuideCompiler(lambda: vocabulary, Start(vocab_size, max_compile_s))
        self._outcomes = GuideOutcomes(self._compiler, self._check)

    def begin(self, sequence: Sequence) -> Future[None] | None:
        params = sequence.request.guided_decoding_params
        return None if params is None else self._outcomes.of(params, sequence.request.client_id)

    def equip(self, sequence: Sequence, made: None) -> None:
        """Let the tokenizer's end tokens end a sequence: the engine closes its structure with one of them."""
        sequence.end_ids |= self._end_ids

    def close(self) -> None:
        self._outcomes.close()

    def _check(self, params: GuidedDecodingParams, wait: Wait) -> None:
        try:
            self._compiler.check(params, wait)
        except LmiError:
            raise
        except Exception as error:
            log.exception("a structure was not compiled")
            raise GenerationFailed(f"the structure was not compiled: {cause_line(error)}") from error
