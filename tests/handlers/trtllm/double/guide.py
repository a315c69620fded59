"""Guided decoding with xgrammar, compiled where the engine runs, as upstream does it."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor
from xgrammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarMatcher,
    TokenizerInfo,
    VocabType,
    allocate_token_bitmask,
    apply_token_bitmask_inplace,
)


class Guides:
    """Compiles the structures of requests for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_id: int | None) -> None:
        ids = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        has_bytes = "ByteLevel" in json.dumps(json.loads(tokenizer.to_str())["decoder"])
        kind = VocabType.BYTE_LEVEL if has_bytes else VocabType.BYTE_FALLBACK
        ends = None if end_id is None else [end_id]
        self._vocab_size = vocab_size
        texts = [text for text, _ in ids]
        self._compiler = GrammarCompiler(
            TokenizerInfo(texts, kind, vocab_size=vocab_size, stop_token_ids=ends)
        )

    def guide(self, params: Any, end_id: int) -> Guide:
        """The guide of one sequence. `params` are GuidedDecodingParams. Raises what xgrammar
        raises.
        """
        ends = [end_id] if end_id >= 0 else None
        return Guide(
            GrammarMatcher(self._compiled(params), override_stop_tokens=ends), self._vocab_size
        )

    def _compiled(self, params: Any) -> CompiledGrammar:
        if params.json_object:
            return self._compiler.compile_builtin_json_grammar()

        if params.json is not None:
            schema = params.json if isinstance(params.json, str) else _schema_of(params.json)
            return self._compiler.compile_json_schema(schema)

        if params.regex is not None:
            return self._compiler.compile_regex(params.regex)

        if params.grammar is not None:
            return self._compiler.compile_grammar(params.grammar)

        return self._compiler.compile_structural_tag(params.structural_tag)


class Guide:
    """The state of one sequence in its structure."""

    def __init__(self, matcher: GrammarMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = allocate_token_bitmask(1, vocab_size)

    def restrict(self, row: Tensor) -> None:
        """Set the logits (vocab,) of the tokens that may not follow to minus infinity, in place."""
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(self._mask)
            apply_token_bitmask_inplace(row.unsqueeze(0), self._mask)

    def accept(self, token: int) -> None:
        if not self._matcher.is_terminated():
            self._matcher.accept_token(token)


def _schema_of(given: Any) -> str:
    return json.dumps(given if isinstance(given, dict) else given.model_json_schema())


def is_any(params: Any) -> bool:
    """Whether GuidedDecodingParams ask for a structure."""
    texts = (params.json, params.regex, params.grammar, params.structural_tag)
    return params.json_object or any(text is not None for text in texts)
