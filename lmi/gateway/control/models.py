"""Operations of models: what is to run, as containers."""

from lmi.gateway.control.listing import page
from lmi.gateway.control.plane import Plane
from lmi.gateway.control.resources import MODEL, Resource, common
from lmi.gateway.control.service_model import Members, invalid


def create(plane: Plane, members: Members, region: str) -> Members:
    container = _container(members)
    plane.definitions.check(container)
    resource = Resource(**common(MODEL, members, region))
    plane.store.models.add(resource)
    return resource.described(MODEL)


def describe(plane: Plane, members: Members, region: str) -> Members:
    return plane.store.models.find(members["ModelName"], region).described(MODEL)


def list_all(plane: Plane, members: Members, region: str) -> Members:
    return page(MODEL, plane.store.models, members, lambda resource: resource.described(MODEL))


def delete(plane: Plane, members: Members, region: str) -> Members:
    name = members["ModelName"]
    plane.store.models.find(name, region)
    plane.store.models.remove(name)
    return {}


def container_of(resource: Resource) -> Members:
    """Return the container that a model is."""
    return _container(resource.members)


def _container(members: Members) -> Members:
    containers = list(members.get("Containers") or [])
    if members.get("PrimaryContainer"):
        containers.append(members["PrimaryContainer"])

    if len(containers) != 1:
        raise invalid(
            f"This gateway runs models of one container, PrimaryContainer or a list of one, given "
            f"{len(containers)}."
        )

    container: Members = containers[0]
    return container
