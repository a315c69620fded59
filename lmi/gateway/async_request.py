"""Reads the request for an async invocation: where its input is, and where its answer goes."""

import time
import uuid

from lmi.gateway.async_job import TIMEOUT_S, AsyncJob
from lmi.gateway.errors import invalid, too_large
from lmi.gateway.exchange import AwsExchange
from lmi.gateway.members import PREFIX
from lmi.gateway.stores import AnswerRoots, Answers, Inputs

INPUT_LOCATION = PREFIX + "InputLocation"
MAX_INLINE_BYTES = 128_000
MAX_LOCATION_CHARS = 1024
# Of a path, the limit of most file systems.
MAX_PART_CHARS = 255
# AWS's default.
TTL_S = 21_600


def read_job(
    exchange: AwsExchange,
    values: dict[str, str],
    roots: AnswerRoots,
    inputs: Inputs,
    answers: Answers,
) -> AsyncJob:
    """Return the invocation that a request asks for, which has no endpoint yet. Raises AwsError."""
    name = str(uuid.uuid4())
    folder = _folder(values.get("S3OutputPathExtension", ""))
    output = folder + values.get("Filename", f"{name}.out")
    failure = f"{folder}{name}-error.out"
    location = _location(exchange, inputs)
    for root in roots:
        rule = answers.broken_rule(root) if root else ""
        if rule:
            raise invalid(f"S3OutputPath and S3FailurePath {rule}, given {root}.")

    return AsyncJob(
        endpoint="",
        region=exchange.region,
        inference_id=values.get("InferenceId") or str(uuid.uuid4()),
        headers=exchange.headers_for_container(values, ""),
        body=exchange.payload,
        location=location,
        output=answers.url(output, roots.output),
        failure=answers.url(failure, roots.failure),
        expires_s=time.time() + int(values.get("RequestTTLSeconds", TTL_S)),
        timeout_s=int(values.get("InvocationTimeoutSeconds", TIMEOUT_S)),
    )


def _folder(extension: str) -> str:
    """Return the path extension so that a file's name can follow it. Raises AwsError."""
    parts = [part for part in extension.split("/") if part not in ("", ".")]
    if ".." in parts or any(len(part) > MAX_PART_CHARS for part in parts):
        rule = f"must have no part that is .. or longer than {MAX_PART_CHARS}"
        raise invalid(f"S3OutputPathExtension {rule}, given {extension}")

    return "".join(f"{part}/" for part in parts)


def _location(exchange: AwsExchange, inputs: Inputs) -> str:
    """Return where the input is, or "" for one that is the body. Raises AwsError."""
    location = exchange.headers.get(INPUT_LOCATION, "")
    if bool(location) == bool(exchange.payload):
        which = "both" if location else "neither"
        raise invalid(f"Exactly one of Body and InputLocation must be given, not {which}.")

    if len(exchange.payload) > MAX_INLINE_BYTES:
        raise too_large(MAX_INLINE_BYTES)

    is_allowed = len(location) <= MAX_LOCATION_CHARS and inputs.is_allowed(location)
    if location and not is_allowed:
        where = "s3://BUCKET/KEY or a file:// URL below the folder of --async-input"
        raise invalid(
            f"InputLocation must be {where}, with at most {MAX_LOCATION_CHARS} characters, given "
            f"{location}"
        )

    return location
