"""One page of a list of resources: which ones a client asks for, in which order."""

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from lmi.errors import shorten
from lmi.gateway.control.resources import Resource, ResourceKind
from lmi.gateway.control.service_model import Members, invalid

# AWS's, where a client names none.
NUM_RESULTS = 10
R = TypeVar("R", bound=Resource)
SORT_KEYS: dict[str, Callable[[Resource], str | float]] = {
    "Name": lambda resource: resource.name,
    "CreationTime": lambda resource: resource.created_s,
    "Status": lambda resource: resource.status,
}


def page(
    kind: ResourceKind, resources: Iterable[R], query: Members, describe: Callable[[R], Members]
) -> Members:
    """Return the part of a list that a query asks for, as the answer to List…s."""
    matching = [resource for resource in resources if _is_asked(kind, resource, query)]
    sort_key = SORT_KEYS[query.get("SortBy", "CreationTime")]
    matching.sort(key=sort_key, reverse=query.get("SortOrder", "Descending") == "Descending")

    token = query.get("NextToken", "0")
    if not re.fullmatch("[0-9]{1,9}", token):
        raise invalid(f"NextToken must be one that this operation gave, given {shorten(token)}")

    begin = int(token)
    end = begin + query.get("MaxResults", NUM_RESULTS)
    answer: Members = {f"{kind.noun}s": [describe(resource) for resource in matching[begin:end]]}
    if end < len(matching):
        answer["NextToken"] = str(end)

    return answer


def _is_asked(kind: ResourceKind, resource: Resource, query: Members) -> bool:
    """Whether a resource is one of those that a query asks for."""
    is_named = query.get("NameContains", "").lower() in resource.name.lower()
    is_in_status = query.get("StatusEquals", resource.status) == resource.status
    is_created_then = _is_between(query, "CreationTime", resource.created_s)
    is_modified_then = _is_between(query, "LastModifiedTime", resource.modified_s)
    if not (is_named and is_in_status and is_created_then and is_modified_then):
        return False

    for member in ("EndpointName", "VariantName"):
        value = query.get(f"{member}Equals")
        if value is not None and resource.members.get(member) != value:
            return False

    return True


def _is_between(query: Members, member: str, time_s: float) -> bool:
    after_s = query.get(f"{member}After", float("-inf"))
    before_s = query.get(f"{member}Before", float("inf"))
    return bool(after_s < time_s < before_s)
