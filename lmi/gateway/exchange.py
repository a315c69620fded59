"""One exchange with a client of AWS's API: what its request says in headers, who signed it, and the
answer or error.

The table of these headers is botocore's model of the SageMaker runtime, in its words; a test holds
both equal. botocore chooses the class of its exception by the header x-amzn-ErrorType. Every fault
of a container is a ModelError, whose status 424 is never retried.
"""

import hashlib
import hmac
import re
import time
import uuid
from calendar import timegm
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import orjson

from lmi.errors import BadConfiguration, LmiError, shorten
from lmi.http.exchange import ENDPOINT_NAME as ENDPOINT_HEADER, Exchange, Header

ACCOUNT = "000000000000"
VARIANT = "AllTraffic"
# Of an error.
MAX_TEXT_CHARS = 2048
REGION = re.compile(r"Credential=[^/,]+/\d{8}/([a-z0-9-]+)/")
FOLDER = "^(?!s3:|https:)[a-zA-Z0-9!_.*'()/-]+$"
ASCII = r"\p{ASCII}*"
PRINTABLE = r"\A\S[\p{Print}]*\z"
NAME = "^[a-zA-Z0-9](-*[a-zA-Z0-9])*"


class AwsError(LmiError):
    """An error with AWS's class, its status and message, and what else its body holds."""

    def __init__(self, kind: str, status: int, message: str, **members: str | int) -> None:
        super().__init__(message)
        self.kind = kind
        self.label = kind
        self.status = status
        self._further_members = members

    @property
    def members(self) -> dict[str, str | int]:
        members: dict[str, str | int] = {"Message": self.message, **self._further_members}
        for name, value in members.items():
            if isinstance(value, str):
                members[name] = cut(value)

        return members


