"""The compilation of a guide for vLLM, tried in a process with limits before vLLM does it.

It uses vLLM's backends without vLLM. By default vLLM stays with the backend that its first guide
needed, so both are tried. A guide that one of them does not read is left to vLLM, which may know
another way, and says best what is wrong.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from handlers.guides.json_schemas.keywords import ANY_OBJECT
from handlers.lmi_vllm import process_setup
from lmi.executor import GuidedDecodingParams, GuideType

if TYPE_CHECKING:
    from handlers.guides.process import Start

XGRAMMAR = "xgrammar"
GUIDANCE = "guidance"
# The backends that may be needed, by the value of vLLM's option.
BACKENDS = {
    "auto": (XGRAMMAR, GUIDANCE),
    XGRAMMAR: (XGRAMMAR,),
    GUIDANCE: (GUIDANCE,),
}


def new_compile(start: "Start") -> Callable[[GuidedDecodingParams], str]:
    """Return what compiles a guide with each backend, and gives an empty text.

    The config's `tokenizer_str` is xgrammar's form of the vocabulary.
    """
    backends: list[Callable[[GuidedDecodingParams], None]] = []
    if XGRAMMAR in start.backends:
        # The import of transformers would find them.
        process_setup.hide_foreign_builds()
        import xgrammar

        info = xgrammar.TokenizerInfo.deserialize_json(start.config.tokenizer_str or "")
        backends.append(partial(_by_xgrammar, xgrammar, info, has_spaces=not start.is_compact))

    if GUIDANCE in start.backends:
        import llguidance

        backends.append(partial(_by_llguidance, llguidance, has_spaces=not start.is_compact))

    def compile(params: GuidedDecodingParams) -> str:
        for backend in backends:
            with suppress(Exception):
                backend(params)

        return ""

    return compile


def _by_xgrammar(
    xgrammar: Any, info: Any, params: GuidedDecodingParams, *, has_spaces: bool
) -> None:
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    if params.guide_type in (GuideType.JSON, GuideType.JSON_SCHEMA):
        compiler.compile_json_schema(params.guide or ANY_OBJECT, any_whitespace=has_spaces)
    elif params.guide_type is GuideType.REGEX:
        compiler.compile_regex(params.guide)
    else:
        try:
            compiler.compile_grammar(params.guide)
        except Exception:
            compiler.compile_lark(params.guide)


def _by_llguidance(llguidance: Any, params: GuidedDecodingParams, *, has_spaces: bool) -> None:
    if params.guide_type in (GuideType.JSON, GuideType.JSON_SCHEMA):
        spaces = {"whitespace_flexible": has_spaces}
        text = llguidance.LLMatcher.grammar_from_json_schema(
            params.guide or ANY_OBJECT, defaults=spaces
        )
    else:
        kind = "regex" if params.guide_type is GuideType.REGEX else "grammar"
        text = llguidance.grammar_from(kind, params.guide)

    llguidance.LLMatcher.validate_grammar(text, None)
    llguidance.LLMatcher(llguidance.LLTokenizer("byte"), text, log_level=0).compute_bitmask()
