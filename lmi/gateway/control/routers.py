"""Operations of inference routers, and the targets that their callers name."""

from lmi.errors import shorten
from lmi.gateway.control import destinations
from lmi.gateway.control.listing import page
from lmi.gateway.control.plane import Plane
from lmi.gateway.control.resources import CREATING, ROUTER, RouterResource, common
from lmi.gateway.control.service_model import Members, invalid
from lmi.gateway.errors import ACCOUNT, invalid as invalid_invocation
from lmi.gateway.routing_target import RoutingTarget
from lmi.gateway.stores import AnswerRoots

PARTITION = "arn:aws:"
INSTANCE_POOL_ORDER = "InstancePoolOrder"


def create(plane: Plane, members: Members, region: str) -> Members:
    fields = common(ROUTER, members, region)
    token = members.get("ClientToken")
    for router in plane.store.routers:
        if token is not None and router.members.get("ClientToken") == token:
            if router.members != fields["members"]:
                raise ROUTER.conflict(f"ClientToken {token} came with other parameters before.")

            return router.described(ROUTER)

    targets = _targets(plane, members)
    resource = RouterResource(**fields, targets=targets)
    plane.routers.life(resource.name).create(resource)
    return resource.described(ROUTER)


def describe(plane: Plane, members: Members, region: str) -> Members:
    router = _find(plane, members, region)
    targets = []
    for target in router.targets:
        routing_target = _routing_target(plane, router, target)
        described = [destinations.described(place) for place in routing_target.destinations]
        targets.append({**target, "Destinations": described})

    description = router.described(ROUTER)
    description |= {
        "RoutingTargets": targets,
        "Status": router.status,
        "StatusReason": router.failure_reason or None,
    }
    return description


def list_all(plane: Plane, members: Members, region: str) -> Members:
    routers = plane.store.routers
    return page(ROUTER, routers, members, lambda router: router.described(ROUTER))


def update(plane: Plane, members: Members, region: str) -> Members:
    router = _find(plane, members, region)
    plane.routers.life(router.name).update(_targets(plane, members))
    return router.described(ROUTER)


def delete(plane: Plane, members: Members, region: str) -> Members:
    router = _find(plane, members, region)
    plane.routers.life(router.name).delete()
    return {}


def invoked_target(plane: Plane, name: str, target_name: str) -> RoutingTarget:
    """Return the target of a router that a request names. Raises AwsError."""
    router = plane.store.routers.get(name)
    if router is None:
        raise invalid_invocation(f"Inference router {name} of account {ACCOUNT} not found.")

    if not target_name:
        raise invalid_invocation(
            "1 validation error detected: Value null at 'routingTargetName' failed to satisfy "
            "constraint: Member must not be null"
        )

    if router.status == CREATING:
        raise invalid_invocation(f"Inference router {name} is not in service: {router.status}.")

    for target in router.targets:
        if target["Name"] == target_name:
            return _routing_target(plane, router, target)

    raise invalid_invocation(f"Routing target {target_name} of inference router {name} not found.")


def _find(plane: Plane, members: Members, region: str) -> RouterResource:
    return plane.store.routers.find(members["InferenceRouterName"], region)


def _routing_target(plane: Plane, router: RouterResource, target: Members) -> RoutingTarget:
    region = destinations.region_of(router.arn)
    answers = _answers(target)
    places = []
    for destination in target["Destinations"]:
        arn = destination["ResourceArn"]
        places.append(destinations.find(plane, arn, region, is_async=answers is not None))

    return RoutingTarget(
        name=target["Name"], region=region, destinations=tuple(places), answers=answers
    )


def _answers(target: Members) -> AnswerRoots | None:
    """Return where the answers of an asynchronous target go."""
    asynchronous = target.get("AsyncInferenceConfig")
    if asynchronous is None:
        return None

    places = asynchronous["OutputConfig"]
    return AnswerRoots(places["S3OutputPath"], places["S3FailurePath"])


def _targets(plane: Plane, members: Members) -> list[Members]:
    """Return the targets of a request as they are kept. Raises AwsError for one that cannot be
    served here.
    """
    targets = []
    names = set()
    for target in members["RoutingTargets"]:
        if target["Name"] in names:
            raise invalid(f"Names of routing targets must be unique, given {target['Name']} twice.")

        names.add(target["Name"])
        _check_target(plane, target)
        # A status is told and not kept.
        arns = [{"ResourceArn": place["ResourceArn"]} for place in target["Destinations"]]
        targets.append({**target, "Destinations": arns})

    return targets


def _check_target(plane: Plane, target: Members) -> None:
    name = target["Name"]
    answers = _answers(target)
    for root in answers or ():
        rule = plane.answers.broken_rule(root)
        if rule:
            raise invalid(f"S3OutputPath and S3FailurePath {rule}, given {shorten(root)}")

    arns = set()
    for destination in target["Destinations"]:
        arn = destination["ResourceArn"]
        if arn in arns:
            raise invalid(
                f"A destination must be once in routing target {name}, given {arn} twice."
            )

        arns.add(arn)
        if not arn.startswith(PARTITION):
            raise invalid(f"A destination must be in the partition of its router, given {arn}.")

        _check_mode(plane, name, arn, is_async=answers is not None)

    if target.get("RoutingPreference") == INSTANCE_POOL_ORDER:
        _check_pools(plane, target, is_async=answers is not None)


def _check_mode(plane: Plane, name: str, arn: str, is_async: bool) -> None:
    """Raise AwsError for an endpoint that takes no requests of this kind. One that is not there is
    accepted.
    """
    endpoint = destinations.endpoint_of(plane, arn)
    is_component = ":inference-component/" in arn
    if is_async and is_component:
        raise invalid(
            f"Routing target {name} is asynchronous and takes endpoints only, given {arn}."
        )

    if endpoint is not None and destinations.is_asynchronous(endpoint) != is_async:
        kind = "asynchronous" if is_async else "real-time"
        raise invalid(f"Routing target {name} is {kind}, which endpoint {arn} is not.")


def _check_pools(plane: Plane, target: Members, is_async: bool) -> None:
    """Raise AwsError for destinations that have no order of instance types in common. Every
    instance here is of the first type, so that nothing else comes of the order.
    """
    if not is_async:
        raise invalid(f"{INSTANCE_POOL_ORDER} is for asynchronous routing targets only.")

    orders = set()
    for destination in target["Destinations"]:
        endpoint = destinations.endpoint_of(plane, destination["ResourceArn"])
        if endpoint is not None:
            [variant, *_] = endpoint.deployment.config["ProductionVariants"]
            orders.add(_types_by_priority(variant.get("InstancePools") or []))

    if len(orders) > 1 or any(len(order) < 2 for order in orders):
        raise invalid(
            f"{INSTANCE_POOL_ORDER} needs endpoints with the same two or more instance types, each "
            f"with a priority of its own, in the same order."
        )


def _types_by_priority(pools: list[Members]) -> tuple[str, ...]:
    """Return the instance types of pools in their order, none where two have one priority."""
    types = {pool["Priority"]: pool["InstanceType"] for pool in pools}
    if len(types) < len(pools):
        return ()

    return tuple(types[priority] for priority in sorted(types))
