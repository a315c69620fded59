"""Operations of endpoint configurations: which models serve an endpoint, with which shares of its
traffic.
"""

from lmi.errors import shorten
from lmi.gateway.control.fleet import sizes_of
from lmi.gateway.control.models import container_of
from lmi.gateway.control.plain_resources import PlainResources
from lmi.gateway.control.plane import Plane
from lmi.gateway.control.resources import CONFIG, Deployment, answer_roots, check_name
from lmi.gateway.control.service_model import Members, invalid
from lmi.gateway.control.strategy import check_routing

CONFIGS = PlainResources(CONFIG, lambda store: store.configs)


def create(plane: Plane, members: Members, region: str) -> Members:
    variants = members["ProductionVariants"]
    names = {check_name(variant["VariantName"]) for variant in variants}
    if len(names) < len(variants):
        raise invalid("Each production variant must have a name of its own.")

    if members.get("ShadowProductionVariants"):
        raise invalid("ShadowProductionVariants are not run by this gateway.")

    for root in answer_roots(members):
        rule = plane.answers.broken_rule(root) if root else ""
        if rule:
            raise invalid(f"S3OutputPath and S3FailurePath {rule}, given {shorten(root)}")

    num_models = 0
    for variant in variants:
        check_routing(variant)
        if "ModelName" in variant:
            num_models += 1
            plane.store.models.find(variant["ModelName"], region)

    if num_models not in (0, len(variants)):
        raise invalid("Either every production variant must have a ModelName, or none.")

    return CONFIGS.create(plane, members, region)


def deployment(plane: Plane, name: str, region: str) -> Deployment:
    """Return what an endpoint of this configuration runs. Raises AwsError if a part is gone."""
    config = plane.store.configs.find(name, region).members
    containers = {}
    for variant in config["ProductionVariants"]:
        if "ModelName" in variant:
            model = plane.store.models.find(variant["ModelName"], region)
            containers[variant["VariantName"]] = container_of(model)

    return Deployment(
        config=config, containers=containers, sizes=sizes_of(config["ProductionVariants"])
    )