def cut(text: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def invalid(message: str) -> AwsError:
    """The request is wrong: the client's fault, of the name or header that the message names."""
    return AwsError("ValidationError", 400, message)


def too_large(max_bytes: int) -> AwsError:
    return AwsError(
        "ValidationError", 413, f"The request body must have at most {max_bytes} bytes."
    )


def unavailable(reason: str) -> AwsError:
    """No container takes the request. Clients may retry."""
    return AwsError("ServiceUnavailable", 503, reason)


def model_error(status: int, body: str, endpoint: str, region: str) -> AwsError:
    """The container answered with `status`, 0 if with none, and `body`."""
    side = "client" if 400 <= status < 500 else "server"
    beginning = f'Received {side} error ({status}) from primary with message "'
    ending = "\". See the container's log."
    message = cut(body, MAX_TEXT_CHARS - len(beginning) - len(ending))
    log_group = "/aws/sagemaker/Endpoints"

    return AwsError(
        "ModelError",
        424,
        beginning + message + ending,
        OriginalStatusCode=status,
        OriginalMessage=body,
        LogStreamArn=f"arn:aws:logs:{region}:{ACCOUNT}:log-group:{log_group}/{endpoint}",
    )


@dataclass(frozen=True)
class AwsMember:
    name: str
    header: str
    # With None it is a whole number, and the bounds are its own.
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


PREFIX = "X-Amzn-SageMaker-"
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
        AwsMember("ContentType", PREFIX + "Content-Type", ASCII, 0, 1024),
        OTHER_ACCEPT,
        AwsMember("S3OutputPathExtension", PREFIX + "S3OutputPathExtension", FOLDER, 1, 512),
        AwsMember(
            "Filename", PREFIX + "Filename", r"^(?!.*\..*\.)[a-zA-Z0-9][a-zA-Z0-9-_\.]*$", 1, 32
        ),
        AwsMember("RequestTTLSeconds", PREFIX + "RequestTTLSeconds", None, 60, 21600),
        AwsMember("InvocationTimeoutSeconds", PREFIX + "InvocationTimeoutSeconds", None, 1, 3600),
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


class AwsExchange(Exchange):
    """A request of AWS's API, and its answer. An operation finds the names in its path, and its
    body in `payload`.
    """

    names: Mapping[str, str] = {}
    payload = b""

    def _choose_id(self) -> str:
        return str(uuid.uuid4())

    @property
    def region(self) -> str:
        """The region that the client signed for, else "local"."""
        match = REGION.search(self.headers.get("authorization", ""))
        return match[1] if match else "local"

    def values(self, operation: str) -> dict[str, str]:
        """Return the sent headers of an operation by member. Raises AwsError for a value against
        its rule.
        """
        values = {}
        for member in MEMBERS[operation]:
            if member.header in self.headers:
                values[member.name] = member.check(self.headers[member.header])

        if values.get("TargetVariant", VARIANT) != VARIANT:
            raise invalid(
                f"Variant {values['TargetVariant']} of endpoint {self.names['endpoint']} not found."
            )

        component = self.names.get("component")
        if component:
            values[COMPONENT_NAME.name] = COMPONENT_NAME.check(component)

        return values

    def headers_for_container(self, values: dict[str, str], adapter: str = "") -> list[Header]:
        """Return what a container gets of a request: the members that are for it, and the adapter
        of its component.

        It gets the name of its endpoint too, which some clients send as the name of the model.
        """
        headers = []
        for member, header in TO_CONTAINER.items():
            if member in values:
                headers.append((header, values[member]))

        headers.append((ENDPOINT_HEADER, self.names["endpoint"]))
        if adapter:
            alias = values[COMPONENT_NAME.name]
            headers += [(PREFIX + "Adapter-Identifier", adapter), (PREFIX + "Adapter-Alias", alias)]

        return headers

    async def _start(
        self, status: int, media_type: str, headers: Iterable[Header], length: int | None = None
    ) -> None:
        fields = [("content-type", media_type), ("x-amzn-RequestId", self.request_id)]
        if length is not None:
            fields.append(("content-length", str(length)))

        raw = []
        for name, value in [*fields, *headers]:
            if value:
                raw.append((name.lower().encode(), value.encode("latin-1")))

        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def send_error(self, error: AwsError) -> None:
        """Send an error. A POST of `/` is AWS JSON 1.1, whose clients read its class in
        the body.
        """
        self.error_label = error.kind
        members = error.members
        if (self.method, self.path) == ("POST", "/"):
            members["__type"] = error.kind

        headers = [("x-amzn-ErrorType", error.kind)]
        await self.send_whole(error.status, "application/json", orjson.dumps(members), headers)


SERVICE = "sagemaker"
MAX_SKEW_S = 300.0
AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 "
    r"Credential=(?P<key>[^/,]+)/(?P<day>\d{8})/(?P<region>[^/,]+)/(?P<service>[^/,]+)/"
    r"aws4_request, *"
    r"SignedHeaders=(?P<headers>[^,]+), *Signature=(?P<signature>[0-9a-f]{64})"
)
# These are always among the signed headers.
REQUIRED = {"host", "x-amz-date"}
# AWS has this rule, and these choose the model or its session.
SIGNED_IF_SENT = (
    "x-amz-",
    "x-amzn-sagemaker-",
)
# It is compared with the body.
DIGEST = "x-amz-content-sha256"
TIME_FORM = "%Y%m%dT%H%M%SZ"
NO_MATCH = "The request signature we calculated does not match the signature you provided."


@dataclass(frozen=True, slots=True)
class Signed:
    """What the head of a request says of its signature."""

    # The names of the headers that are signed.
    names: list[str]
    region: str
    date: str
    signature: str
    # The digest of the body, in hex.
    digest: str | None


