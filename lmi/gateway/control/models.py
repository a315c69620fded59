"""Operations of models: what is to run, as containers."""

from lmi.gateway.control.plain_resources import PlainResources
from lmi.gateway.control.plane import Plane
from lmi.gateway.control.resources import MODEL, Resource
from lmi.gateway.control.service_model import Members, invalid

MODELS = PlainResources(MODEL, lambda store: store.models)


def create(plane: Plane, members: Members, region: str) -> Members:
    container = _container(members)
    plane.definitions.check(container)
    return MODELS.create(plane, members, region)


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
