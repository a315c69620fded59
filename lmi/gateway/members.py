"""The members of AWS's operations that are headers, with their rules, and which of them a
container gets.

The table is botocore's models of the SageMaker runtimes, in their words; a test holds both equal.
"""

import re
from dataclasses import dataclass

from lmi.errors import shorten
from lmi.gateway.errors import invalid

# The prefix of the headers of SageMaker.
PREFIX = "X-Amzn-SageMaker-"
# The patterns of several members, in Java's words.
FOLDER = "^(?!s3:|https:)[a-zA-Z0-9!_.*'()/-]+$"
ASCII = r"\p{ASCII}*"
PRINTABLE = r"\A\S[\p{Print}]*\z"
# As the model of inference routers writes them.
ROUTER_PRINTABLE = r"\S[\p{Print}]*"
ROUTER_NAMES = "[a-zA-Z0-9](-*[a-zA-Z0-9])*"
NAME = "^[a-zA-Z0-9](-*[a-zA-Z0-9])*"


@dataclass(frozen=True)
class AwsMember:
    """A member of an operation, and the rule that its value must keep."""

    name: str
    header: str
    # None for a whole number. The bounds are then those of the number, else of its length.
    pattern: str | None
    minimum: int
    maximum: int

    def check(self, value: str) -> str:
        """Return the value. Raises AwsError in AWS's own words."""
        rule = self.broken_rule(value)
        if rule:
            member = self.name[0].lower() + self.name[1:]
            raise invalid(
                f"1 validation error detected: Value {shorten(value)} at '{member}' "
                f"failed to satisfy constraint: Member must {rule}"
            )

        return value

    def broken_rule(self, value: str) -> str:
        """Return the rule that the value breaks, or ""."""
        if self.pattern is None:
            if not re.fullmatch("[0-9]{1,9}", value):
                return "be a whole number"

            measure = "value"
            size = int(value)
        else:
            measure = "length"
            size = len(value)

        if size < self.minimum:
            return f"have {measure} greater than or equal to {self.minimum}"

        if size > self.maximum:
            return f"have {measure} less than or equal to {self.maximum}"

        if self.pattern is not None and not re.fullmatch(spelled(self.pattern), value, re.DOTALL):
            return f"satisfy regular expression pattern: {self.pattern}"

        return ""


def spelled(pattern: str) -> str:
    """Return a pattern of Java as Python spells it."""
    pattern = pattern.replace(r"\p{ASCII}", r"[\x00-\x7f]")
    pattern = pattern.replace(r"\p{Print}", r"\x20-\x7e")
    return pattern.replace(r"\z", r"\Z")


