"""The members of AWS's operations that travel as headers, with the rules that a value must keep.

The table is botocore's model of the SageMaker runtime, in its words; a test holds both equal. A rule is a pattern and
the length of a text, or without a pattern the least and the greatest whole number. InputLocation is not in it, because
the gateway takes files where AWS takes only objects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from lmi.errors import shorten
from lmi.gateway.errors import invalid

FOLDER = "^(?!s3:|https:)[a-zA-Z0-9!_.*'()/-]+$"
ASCII, PRINTABLE = r"\p{ASCII}*", r"\A\S[\p{Print}]*\z"
NAME = "^[a-zA-Z0-9](-*[a-zA-Z0-9])*"
SPELLINGS = {r"\p{ASCII}": r"[\x00-\x7f]", r"\p{Print}": r"\x20-\x7e", r"\z": r"\Z"}  # of Java, and of Python


@dataclass(frozen=True)
class AwsMember:
    name: str
    header: str
    pattern: str | None
    minimum: int
    maximum: int

    def takes(self, value: str) -> bool:
        return not self._broken_rule(value)

    def check(self, value: str) -> str:
        """Return the value. Raises AwsError in AWS's own words."""
        if rule := self._broken_rule(value):
            raise invalid(
                f"1 validation error detected: Value {shorten(value)} at '{self.name[0].lower()}{self.name[1:]}' "
                f"failed to satisfy constraint: Member must {rule}"
            )
        return value

    def _broken_rule(self, value: str) -> str:
        """Return the rule that the value breaks, or ""."""
        return self._number_rule(value) if self.pattern is None else self._text_rule(value)

    def _text_rule(self, value: str) -> str:
        if len(value) < self.minimum:
            return f"have length greater than or equal to {self.minimum}"
        if len(value) > self.maximum:
            return f"have length less than or equal to {self.maximum}"
        if not self._regex.fullmatch(value):
            return f"satisfy regular expression pattern: {self.pattern}"
        return ""

    def _number_rule(self, value: str) -> str:
        if not re.fullmatch("[0-9]{1,9}", value):
            return "be a whole number"
        if int(value) < self.minimum:
            return f"have value greater than or equal to {self.minimum}"
        if int(value) > self.maximum:
            return f"have value less than or equal to {self.maximum}"
        return ""

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        pattern = self.pattern or ""
        for theirs, ours in SPELLINGS.items():
            pattern = pattern.replace(theirs, ours)
        return re.compile(pattern, re.DOTALL)


PREFIX = "X-Amzn-SageMaker-"
ENDPOINT_NAME = AwsMember("EndpointName", "", NAME, 0, 63)
COMPONENT_NAME = AwsMember(
    "InferenceComponentName", PREFIX + "Inference-Component", r"^[a-zA-Z0-9]([\-a-zA-Z0-9]*[a-zA-Z0-9])?$", 0, 63
)
CONTENT_TYPE = AwsMember("ContentType", "Content-Type", ASCII, 0, 1024)
ACCEPT = AwsMember("Accept", "Accept", ASCII, 0, 1024)
SESSION_ID = AwsMember("SessionId", PREFIX + "Session-Id", NAME + "$", 0, 256)
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
INVOKE = (
    *COMMON,
    *ROUTED,
    CONTENT_TYPE,
    ACCEPT,
    AwsMember("TargetModel", PREFIX + "Target-Model", PRINTABLE, 1, 1024),
    AwsMember("EnableExplanations", PREFIX + "Enable-Explanations", ".*", 1, 64),
    AwsMember("SessionId", PREFIX + "Session-Id", "^(NEW_SESSION)$|^[a-zA-Z0-9](-*[a-zA-Z0-9])*$", 0, 256),
)
STREAM = (
    *COMMON,
    *ROUTED,
    CONTENT_TYPE,
    AwsMember("Accept", PREFIX + "Accept", ASCII, 0, 1024),
    SESSION_ID,
)
OPENAI = (*COMMON, CONTENT_TYPE, ACCEPT, SESSION_ID)
ASYNC = (
    *COMMON,
    AwsMember("ContentType", PREFIX + "Content-Type", ASCII, 0, 1024),
    AwsMember("Accept", PREFIX + "Accept", ASCII, 0, 1024),
    AwsMember("S3OutputPathExtension", PREFIX + "S3OutputPathExtension", FOLDER, 1, 512),
    AwsMember("Filename", PREFIX + "Filename", r"^(?!.*\..*\.)[a-zA-Z0-9][a-zA-Z0-9-_\.]*$", 1, 32),
    AwsMember("RequestTTLSeconds", PREFIX + "RequestTTLSeconds", None, 60, 21600),
    AwsMember("InvocationTimeoutSeconds", PREFIX + "InvocationTimeoutSeconds", None, 1, 3600),
)
# What a container gets of them, under which name. The others are for the platform.
TO_CONTAINER = {
    "ContentType": "Content-Type",
    "Accept": "Accept",
    "CustomAttributes": PREFIX + "Custom-Attributes",
    "InferenceId": PREFIX + "Inference-Id",
    "SessionId": PREFIX + "Session-Id",
    "TargetModel": PREFIX + "Target-Model",
}


def read(members: tuple[AwsMember, ...], headers: Mapping[str, str]) -> dict[str, str]:
    """Return the checked values by member, of those that were sent. Raises AwsError for a value against its rule."""
    return {member.name: member.check(headers[member.header]) for member in members if member.header in headers}
