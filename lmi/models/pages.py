"""Lists in pages, as SageMaker asks for them: of the models, and of the adapters."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from lmi.description.schemas import parameter
from lmi.errors import InvalidParameter

# The longest page.
MAX_ITEMS = 100
LIMIT = "limit"
TOKEN = "next_page_token"
# The parameters of a list in pages.
PAGE = (
    parameter("query", LIMIT, {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS}),
    parameter("query", TOKEN, {"type": "string", "pattern": "^[0-9]{1,9}$"}),
)

T = TypeVar("T")


def page(items: Sequence[T], query: Mapping[str, str]) -> tuple[list[T], dict[str, str]]:
    """Return the items of a page, and `nextPageToken` if there are more. Raises InvalidParameter
    for a bad token.

    A limit that is not a number from 1 to 100 counts as 100. The token is the number of items
    before the page.
    """
    limit = query.get(LIMIT, "")
    token = query.get(TOKEN) or "0"
    if not _is_number(token):
        raise InvalidParameter(TOKEN, "a number that an earlier answer gave", token)

    num_items = MAX_ITEMS
    if _is_number(limit) and 1 <= int(limit) <= MAX_ITEMS:
        num_items = int(limit)

    start = int(token)
    end = start + num_items
    more = {"nextPageToken": str(end)} if end < len(items) else {}
    return list(items[start:end]), more


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9