ENDPOINT_NAME = AwsMember("EndpointName", "", NAME, 0, 63)
COMPONENT_NAME = AwsMember(
    "InferenceComponentName",
    PREFIX + "Inference-Component",
    r"^[a-zA-Z0-9]([\-a-zA-Z0-9]*[a-zA-Z0-9])?$",
    0,
    63,
)
CONTENT_TYPE = AwsMember("ContentType", "Content-Type", ASCII, 0, 1024)
ACCEPT = AwsMember("Accept", "Accept", ASCII, 0, 1024)
OTHER_ACCEPT = AwsMember("Accept", PREFIX + "Accept", ASCII, 0, 1024)
SESSION_ID = AwsMember("SessionId", PREFIX + "Session-Id", NAME + "$", 0, 256)
ROUTER_NAME = AwsMember("InferenceRouterName", "", ROUTER_NAMES, 1, 63)
# The members of both operations of routers.
OF_ROUTERS = (
    AwsMember("RoutingTargetName", PREFIX + "Routing-Target-Name", ROUTER_NAMES, 1, 63),
    AwsMember("CustomAttributes", PREFIX + "Custom-Attributes", ASCII, 0, 1024),
    AwsMember("InferenceId", PREFIX + "Inference-Id", ROUTER_PRINTABLE, 1, 64),
)
OTHER_CONTENT_TYPE = AwsMember("ContentType", PREFIX + "Content-Type", ASCII, 0, 1024)
TIMES = (
    AwsMember("RequestTTLSeconds", PREFIX + "RequestTTLSeconds", None, 60, 21600),
    AwsMember("InvocationTimeoutSeconds", PREFIX + "InvocationTimeoutSeconds", None, 1, 3600),
)
COMMON = (
    AwsMember("CustomAttributes", PREFIX + "Custom-Attributes", ASCII, 0, 1024),
    AwsMember("InferenceId", PREFIX + "Inference-Id", PRINTABLE, 1, 64),
)
ROUTED = (
    AwsMember("TargetVariant", PREFIX + "Target-Variant", NAME, 0, 63),
    AwsMember("TargetContainerHostname", PREFIX + "Target-Container-Hostname", NAME, 0, 63),
    COMPONENT_NAME,
    AwsMember("PrefixAwareId", PREFIX + "Prefix-Aware-Id", PRINTABLE, 1, 64),
)
# Source: a contract of AWS's API for streams in both directions.
PAIR = r"[a-zA-Z0-9][A-Za-z0-9_-]*=(?:[A-Za-z0-9._~\-]|%[0-9A-Fa-f]{2})+"
QUERY = f"^{PAIR}(?:&{PAIR})*$"
STREAMED = (
    AwsMember(
        "ModelInvocationPath",
        PREFIX + "Model-Invocation-Path",
        r"^[A-Za-z0-9\-._]+(?:/[A-Za-z0-9\-._]+)*$",
        0,
        100,
    ),
    AwsMember("ModelQueryString", PREFIX + "Model-Query-String", QUERY, 0, 2048),
)
# The members of each operation that are headers.
MEMBERS: dict[str, tuple[AwsMember, ...]] = {
    "InvokeEndpoint": (
        *COMMON,
        *ROUTED,
        CONTENT_TYPE,
        ACCEPT,
        AwsMember("TargetModel", PREFIX + "Target-Model", PRINTABLE, 1, 1024),
        AwsMember("EnableExplanations", PREFIX + "Enable-Explanations", ".*", 1, 64),
        AwsMember(
            "SessionId",
            PREFIX + "Session-Id",
            "^(NEW_SESSION)$|^[a-zA-Z0-9](-*[a-zA-Z0-9])*$",
            0,
            256,
        ),
    ),
    "InvokeEndpointWithResponseStream": (*COMMON, *ROUTED, CONTENT_TYPE, OTHER_ACCEPT, SESSION_ID),
    "InvokeEndpointAsync": (
        *COMMON,
        OTHER_CONTENT_TYPE,
        OTHER_ACCEPT,
        AwsMember("S3OutputPathExtension", PREFIX + "S3OutputPathExtension", FOLDER, 1, 512),
        AwsMember(
            "Filename", PREFIX + "Filename", r"^(?!.*\..*\.)[a-zA-Z0-9][a-zA-Z0-9-_\.]*$", 1, 32
        ),
        *TIMES,
    ),
    "InvokeInferenceRouter": (
        *OF_ROUTERS,
        CONTENT_TYPE,
        ACCEPT,
        AwsMember("PrefixAwareId", PREFIX + "Prefix-Aware-Id", ROUTER_PRINTABLE, 1, 64),
    ),
    "InvokeInferenceRouterAsync": (
        *OF_ROUTERS,
        OTHER_CONTENT_TYPE,
        OTHER_ACCEPT,
        AwsMember(
            "S3OutputPathExtension",
            PREFIX + "S3OutputPathExtension",
            "(?!s3:|https:)[a-zA-Z0-9!_.*'()/-]+",
            1,
            512,
        ),
        AwsMember(
            "Filename", PREFIX + "Filename", r"(?!.*\..*\.)[a-zA-Z0-9][a-zA-Z0-9-_\.]*", 1, 64
        ),
        *TIMES,
    ),
    # botocore does not have it. AWS's own client sends the first three, the others are as above.
    "InvokeEndpointWithBidirectionalStream": (
        *STREAMED,
        *COMMON,
        *ROUTED,
        SESSION_ID,
    ),
    # At the path of OpenAI's API.
    "chat": (*COMMON, CONTENT_TYPE, ACCEPT, SESSION_ID),
}
# What a container gets of them, under which name. The others are for the platform.
TO_CONTAINER = {
    "ContentType": "Content-Type",
    "Accept": "Accept",
    "CustomAttributes": PREFIX + "Custom-Attributes",
    "InferenceId": PREFIX + "Inference-Id",
    "SessionId": PREFIX + "Session-Id",
    "TargetModel": PREFIX + "Target-Model",
}
