"""Words of a JSON schema that are no keywords, but nearly so. An engine passes them over, so that
the answer lacks the structure that they should give it.
"""

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

from lmi.apis.guides.schema_keywords import KEYWORDS
from lmi.errors import shorten
from lmi.shared.json_references import inner_schemas

# The most words of one schema that are told.
MAX_MISSPELT = 4
# The most words of one schema that are compared with the keywords: each takes up to 0.05 ms.
MAX_COMPARED = 400
# A longer word is compared with none.
MAX_LETTERS = 40
# A word counts as a misspelt keyword if difflib finds it at least so similar to one.
LIKENESS = 0.88

log = logging.getLogger(__name__)


def log_misspelt_keywords(name: str, schema: dict[str, Any]) -> None:
    """Write a line to the log if the schema in the field `name` has such words."""
    keywords_by_word = misspelt_keywords(schema)
    if not keywords_by_word:
        return

    pairs = []
    for word, keyword in keywords_by_word.items():
        pairs.append(f"{shorten(word)} (perhaps {keyword})")

    message = "%s: words that are no keywords of JSON Schema have no effect: %s"
    log.info(message, name, ", ".join(pairs))


def misspelt_keywords(schema: dict[str, Any]) -> dict[str, str]:
    """Return words of a schema that are no keywords but nearly so, at most MAX_MISSPELT, each with
    the keyword that it is like. Only the first MAX_COMPARED are looked at.
    """
    # A front end without such schemas need not wait for it.
    from difflib import get_close_matches

    keywords_by_word: dict[str, str] = {}
    for word in islice(_unknown_words(schema), MAX_COMPARED):
        similar_keywords = get_close_matches(word, KEYWORDS, 1, LIKENESS)
        if similar_keywords:
            keywords_by_word[word] = similar_keywords[0]

        if len(keywords_by_word) == MAX_MISSPELT:
            break

    return keywords_by_word


def _unknown_words(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the words of a schema and of those in it that may be misspelt keywords, each once."""
    words: set[str] = set()
    pending: list[Any] = [schema]
    while pending:
        inner = pending.pop()
        if not isinstance(inner, dict):
            continue

        pending += (part for _, part in inner_schemas(inner))
        for word in inner:
            if word not in KEYWORDS and word not in words and len(word) <= MAX_LETTERS:
                words.add(word)
                yield word
