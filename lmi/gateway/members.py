"""The members of SageMaker's operations that are sent as headers: their rules, and under which name
a container gets them.

In botocore's words a member is a parameter of an operation, such as `CustomAttributes` of
`InvokeEndpoint`. The tables are its models of the SageMaker runtimes; a test holds both equal.
"""

import re
from dataclasses import dataclass

from lmi.errors import shorten
from lmi.gateway.errors import invalid

# The prefix of the headers of SageMaker.
PREFIX = "X-Amzn-SageMaker-"

# The patterns of members, as Java spells regular expressions.
ASCII = r"\p{ASCII}*"
PRINTABLE = r"\A\S[\p{Print}]*\z"
NAME = "^[a-zA-Z0-9](-*[a-zA-Z0-9])*"
COMPONENT = r"^[a-zA-Z0-9]([\-a-zA-Z0-9]*[a-zA-Z0-9])?$"
FOLDER = "^(?!s3:|https:)[a-zA-Z0-9!_.*'()/-]+$"
FILE = r"^(?!.*\..*\.)[a-zA-Z0-9][a-zA-Z0-9-_\.]*$"
NEW_OR_SESSION = "^(NEW_SESSION)$|^[a-zA-Z0-9](-*[a-zA-Z0-9])*$"

# Patterns of inference routers, whose model writes them otherwise.
ROUTER_PRINTABLE = r"\S[\p{Print}]*"
ROUTER_NAMES = "[a-zA-Z0-9](-*[a-zA-Z0-9])*"
ROUTER_FOLDER = "(?!s3:|https:)[a-zA-Z0-9!_.*'()/-]+"
ROUTER_FILE = r"(?!.*\..*\.)[a-zA-Z0-9][a-zA-Z0-9-_\.]*"

# Patterns of streams in both directions. Source: a contract of AWS's API for these.
PATH = r"^[A-Za-z0-9\-._]+(?:/[A-Za-z0-9\-._]+)*$"
PAIR = r"[a-zA-Z0-9][A-Za-z0-9_-]*=(?:[A-Za-z0-9._~\-]|%[0-9A-Fa-f]{2})+"
QUERY = f"^{PAIR}(?:&{PAIR})*$"


@dataclass(frozen=True)
class AwsMember:
    """A member of an operation, and the rules that its value must keep."""

    name: str
    # "" for a member that is part of the path.
    header: str
    # None for a whole number.
    pattern: str | None
    # The bounds of a whole number, or else of the value's length.
    minimum: int
    maximum: int

    def check(self, value: str) -> str:
        """Return the value. If it breaks a rule, raise AwsError in AWS's own words."""
        rule = self.broken_rule(value)
        if rule:
            member = self.name[0].lower() + self.name[1:]
            raise invalid(
                f"1 validation error detected: Value {shorten(value)} at '{member}' "
                f"failed to satisfy constraint: Member must {rule}"
            )

        return value

    def broken_rule(self, value: str) -> str:
        """Return the rule that the value breaks, or "" if it keeps all."""
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
ROUTER_NAME = AwsMember("InferenceRouterName", "", ROUTER_NAMES, 1, 63)
COMPONENT_NAME = AwsMember(
    "InferenceComponentName", PREFIX + "Inference-Component", COMPONENT, 0, 63
)
CONTENT_TYPE = AwsMember("ContentType", "Content-Type", ASCII, 0, 1024)
ACCEPT = AwsMember("Accept", "Accept", ASCII, 0, 1024)
SESSION_ID = AwsMember("SessionId", PREFIX + "Session-Id", NAME + "$", 0, 256)
# The same two members, under the headers of asynchronous operations. A stream has the second one.
OTHER_CONTENT_TYPE = AwsMember("ContentType", PREFIX + "Content-Type", ASCII, 0, 1024)
OTHER_ACCEPT = AwsMember("Accept", PREFIX + "Accept", ASCII, 0, 1024)

# The members of all operations of endpoints.
COMMON = (
    AwsMember("CustomAttributes", PREFIX + "Custom-Attributes", ASCII, 0, 1024),
    AwsMember("InferenceId", PREFIX + "Inference-Id", PRINTABLE, 1, 64),
)
# The members that say which container of an endpoint answers.
ROUTED = (
    AwsMember("TargetVariant", PREFIX + "Target-Variant", NAME, 0, 63),
    AwsMember("TargetContainerHostname", PREFIX + "Target-Container-Hostname", NAME, 0, 63),
    COMPONENT_NAME,
    AwsMember("PrefixAwareId", PREFIX + "Prefix-Aware-Id", PRINTABLE, 1, 64),
)
# The members that name a path of the container, for a stream in both directions.
STREAMED = (
    AwsMember("ModelInvocationPath", PREFIX + "Model-Invocation-Path", PATH, 0, 100),
    AwsMember("ModelQueryString", PREFIX + "Model-Query-String", QUERY, 0, 2048),
)
# The members of both operations of inference routers.
OF_ROUTERS = (
    AwsMember("RoutingTargetName", PREFIX + "Routing-Target-Name", ROUTER_NAMES, 1, 63),
    AwsMember("CustomAttributes", PREFIX + "Custom-Attributes", ASCII, 0, 1024),
    AwsMember("InferenceId", PREFIX + "Inference-Id", ROUTER_PRINTABLE, 1, 64),
)
# The limits of both asynchronous operations.
TIMES = (
    AwsMember("RequestTTLSeconds", PREFIX + "RequestTTLSeconds", None, 60, 21600),
    AwsMember("InvocationTimeoutSeconds", PREFIX + "InvocationTimeoutSeconds", None, 1, 3600),
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
        AwsMember("SessionId", PREFIX + "Session-Id", NEW_OR_SESSION, 0, 256),
    ),
    "InvokeEndpointWithResponseStream": (
        *COMMON,
        *ROUTED,
        CONTENT_TYPE,
        OTHER_ACCEPT,
        SESSION_ID,
    ),
    "InvokeEndpointAsync": (
        *COMMON,
        OTHER_CONTENT_TYPE,
        OTHER_ACCEPT,
        AwsMember("S3OutputPathExtension", PREFIX + "S3OutputPathExtension", FOLDER, 1, 512),
        AwsMember("Filename", PREFIX + "Filename", FILE, 1, 32),
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
        AwsMember("S3OutputPathExtension", PREFIX + "S3OutputPathExtension", ROUTER_FOLDER, 1, 512),
        AwsMember("Filename", PREFIX + "Filename", ROUTER_FILE, 1, 64),
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
    "chat": (
        *COMMON,
        CONTENT_TYPE,
        ACCEPT,
        SESSION_ID,
    ),
}
# The header in which a container gets a member. The other members are for the platform alone.
TO_CONTAINER = {
    "ContentType": "Content-Type",
    "Accept": "Accept",
    "CustomAttributes": PREFIX + "Custom-Attributes",
    "InferenceId": PREFIX + "Inference-Id",
    "SessionId": PREFIX + "Session-Id",
    "TargetModel": PREFIX + "Target-Model",
}
