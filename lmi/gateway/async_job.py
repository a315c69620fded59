"""One async invocation: what the client asked for, and the file that becomes of it."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import NamedTuple

from lmi.gateway.container import Answer, Header
from lmi.gateway.endpoints import Endpoint
from lmi.gateway.errors import AwsError, invalid, model_error, too_large
from lmi.gateway.gateway import Request, headers_for_container
from lmi.gateway.invocations import MAX_HEADER_BYTES
from lmi.gateway.members import ASYNC, PREFIX
from lmi.gateway.stores import Inputs

INPUT_LOCATION = PREFIX + "InputLocation"
MAX_INLINE_BYTES = 128_000
MAX_LOCATION_CHARS = 1024
MAX_PART_CHARS = 255  # of a path, the limit of most file systems
TTL_S, TIMEOUT_S = 21_600, 900  # AWS's defaults


class File(NamedTuple):
    """What an invocation leaves: a file at `path` below the place of all answers."""

    path: str
    data: bytes
    media_type: str


@dataclass(frozen=True, kw_only=True)
class Job:
    """An accepted invocation. `input` is the body, or the location of it.

    It may wait for `ttl_s` until a worker takes it, and may then take `timeout_s`.
    """

    endpoint: Endpoint
    region: str
    inference_id: str
    headers: list[Header]
    input: bytes | str
    output: str
    failure: str
    ttl_s: float = TTL_S
    timeout_s: float = TIMEOUT_S
    accepted_s: float = field(default_factory=time.monotonic)

    @property
    def is_expired(self) -> bool:
        return time.monotonic() - self.accepted_s > self.ttl_s

    def error(self, reason: str, status: int = 0) -> AwsError:
        """Return the error of a container that answered with `status` and `reason`, or with none."""
        return model_error(status, reason, self.endpoint.name, self.region)

    def failed(self, error: AwsError) -> File:
        return File(self.failure, error.body, "application/json")

    def succeeded(self, answer: Answer, body: bytes) -> File:
        """Return the answer as a file. Raises AwsError for one that fails in production too."""
        if answer.status >= 300:
            raise self.error(body.decode(errors="replace"), answer.status)
        if answer.header("content-length") is None:
            raise self.error("The response did not specify the required Content-Length header.")
        if answer.num_header_bytes > MAX_HEADER_BYTES:
            found, limit = answer.num_header_bytes, MAX_HEADER_BYTES
            raise self.error(f"The headers of the response have {found} bytes together, more than {limit}.")
        return File(self.output, body, answer.header("content-type") or "application/octet-stream")


def read_job(request: Request, endpoint: Endpoint, inputs: Inputs) -> Job:
    """Return the invocation that a request asks for. Raises AwsError."""
    values = request.values(ASYNC)
    id, folder = str(uuid.uuid4()), _folder(values.get("S3OutputPathExtension", ""))
    return Job(
        endpoint=endpoint,
        region=request.region,
        inference_id=values.get("InferenceId") or str(uuid.uuid4()),
        headers=headers_for_container(values, endpoint.name),
        input=_input(request, inputs),
        output=folder + values.get("Filename", f"{id}.out"),
        failure=f"{folder}{id}-error.out",
        ttl_s=int(values.get("RequestTTLSeconds", TTL_S)),
        timeout_s=int(values.get("InvocationTimeoutSeconds", TIMEOUT_S)),
    )


def _folder(extension: str) -> str:
    """Return the path extension so that a file's name can follow it. Raises AwsError."""
    parts = [part for part in extension.split("/") if part not in ("", ".")]
    if ".." in parts or any(len(part) > MAX_PART_CHARS for part in parts):
        rule = f"must have no part that is .. or longer than {MAX_PART_CHARS}"
        raise invalid(f"S3OutputPathExtension {rule}, given {extension}")
    return "".join(f"{part}/" for part in parts)


def _input(request: Request, inputs: Inputs) -> bytes | str:
    location = request.exchange.headers.get(INPUT_LOCATION, "")
    if bool(location) == bool(request.body):
        given = "both" if location else "neither"
        raise invalid(f"Exactly one of Body and InputLocation must be given, not {given}.")
    if len(request.body) > MAX_INLINE_BYTES:
        raise too_large(MAX_INLINE_BYTES)
    if location and (len(location) > MAX_LOCATION_CHARS or not inputs.is_allowed(location)):
        where = "s3://BUCKET/KEY or a file:// URL below the folder of --async-input"
        raise invalid(f"InputLocation must be {where}, with at most {MAX_LOCATION_CHARS} characters, given {location}")
    return location or request.body
