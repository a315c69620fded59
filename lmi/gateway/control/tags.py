"""Operations of tags, which any resource may have."""

import msgspec

from lmi.gateway.control.plane import Plane
from lmi.gateway.control.resources import Resource, tags_of
from lmi.gateway.control.service_model import Members, invalid
from lmi.gateway.control.store import ResourceTable
from lmi.gateway.errors import AwsError

MAX_TAGS = 50


def add(plane: Plane, members: Members, region: str) -> Members:
    table, resource = _found(plane, members["ResourceArn"])
    tags = resource.tags | tags_of(members)
    if len(tags) > MAX_TAGS:
        raise invalid(f"A resource has at most {MAX_TAGS} tags, given {len(tags)}.")

    table.put(msgspec.structs.replace(resource, tags=tags))
    return {"Tags": _listed(tags)}


def list_all(plane: Plane, members: Members, region: str) -> Members:
    _, resource = _found(plane, members["ResourceArn"])
    return {"Tags": _listed(resource.tags)}


def delete(plane: Plane, members: Members, region: str) -> Members:
    table, resource = _found(plane, members["ResourceArn"])
    tags = dict(resource.tags)
    for key in members["TagKeys"]:
        tags.pop(key, None)

    table.put(msgspec.structs.replace(resource, tags=tags))
    return {}


def _listed(tags: dict[str, str]) -> list[Members]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def _found(plane: Plane, arn: str) -> tuple[ResourceTable[Resource], Resource]:
    """Return the resource that an ARN names, and the table that it is in. Raises AwsError."""
    for table in plane.store.all_tables():
        for resource in table:
            if resource.arn == arn:
                return table, resource

    raise AwsError("ResourceNotFound", 400, f'Could not find resource "{arn}".')
