"""One page of a list, as the lists of models and adapters are cut: by `limit` and `next_page_token` of the query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from lmi.errors import InvalidParameter

MAX_ITEMS = 100
LIMIT, TOKEN = "limit", "next_page_token"

T = TypeVar("T")


def page(items: Sequence[T], query: Mapping[str, str]) -> tuple[list[T], dict[str, str]]:
    """Return the items of a page, and `nextPageToken` if there are more. Raises InvalidParameter for a bad token.

    A limit that is not a number from 1 to 100 counts as 100. The token is the number of items before the page.
    """
    limit, token = query.get(LIMIT, ""), query.get(TOKEN) or "0"
    if not _is_number(token):
        raise InvalidParameter(TOKEN, "a number that an earlier answer gave", token)
    num_items = int(limit) if _is_number(limit) and 1 <= int(limit) <= MAX_ITEMS else MAX_ITEMS
    start = int(token)
    end = start + num_items
    return list(items[start:end]), {"nextPageToken": str(end)} if end < len(items) else {}


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9
