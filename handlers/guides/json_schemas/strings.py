"""Whether two JSON schemas of strings have a string in common, as llguidance finds it."""

from collections.abc import Iterable, Mapping
from typing import Any

from handlers.guides.rust_regex import rust_regex

# So many groups of schemas are compared at most.
MAX_COMPARED = 500
RULES = ("pattern", "minLength", "maxLength", "enum", "const")
# llguidance's words for it.
NO_VALUE = "Unsatisfiable schema"


class StringRules:
    """Compares the schemas of one client's schema."""

    def __init__(self) -> None:
        self._num_compared = 0

    def share_none(self, parts: Iterable[Mapping[str, Any]]) -> bool:
        """Whether no string fits several schemas at once. False where it is not known."""
        from llguidance import LLMatcher

        self._num_compared += 1
        if self._num_compared > MAX_COMPARED:
            return False

        rules = []
        try:
            for part in parts:
                rule = {name: part[name] for name in RULES if name in part}
                if "pattern" in rule:
                    rule["pattern"] = rust_regex(rule["pattern"], is_in_json=True)

                rules.append(rule)
        except (TypeError, ValueError):
            # A pattern cannot be followed.
            return False

        grammar = LLMatcher.grammar_from_json_schema({"type": "string", "allOf": rules})
        return NO_VALUE in LLMatcher.validate_grammar(grammar)
