"""What the control plane keeps of each resource, and the names that AWS has for it."""

import re
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from lmi.errors import shorten
from lmi.gateway.control.service_model import Members, invalid
from lmi.gateway.errors import ACCOUNT, AwsError
from lmi.gateway.stores import AnswerRoots

# Names are parts of paths: of the logs of containers.
PATH_NAME = "[a-zA-Z0-9][a-zA-Z0-9-]{0,62}"
CREATING = "Creating"
IN_SERVICE = "InService"
UPDATING = "Updating"
SYSTEM_UPDATING = "SystemUpdating"
ROLLING_BACK = "RollingBack"
DELETING = "Deleting"
FAILED = "Failed"
# What has one of these is changed by nobody else.
UNDER_WAY = frozenset((CREATING, UPDATING, SYSTEM_UPDATING, ROLLING_BACK, DELETING))


@dataclass(frozen=True)
class ResourceKind:
    """A kind of resource. Its noun begins the names of its members: ModelName, ModelArn."""

    noun: str
    # In an ARN.
    place: str
    # In messages.
    words: str

    @property
    def name_member(self) -> str:
        return f"{self.noun}Name"

    def arn(self, name: str, region: str) -> str:
        return f"arn:aws:sagemaker:{region}:{ACCOUNT}:{self.place}/{name}"

    def missing(self, name: str, region: str) -> AwsError:
        return invalid(f'Could not find {self.words} "{self.arn(name, region)}".')

    def taken(self, arn: str) -> AwsError:
        return invalid(f'Cannot create already existing {self.words} "{arn}".')

    def in_progress(self, arn: str) -> AwsError:
        return invalid(f'Cannot update in-progress {self.words} "{arn}".')


MODEL = ResourceKind("Model", "model", "model")
CONFIG = ResourceKind("EndpointConfig", "endpoint-config", "endpoint configuration")
ENDPOINT = ResourceKind("Endpoint", "endpoint", "endpoint")
COMPONENT = ResourceKind("InferenceComponent", "inference-component", "inference component")


class RouterKind(ResourceKind):
    """The kind of inference routers, whose errors have classes of their own."""

    def missing(self, name: str, region: str) -> AwsError:
        return AwsError("ResourceNotFound", 400, super().missing(name, region).message)

    def taken(self, arn: str) -> AwsError:
        return AwsError("ResourceAlreadyExists", 400, super().taken(arn).message)

    def in_progress(self, arn: str) -> AwsError:
        return self.conflict(super().in_progress(arn).message)

    def conflict(self, message: str) -> AwsError:
        return AwsError("ConflictException", 400, message)


ROUTER = RouterKind("InferenceRouter", "inference-router", "inference router")


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """A resource. `members` are what its client said when it created it. Times are in seconds since
    1970.
    """

    name: str
    arn: str
    created_s: float
    modified_s: float
    members: Members
    tags: dict[str, str] = {}
    status: str = ""
    failure_reason: str = ""

    def described(self, kind: ResourceKind) -> Members:
        """Return the members that every answer about a resource may have."""
        return {
            **self.members,
            f"{kind.noun}Arn": self.arn,
            f"{kind.noun}Status": self.status or None,
            "FailureReason": self.failure_reason or None,
            "CreationTime": self.created_s,
            "LastModifiedTime": self.modified_s,
        }


class VariantSize(msgspec.Struct, frozen=True):
    """How much of an endpoint's traffic a variant gets, and how many instances serve it."""

    weight: float
    num_instances: int


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What an endpoint runs. It stays as it is when its configuration or a model is deleted."""

    config: Members
    # The container of each variant that has a model.
    containers: dict[str, Members]
    sizes: dict[str, VariantSize]


class EndpointResource(Resource, frozen=True, kw_only=True):
    """An endpoint. `next` is what an update is about to put in the place of `deployment`."""

    deployment: Deployment
    next: Deployment | None = None
    last_deployment_config: Members | None = None


class ComponentResource(Resource, frozen=True, kw_only=True):
    """An inference component. Its members name the endpoint and the variant.

    It runs `num_copies` of `container`; one with `base` is an adapter in the copies of that
    component, and runs none.
    """

    container: Members
    num_copies: int
    base: str = ""


class RouterResource(Resource, frozen=True, kw_only=True):
    """An inference router. `next_targets` are what an update is about to put in the place of
    `targets`.
    """

    targets: list[Members]
    next_targets: list[Members] | None = None


def tags_of(members: Members) -> dict[str, str]:
    """Return the tags that a client gives a new resource. Raises AwsError for a key twice."""
    tags: dict[str, str] = {}
    for tag in members.get("Tags") or []:
        if tag["Key"] in tags:
            raise invalid(f"Tag keys must be unique, given {tag['Key']} twice.")

        tags[tag["Key"]] = tag["Value"]

    return tags


def answer_roots(config: Members) -> AnswerRoots:
    """Return where a configuration wants answers of async invocations, and their errors, which are
    beside the answers if it does not say.
    """
    asynchronous = config.get("AsyncInferenceConfig") or {}
    places = asynchronous.get("OutputConfig") or {}
    output = places.get("S3OutputPath") or ""
    return AnswerRoots(output, places.get("S3FailurePath") or output)


def check_name(name: str) -> str:
    """Return a name that may be part of a path. Raises AwsError for any other, whatever botocore's
    model allows.
    """
    if not re.fullmatch(PATH_NAME, name):
        raise invalid(f"A name must match {PATH_NAME}, given {shorten(name)}.")

    return name


def common(kind: ResourceKind, members: Members, region: str) -> dict[str, Any]:
    """Return the fields that a new resource of any kind has."""
    now_s = time.time()
    name = check_name(members[kind.name_member])
    return {
        "name": name,
        "arn": kind.arn(name, region),
        "created_s": now_s,
        "modified_s": now_s,
        "members": {key: value for key, value in members.items() if key != "Tags"},
        "tags": tags_of(members),
    }
