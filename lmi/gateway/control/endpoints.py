"""Operations of endpoints."""

import msgspec

from lmi.gateway.control import configs
from lmi.gateway.control.endpoint import EndpointLife
from lmi.gateway.control.listing import page
from lmi.gateway.control.plane import Plane
from lmi.gateway.control.resources import (
    ENDPOINT,
    Deployment,
    EndpointResource,
    VariantSize,
    common,
)
from lmi.gateway.control.service_model import Members, invalid


def create(plane: Plane, members: Members, region: str) -> Members:
    deployment = configs.deployment(plane, members["EndpointConfigName"], region)
    resource = EndpointResource(
        **common(ENDPOINT, members, region),
        deployment=deployment,
        last_deployment_config=members.get("DeploymentConfig"),
    )
    plane.endpoints.life(resource.name).create(resource)
    return resource.described(ENDPOINT)


def describe(plane: Plane, members: Members, region: str) -> Members:
    resource = plane.store.endpoints.find(members["EndpointName"], region)
    life = plane.endpoints.life(resource.name)
    config = resource.deployment.config
    description = resource.described(ENDPOINT)
    description |= {
        "EndpointConfigName": config["EndpointConfigName"],
        "ProductionVariants": _variants(life, resource.deployment),
        "LastDeploymentConfig": resource.last_deployment_config,
    }
    for member in ("AsyncInferenceConfig", "ExplainerConfig", "MetricsConfig"):
        description[member] = config.get(member)

    if resource.next is not None:
        description["PendingDeploymentSummary"] = {
            "EndpointConfigName": resource.next.config["EndpointConfigName"],
            "StartTime": resource.modified_s,
        }

    return description


def list_all(plane: Plane, members: Members, region: str) -> Members:
    resources = plane.store.endpoints
    return page(ENDPOINT, resources, members, lambda resource: resource.described(ENDPOINT))


def update(plane: Plane, members: Members, region: str) -> Members:
    resource = plane.store.endpoints.find(members["EndpointName"], region)
    deployment = configs.deployment(plane, members["EndpointConfigName"], region)
    if members.get("RetainAllVariantProperties"):
        left_out = set()
        for variant_property in members.get("ExcludeRetainedVariantProperties") or []:
            left_out.add(variant_property["VariantPropertyType"])

        sizes = _retained(deployment.sizes, resource.deployment.sizes, left_out)
        deployment = msgspec.structs.replace(deployment, sizes=sizes)

    deployment_config = members.get("DeploymentConfig")
    if members.get("RetainDeploymentConfig"):
        deployment_config = resource.last_deployment_config

    plane.endpoints.life(resource.name).update(deployment, deployment_config)
    return resource.described(ENDPOINT)


def update_weights(plane: Plane, members: Members, region: str) -> Members:
    resource = plane.store.endpoints.find(members["EndpointName"], region)
    sizes = dict(resource.deployment.sizes)
    for wanted in members["DesiredWeightsAndCapacities"]:
        name = wanted["VariantName"]
        if name not in sizes:
            raise invalid(f'Could not find variant "{name}" of endpoint "{resource.arn}".')

        num_instances = wanted.get("DesiredInstanceCount", sizes[name].num_instances)
        if num_instances < 1:
            raise invalid("DesiredInstanceCount must be at least 1 at this gateway.")

        weight = float(wanted.get("DesiredWeight", sizes[name].weight))
        sizes[name] = VariantSize(weight, num_instances)

    plane.endpoints.life(resource.name).resize(sizes)
    return resource.described(ENDPOINT)


def delete(plane: Plane, members: Members, region: str) -> Members:
    resource = plane.store.endpoints.find(members["EndpointName"], region)
    for component in plane.store.components:
        if component.members["EndpointName"] == resource.name:
            raise invalid(
                f'Cannot delete endpoint "{resource.arn}": inference component {component.name} '
                f"must be deleted first."
            )

    plane.endpoints.life(resource.name).delete()
    return {}


def _retained(
    new: dict[str, VariantSize], former: dict[str, VariantSize], left_out: set[str]
) -> dict[str, VariantSize]:
    """Return the sizes of new variants, where those that were there keep theirs."""
    sizes = dict(new)
    for name in new.keys() & former.keys():
        weight = former[name].weight
        if "DesiredWeight" in left_out:
            weight = new[name].weight

        num_instances = former[name].num_instances
        if "DesiredInstanceCount" in left_out:
            num_instances = new[name].num_instances

        sizes[name] = VariantSize(weight, num_instances)

    return sizes


def _variants(life: EndpointLife, deployment: Deployment) -> list[Members]:
    variants = []
    for variant in deployment.config["ProductionVariants"]:
        name = variant["VariantName"]
        size = deployment.sizes[name]
        num_ready = size.num_instances
        images = []
        if name in deployment.containers:
            num_ready = life.num_ready(name)
            image = deployment.containers[name]["Image"]
            images.append({"SpecifiedImage": image, "ResolvedImage": image})

        variants.append(
            {
                **variant,
                "DeployedImages": images,
                "CurrentWeight": size.weight,
                "DesiredWeight": size.weight,
                "CurrentInstanceCount": num_ready,
                "DesiredInstanceCount": size.num_instances,
            }
        )

    return variants
