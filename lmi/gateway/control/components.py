"""Operations of inference components."""

import msgspec

from lmi.gateway.control.component import ComponentLife
from lmi.gateway.control.listing import page
from lmi.gateway.control.models import container_of
from lmi.gateway.control.plane import Plane
from lmi.gateway.control.resources import COMPONENT, ENDPOINT, ComponentResource, common
from lmi.gateway.control.service_model import Members, invalid


def create(plane: Plane, members: Members, region: str) -> Members:
    specification = _specification(members)
    base = specification.get("BaseInferenceComponentName", "")
    endpoint = plane.store.endpoints.find(members["EndpointName"], region)
    variants = endpoint.deployment.config["ProductionVariants"]
    if base:
        _check_base(plane, base, endpoint.name, region)
    elif members.get("VariantName") not in [variant["VariantName"] for variant in variants]:
        raise invalid(f"VariantName must be one of endpoint {endpoint.name}.")

    if endpoint.deployment.containers:
        raise invalid(
            f"Endpoint {endpoint.name} serves models: a configuration for inference components has "
            f"no ModelName."
        )

    members = {"VariantName": variants[0]["VariantName"], **members}
    component = ComponentResource(
        **common(COMPONENT, members, region),
        container=_container(plane, specification, region),
        num_copies=(members.get("RuntimeConfig") or {}).get("CopyCount", 1),
        base=base,
    )
    plane.components.life(component.name).create(component)
    return component.described(COMPONENT)


def describe(plane: Plane, members: Members, region: str) -> Members:
    component = plane.store.components.find(members["InferenceComponentName"], region)
    return _described(plane, component, region)


def list_all(plane: Plane, members: Members, region: str) -> Members:
    def describe_one(component: ComponentResource) -> Members:
        return _described(plane, component, region)

    return page(COMPONENT, plane.store.components, members, describe_one)


def update(plane: Plane, members: Members, region: str) -> Members:
    component = plane.store.components.find(members["InferenceComponentName"], region)
    runtime = members.get("RuntimeConfig") or {}
    num_copies = runtime.get("CopyCount", component.num_copies)
    if members.get("Specification") or members.get("Specifications"):
        specification = _specification(members)
        if specification.get("BaseInferenceComponentName", "") != component.base:
            raise invalid("BaseInferenceComponentName cannot be changed.")

        changed = msgspec.structs.replace(
            component,
            members={**component.members, "Specification": specification},
            container=_container(plane, specification, region),
            num_copies=num_copies,
        )
        plane.components.life(component.name).update(changed)
    else:
        _resize(plane, component, num_copies)

    return component.described(COMPONENT)


def update_runtime(plane: Plane, members: Members, region: str) -> Members:
    component = plane.store.components.find(members["InferenceComponentName"], region)
    _resize(plane, component, members["DesiredRuntimeConfig"]["CopyCount"])
    return component.described(COMPONENT)


def delete(plane: Plane, members: Members, region: str) -> Members:
    component = plane.store.components.find(members["InferenceComponentName"], region)
    for other in plane.store.components:
        if other.base == component.name:
            raise invalid(
                f"Inference component {component.name} is the base of {other.name}, which must be "
                f"deleted first."
            )

    plane.components.life(component.name).delete()
    return {}


def _resize(plane: Plane, component: ComponentResource, num_copies: int) -> None:
    if component.base:
        raise invalid("An adapter has the copies of its base component, and no CopyCount.")

    plane.components.life(component.name).resize(num_copies)


def _specification(members: Members) -> Members:
    """Return what a component runs. Raises AwsError where there is none or more than one."""
    if members.get("Specifications") or not members.get("Specification"):
        raise invalid("Specification must be given: this gateway has no instance pools.")

    specification: Members = members["Specification"]
    return specification


def _check_base(plane: Plane, base: str, endpoint: str, region: str) -> None:
    resource = plane.store.components.find(base, region)
    if resource.base or resource.members["EndpointName"] != endpoint:
        raise invalid(
            f"BaseInferenceComponentName must be a component of endpoint {endpoint} that is no "
            f"adapter, given {base}."
        )


def _container(plane: Plane, specification: Members, region: str) -> Members:
    """Return the container of a component, or where an adapter is. Raises AwsError."""
    container: Members = specification.get("Container") or {}
    if specification.get("BaseInferenceComponentName"):
        if not container.get("ArtifactUrl"):
            raise invalid("Container.ArtifactUrl must name the files of the adapter.")

        plane.definitions.place(container["ArtifactUrl"])
        return container

    if bool(container) == ("ModelName" in specification):
        raise invalid("Specification must have either ModelName or Container.")

    if not container:
        return container_of(plane.store.models.find(specification["ModelName"], region))

    container = {**container, "ModelDataUrl": container.get("ArtifactUrl")}
    plane.definitions.check(container)
    return container


def _described(plane: Plane, component: ComponentResource, region: str) -> Members:
    life: ComponentLife = plane.components.life(component.name)
    specification = dict(component.members["Specification"])
    image = component.container.get("Image")
    if specification.get("Container") and image:
        images = {"SpecifiedImage": image, "ResolvedImage": image}
        specification["Container"] = {**specification["Container"], "DeployedImage": images}

    description = component.described(COMPONENT)
    description |= {
        "EndpointArn": ENDPOINT.arn(component.members["EndpointName"], region),
        "Specification": specification,
    }
    if not component.base:
        description["RuntimeConfig"] = {
            "DesiredCopyCount": component.num_copies,
            "CurrentCopyCount": life.num_ready,
        }

    return description
