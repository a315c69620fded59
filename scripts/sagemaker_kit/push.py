"""The plan that brings an image of this machine into ECR, AWS's registry of images."""

import base64
import re
from argparse import Namespace

from scripts.sagemaker_kit.steps import Call, Command, Plan, Refused

REPOSITORY = re.compile(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/([a-z0-9._/-]+)")


def push(given: Namespace) -> Plan:
    """Create the repository if there is none, log docker in, tag and push. The tag is NAME."""
    match = REPOSITORY.fullmatch(given.repository)
    if match is None:
        raise Refused(f"--repository takes ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME, given {given.repository}")
    account, region, repository = match.groups()
    if given.region not in (None, region):
        raise Refused(f"--repository is in {region} and --region is {given.region}")
    target = f"{given.repository}:{given.name}"
    wanted = {"registryId": account, "repositoryName": repository}
    yield Call("ecr", "CreateRepository", wanted, "RepositoryAlreadyExistsException", region)
    password = _password((yield Call("ecr", "GetAuthorizationToken", {}, region=region)))
    registry = given.repository.partition("/")[0]
    yield Command(("docker", "login", "--username", "AWS", "--password-stdin", registry), password)
    yield Command(("docker", "tag", given.image, target))
    yield Command(("docker", "push", target))
    return [f"{target}\n".encode()]


def _password(answer: dict) -> str:
    """ECR's token is base64 of `AWS:PASSWORD`. In a dry run there is none."""
    tokens = [each["authorizationToken"] for each in answer.get("authorizationData", [])]
    return base64.b64decode(tokens[0]).decode().partition(":")[2] if tokens else ""