class Signatures:
    """Checks signatures made with the credentials in `environ`. Raises BadConfiguration without
    these or botocore.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        key = environ.get("AWS_ACCESS_KEY_ID")
        secret = environ.get("AWS_SECRET_ACCESS_KEY")
        if not key or not secret:
            names = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            raise BadConfiguration(f"--check-signatures needs {names}, as clients do")

        try:
            from botocore.credentials import Credentials  # type: ignore[import-untyped]
        except ModuleNotFoundError:
            raise BadConfiguration("--check-signatures needs botocore: pip install boto3") from None

        self._credentials = Credentials(key, secret, environ.get("AWS_SESSION_TOKEN") or None)

    def check_head(self, exchange: AwsExchange) -> Signed:
        """Return what the head says of the signature, before a byte of the body is read.

        Raises AwsError unless it is by these credentials, lately made and bound to this request.
        Where the head has the digest of the body, as that of S3's clients, the signature itself is
        checked here.
        """
        authorization = AUTHORIZATION.fullmatch(exchange.headers.get("authorization", ""))
        if authorization is None:
            raise AwsError(
                "MissingAuthenticationTokenException", 403, "Missing Authentication Token"
            )

        token = exchange.headers.get("x-amz-security-token")
        credentials = (self._credentials.access_key, self._credentials.token)
        if (authorization["key"], token) != credentials:
            message = "The security token included in the request is invalid."
            raise AwsError("UnrecognizedClientException", 403, message)

        date = exchange.headers.get("x-amz-date", "")
        try:
            skew_s = abs(time.time() - timegm(time.strptime(date, TIME_FORM)))
        except ValueError:
            skew_s = float("inf")

        if skew_s > MAX_SKEW_S or not date.startswith(authorization["day"]):
            raise _wrong(
                f"Signature expired or not yet current: X-Amz-Date is more than {MAX_SKEW_S:g} s "
                f"off."
            )

        # What anyone could have added to a signed request, whose meaning it changes.
        names = authorization["headers"].split(";")
        sent = {name for name in exchange.headers.keys() if name.startswith(SIGNED_IF_SENT)}
        unsigned = sorted(sent - {DIGEST, *names})
        if unsigned:
            raise _wrong(
                f"There were headers present in the request which were not signed: "
                f"{', '.join(unsigned)}"
            )

        # A signature that is not bound to this request would be good for others too.
        is_bound = REQUIRED <= set(names) and authorization["service"] == SERVICE
        if not is_bound:
            raise _wrong(NO_MATCH)

        digest = exchange.headers.get(DIGEST)
        signature = authorization["signature"]
        signed = Signed(names, authorization["region"], date, signature, digest)
        if digest is not None:
            # It may be none, as UNSIGNED-PAYLOAD.
            if not re.fullmatch("[0-9a-f]{64}", digest):
                raise _wrong(NO_MATCH)

            self._compare(exchange, signed, digest)

        return signed

    def check_body(self, exchange: AwsExchange, signed: Signed) -> None:
        """Raise AwsError unless the body is the one that was signed."""
        digest = hashlib.sha256(exchange.payload).hexdigest()
        if signed.digest is None:
            self._compare(exchange, signed, digest)
        elif signed.digest != digest:
            raise _wrong(NO_MATCH)

    def _compare(self, exchange: AwsExchange, signed: Signed, digest: str) -> None:
        """Raise AwsError unless the request has the signature that it has with this digest of its
        body.
        """
        from botocore.auth import SigV4Auth  # type: ignore[import-untyped]
        from botocore.awsrequest import AWSRequest  # type: ignore[import-untyped]

        scope = exchange.scope
        query = scope["query_string"].decode("latin-1")
        url = f"http://{exchange.headers['host']}{scope['raw_path'].decode('latin-1')}"
        if query:
            url += f"?{query}"

        headers = {name: ",".join(exchange.headers.getlist(name)) for name in signed.names}
        request = AWSRequest(exchange.method, url, headers)
        request.context["timestamp"] = signed.date

        signer = SigV4Auth(self._credentials, SERVICE, signed.region)
        signer.payload = lambda request: digest
        canonical_request = signer.canonical_request(request)
        text_to_sign = signer.string_to_sign(request, canonical_request)
        signature = signer.signature(text_to_sign, request)
        if not hmac.compare_digest(signature, signed.signature):
            raise _wrong(NO_MATCH)


def _wrong(message: str) -> AwsError:
    return AwsError("InvalidSignatureException", 403, message)
